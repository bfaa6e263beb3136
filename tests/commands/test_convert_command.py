"""`penstock convert`: which format a file is, what is said of what was lost, streams, errors that name their place."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.cli import main
from penstock.errors import InvalidInput
from penstock.integrations.formats.file_formats import FORMATS, convert_files, format_to_read, format_to_write
from penstock.integrations.formats.shared import Options, Place
from tests.support.exports import make_export

COLUMNS: dict[str, Any] = {"loss_mask": [0, 1, 1], "logprobs": [0, -0.5, -0.25]}
GROUP = [
    ps.Sample(
        id=f"g/{i}", group="g", env="math", token_ids=[1, 2, 3 + i], rewards=float(i), columns={"task": 4}, **COLUMNS
    )
    for i in range(2)
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("in.penstock").write_bytes(ps.encode(GROUP) + ps.encode([GROUP[0].replace(id="h/0", group="h")]))
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["convert", *words]) == (1 if len(words) > 1 else 2)
    text = capsys.readouterr().err
    assert text.startswith("penstock convert: ") and text.count("\n") == 1, text
    return text.removeprefix("penstock convert: ").rstrip()


def test_a_file_is_converted_and_the_report_says_what_had_no_place(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", "in.penstock", "out.pt"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "in.penstock (frames) -> out.pt (slime)"
    assert re.fullmatch(r"3 samples in 2 groups, 9 tokens \(6 trained\), [\d.]+ KiB, [\d.]+ s", lines[1])
    assert lines[2:] == ["not written  task (3)"]
    assert main(["convert", "out.pt", "back.jsonl", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["inputs"] == [{"file": "out.pt", "format": "slime"}]
    assert report["output"] == {"file": "back.jsonl", "format": "jsonl"}
    assert (report["samples"], report["groups"], report["tokens"], report["loss_tokens"]) == (3, 2, 9, 6)
    assert report["unread"] == report["unwritten"] == report["left_out"] == {}


def test_losses_make_the_exit_code_1_only_with_strict(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "in.penstock", "a.parquet", "--strict"]) == 0
    assert main(["convert", "in.penstock", "a.npz", "--strict"]) == 1
    assert "task (3)" in capsys.readouterr().out and Path("a.npz").exists()
    assert main(["convert", "in.penstock", "a.trl.jsonl"]) == 0
    assert capsys.readouterr().out.endswith("left out     no advantages (3)\nwritten      0 of 3 samples\n")
    assert main(["convert", "in.penstock", "b.trl.jsonl", "--advantages", "grpo"]) == 0
    assert "left out" not in capsys.readouterr().out
    assert [json.loads(line)["advantage"] for line in Path("b.trl.jsonl").read_text().splitlines()] == [-0.5, 0.5, 0.0]


def test_standard_input_and_output_carry_frames_and_lines(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert main(["convert", "in.penstock", "-", "--to", "frames"]) == 0
    frames, report = capfdbinary.readouterr()
    assert report.startswith(b"in.penstock (frames) -> - (frames)\n3 samples")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(frames))))
    assert main(["convert", "-", "-", "--to", "jsonl"]) == 0
    lines, _ = capfdbinary.readouterr()
    assert [json.loads(line)["id"] for line in lines.splitlines()] == ["g/0", "g/1", "h/0"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(lines))))
    assert main(["convert", "-", "out.parquet"]) == 0
    convert_files(["out.parquet"], "back.penstock")
    assert Path("back.penstock").read_bytes() == b"".join(
        ps.encode(group, "small") for group in (GROUP, [GROUP[0].replace(id="h/0", group="h")])
    )


def test_several_files_become_one(folder: Path) -> None:
    convert_files(["in.penstock"], "a.jsonl")
    done = convert_files(["in.penstock", "a.jsonl", "a.jsonl"], "all.parquet")
    assert done.samples == 9 and done.sources == ("frames", "jsonl", "jsonl")


def test_a_folder_of_steps_is_written_for_prime_rl(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["in.penstock", "outputs/rollouts", "--to", "prime-rl", "--ranks", "2", "--seq-len", "8"]
    assert main(["convert", *words, "--advantages=raw_rewards", "--samples-per-step", "2", "--first-step", "5"]) == 0
    files = sorted(str(path) for path in Path("outputs/rollouts").rglob("*.bin"))
    assert files == [f"outputs/rollouts/step_{n}/rank_{r}.bin" for n in (5, 6) for r in (0, 1)]
    capsys.readouterr()
    again = said(capsys, *words, "--advantages=raw_rewards", "--first-step=5")
    assert "step_5: already exists; pass --first-step" in again
    assert main(["convert", "outputs/rollouts", "back.penstock"]) == 0
    assert "3 samples" in capsys.readouterr().out


def test_token_exports_of_a_run_are_read_as_samples(tmp_path: Path) -> None:
    make_export(tmp_path / "run", steps=1)
    file = next((tmp_path / "run").rglob("rank_0.jsonl"))
    done = convert_files([str(file)], str(tmp_path / "out.penstock"))
    assert done.sources == ("tokens",) and done.samples > 0 and "trainer_logprobs" in done.lost.unread
    assert "inference_logprobs" not in done.lost.unread


def test_groups_of_a_run_are_read_also_while_its_plane_is_at_work(folder: Path) -> None:
    group = [sample.replace(columns={"task": None}, advantages=1.0) for sample in GROUP]
    other = [sample.replace(id=f"e/{i}", group="e") for i, sample in enumerate(group)]
    with ps.open("runs/x/plane", ranks=1, seq_len=8, groups_per_step=1) as plane:
        plane.put(group)
        plane.put(other, evaluation=True)
        working = convert_files(["runs/x"], "a.penstock")
    done = convert_files(["runs/x/plane"], "b.penstock")
    assert working.sources == done.sources == ("run",) and done.samples == 4
    assert (
        Path("a.penstock").read_bytes()
        == Path("b.penstock").read_bytes()
        == b"".join(ps.encode(each, "small") for each in (group, other))
    )
    with pytest.raises(InvalidInput, match=r"in.penstock: not a run"):
        convert_files(["in.penstock"], "c.jsonl", source="run")


def test_formats_are_listed_and_each_is_documented(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "--formats"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert listed == list(FORMATS)
    page = (Path(__file__).parents[2] / "docs" / "integrations" / "files.md").read_text()
    assert all(f"| `{name}` |" in page for name in listed)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "no files: give a file to read and one to write; see --help"),
        (["in.penstock"], "in.penstock: give a file to read and one to write; see --help"),
        (["none.penstock", "out.jsonl"], "none.penstock: No such file or directory"),
        (
            ["in.penstock", "in.penstock"],
            "in.penstock: already exists; choose another name, or pass --force to overwrite it",
        ),
        (["in.penstock", "out.xyz"], "out.xyz: no format has this ending; name one with --to, see --formats"),
        (["in.penstock", "x", "--to", "tokens"], "format 'tokens': cannot write it; use one of frames, trl, slime,"),
        (["odd.txt", "x.jsonl"], "odd.txt: unknown format; name it with --from, see --formats"),
        (["-", "x.jsonl", "--from", "parquet"], "-: this format needs a file and cannot use a stream"),
        (["bad.jsonl", "x.penstock"], "bad.jsonl:2: not JSON ("),
        (["short.jsonl", "x.penstock"], "short.jsonl:1: sample 'a'.loss_mask: 1 values for 2 tokens;"),
        (["cut.penstock", "x.jsonl"], "cut.penstock frame 1: "),
        (["in.penstock", "empty", "--to", "jsonl"], "empty: a folder; name a file to write"),
        (["in.penstock", "none/x.jsonl"], "none/x.jsonl: folder none does not exist; create it first"),
        (["empty", "x.jsonl"], "empty: no run and no step_N/rank_R.bin in it; give a run's folder"),
    ],
)
def test_what_is_wrong_is_said_with_its_file_its_place_and_what_to_do(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    Path("odd.txt").write_text("hello")
    Path("bad.jsonl").write_text('{"token_ids": [1]}\n{"token_ids": [1\n')
    Path("short.jsonl").write_text('{"id": "a", "token_ids": [1, 2], "loss_mask": [true]}\n')
    Path("cut.penstock").write_bytes(Path("in.penstock").read_bytes()[:-5])
    Path("empty").mkdir()
    before = sorted(Path().iterdir())
    assert said(capsys, *words).startswith(expected)
    assert sorted(Path().iterdir()) == before  # nothing half written stays


def test_a_stream_with_another_own_column_later_is_refused_for_parquet(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = [GROUP[0].replace(id=f"h/{i}", group="h") for i in range(300)] + [
        GROUP[0].replace(id="i/0", group="i", columns={"other": 1})
    ]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(b"".join(map(encoded, later))))))
    with pytest.raises(InvalidInput, match=r"sample 'i/0': column 'other' differs from the samples before it"):
        convert_files(["-"], "out.parquet")
    Path("later.penstock").write_bytes(b"".join(map(encoded, later)))
    assert convert_files(["later.penstock"], "out.parquet").samples == 301


def test_samples_without_an_id_are_called_by_their_file_and_line(folder: Path) -> None:
    Path("x.jsonl").write_text('{"token_ids": [1]}\n\n{"token_ids": [2]}\n')
    Path("y.jsonl").write_text('{"tokens": [1, 2], "response_length": 1}\n')
    convert_files(["x.jsonl", "y.jsonl"], "out.jsonl")
    ids = [json.loads(line)["id"] for line in Path("out.jsonl").read_text().splitlines()]
    assert ids == ["x.jsonl:1", "x.jsonl:3", "y.jsonl:0"]


def encoded(sample: ps.Sample) -> bytes:
    return ps.encode([sample])


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        ({"input_ids": [1], "completion_mask": [0], "old_log_probs": [0.0]}, "trl"),
        ({"tokens": [1], "response_length": 0}, "slime"),
        ({"event_type": "reward", "rollout_id": "r"}, "agent-lightning"),
        ({"token_ids": [1], "inference_logprobs": [0.0]}, "tokens"),
        ({"token_ids": [1]}, "jsonl"),
    ],
)
def test_lines_are_told_apart_by_their_fields(tmp_path: Path, start: dict[str, Any], kind: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"prompt": "p" * 100_000, **start}) + "\n")
    assert format_to_read(Place(str(path))).name == kind
    assert format_to_write("x.jsonl").name == "jsonl" and format_to_write("x.trl.jsonl").name == "trl"


def test_advantages_are_made_of_rewards_group_by_group(folder: Path) -> None:
    with pytest.raises(InvalidInput, match="advantage 'ppo': unknown advantage"):
        convert_files(["in.penstock"], "out.jsonl", options=Options(advantages="ppo"))
    Path("x.jsonl").write_text('{"id": "a", "token_ids": [1]}\n')
    with pytest.raises(InvalidInput, match=r"sample 'a'.rewards: no single reward; advantages need"):
        convert_files(["x.jsonl"], "out.jsonl", options=Options(advantages="grpo"))
