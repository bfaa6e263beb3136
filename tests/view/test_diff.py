"""Where two runs first differ: every column, samples only one has, lengths, steps, and the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cli import main
from penstock.errors import InvalidInput
from penstock.view import Export
from penstock.view.diff import compare
from penstock.view.record import TABLE
from tests.support.exports import make_export

# Every required column but those that the invented run does not have apart from others.
CHANGED = [column.name for column in TABLE if column.required]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "a"
    make_export(folder, steps=3, ranks=2, groups=2, size=2)
    return folder


def changed(run: Path, to: Path, step: int, edit: Any, *, rank: int = 1) -> Path:
    """A copy of the run with one record of a step edited; markers keep the digests of before, as an edit would."""
    import shutil

    shutil.copytree(run, to, dirs_exist_ok=True)
    path = to / f"token_exports/step_{step}/rank_{rank}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    edit(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return to


def test_a_run_is_the_same_as_itself(run: Path) -> None:
    difference = compare(Export(run), Export(run))
    assert difference.what == "same" and (difference.steps_compared, difference.samples_compared) == (3, 12)
    assert re.fullmatch(r"No difference in 3 steps, 12 samples and [\d,]+ tokens\.", difference.sentence)


@pytest.mark.parametrize("column", CHANGED)
def test_a_change_of_one_value_is_found_with_its_place(run: Path, tmp_path: Path, column: str) -> None:
    seen: dict[str, Any] = {}

    def edit(lines: list[dict[str, Any]]) -> None:
        line = next(line for line in lines if line["training_mode"] == "rl")
        values = line[column]
        old = values[40]
        values[40] = not old if isinstance(old, bool) else (old or 0) + 1
        seen.update(id=line["sample_id"], values=(old, values[40]))

    other = changed(run, tmp_path / "b", 2, edit)
    difference = compare(Export(run), Export(other))
    assert (difference.what, difference.step, difference.sample_id, difference.token, difference.column) == (
        "token",
        2,
        seen["id"],
        40,
        column,
    )
    assert difference.values == pytest.approx(seen["values"])
    assert difference.steps_compared == 1 and difference.rank == 1
    assert compare(Export(run), Export(other), step=1).what == "same"


@settings(max_examples=15)
@given(tokens=st.lists(st.integers(1, 60), min_size=1, max_size=5, unique=True))
def test_the_first_token_wins_and_at_it_the_first_column(
    run: Path, tmp_path_factory: pytest.TempPathFactory, tokens: list[int]
) -> None:
    def edit(lines: list[dict[str, Any]]) -> None:
        for token in tokens:
            for column in ("entropy", "trainer_logprobs"):
                lines[0][column][token] += 1

    other = changed(run, tmp_path_factory.mktemp("b") / "b", 1, edit)
    difference = compare(Export(run), Export(other))
    assert (difference.token, difference.column) == (min(tokens), "trainer_logprobs")


def test_a_null_on_one_side_is_a_difference_and_on_both_is_none(run: Path, tmp_path: Path) -> None:
    other = changed(run, tmp_path / "b", 1, lambda lines: lines[0]["rewards"].__setitem__(3, None))
    difference = compare(Export(run), Export(other))
    assert (
        (difference.column, difference.token) == ("rewards", 3)
        and difference.values is not None
        and difference.values[1] is None
    )
    assert compare(Export(other), Export(other)).what == "same"


def test_runs_without_an_id_in_common_are_said_to_have_none(run: Path, tmp_path: Path) -> None:
    def rename(lines: list[dict[str, Any]]) -> None:
        for line in lines:
            line["sample_id"] = f"other-{line['sample_id']}"

    half = changed(run, tmp_path / "b", 2, rename, rank=0)
    difference = compare(Export(run), Export(changed(half, tmp_path / "c", 2, rename)))
    assert (difference.what, difference.step) == ("samples", 2)
    assert "has the id of one of B (other-" in difference.sentence


def test_a_sample_only_one_run_trained_is_named(run: Path, tmp_path: Path) -> None:
    gone: list[str] = []
    other = changed(run, tmp_path / "b", 3, lambda lines: gone.append(lines.pop()["sample_id"]))
    difference = compare(Export(run), Export(other))
    said = f"The runs first differ at step 3: only A trained sample {gone[0]}; 3 samples of that step are in both."
    assert difference.sentence == said
    assert compare(Export(other), Export(run)).sentence.startswith("The runs first differ at step 3: only B")


def test_a_shorter_sample_parts_at_its_end(run: Path, tmp_path: Path) -> None:
    def edit(lines: list[dict[str, Any]]) -> None:
        count = len(lines[0]["token_ids"])
        for values in lines[0].values():
            if isinstance(values, list) and len(values) == count:
                values.pop()

    difference = compare(Export(run), Export(changed(run, tmp_path / "b", 1, edit)))
    assert difference.what == "length" and "tokens." in difference.sentence


def test_order_and_place_do_not_matter_when_samples_have_ids(run: Path, tmp_path: Path) -> None:
    other = changed(run, tmp_path / "b", 1, lambda lines: lines.reverse())
    assert compare(Export(run), Export(other)).what == "same"


def test_a_run_that_went_on_is_the_same_up_to_there(run: Path, tmp_path: Path) -> None:
    import shutil

    other = tmp_path / "b"
    shutil.copytree(run, other)
    shutil.rmtree(other / "token_exports/step_3")
    difference = compare(Export(run), Export(other))
    assert difference.sentence == "The runs are the same up to step 3, which B has not finished."
    with pytest.raises(InvalidInput, match="no finished step in both"):
        compare(Export(run), Export(other), step=3)


def test_diff_command_says_one_sentence_and_its_exit_code_tells(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(run), str(run)]) == 0
    capsys.readouterr()
    other = changed(run, tmp_path / "b", 2, lambda lines: lines[0]["entropy"].__setitem__(7, 1.5))
    assert main(["diff", str(run), str(other), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["step"], report["token"], report["column"]) == (2, 7, "entropy") and report["values"][1] == 1.5
    assert main(["diff", str(run), str(other)]) == 1
    assert capsys.readouterr().out.startswith("The runs first differ at step 2, sample s2-g")


def test_diff_command_escapes_what_a_terminal_would_act_on(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rename(lines: list[dict[str, Any]]) -> None:
        lines[0]["sample_id"] = "\x1b]0;owned\x07\u202e"

    assert main(["diff", str(changed(run, tmp_path / "b", 2, rename)), str(run)]) == 1
    shown = capsys.readouterr().out
    assert "\\x1b]0;owned\\x07\\u202e" in shown and all(c.isprintable() or c == "\n" for c in shown)
