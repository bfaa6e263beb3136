"""Reading exports back: malformed lines, files that are not whole, foreign exports, the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.cli import main
from penstock.errors import InvalidInput, UnknownKey
from penstock.view import Export, reader
from penstock.view.record import Skipped
from penstock.view.tallies import tally
from tests.support.exports import make_export


def plain_line(**changes: Any) -> bytes:
    record = {
        "schema_version": 1,
        "step": 1,
        "rank": 0,
        "token_ids": [5, 6, 7],
        "loss_mask": [False, True, True],
        "mismatch_kl": [9.0, 0.5, None],
        "entropy": [9.0, 1.0, 3.0],
    }
    return json.dumps({**record, **changes}).encode() + b"\n"


def foreign(folder: Path, data: bytes, *, stable: bool = True) -> Export:
    """An export as another program would write it: no markers of ours."""
    step = folder / "token_exports/step_1"
    step.mkdir(parents=True)
    (step / "rank_0.jsonl").write_bytes(data)
    if stable:
        (step / "STABLE").touch()
    return Export(folder)


BAD_LINES = {
    "half a line": plain_line()[:-20] + b"\n",
    "not json": b"hello\n",
    "not an object": b"[1, 2]\n",
    "nan literal": plain_line().replace(b"0.5", b"NaN"),
    "infinity literal": plain_line().replace(b"0.5", b"Infinity"),
    "wrong length": plain_line(entropy=[1.0]),
    "text for a number": plain_line(entropy=[1.0, "2", 3.0]),
    "a number beyond its type": plain_line(token_ids=[1, 2, 2**40]),
    "negative id": plain_line(token_ids=[1, 2, -3]),
    "no mask": plain_line().replace(b'"loss_mask"', b'"lost_mask"'),
    "null in the mask": plain_line(loss_mask=[False, None, True]),
    "lone surrogate": plain_line(env_name="x").replace(b'"x"', b'"\\ud800"'),
    "invalid utf-8": plain_line(env_name="x").replace(b'"x"', b'"\xff"'),
    "nested deeply": b"[" * 100_000 + b"\n",
    "zero bytes": b"\0" * 100 + b"\n",
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_malformed_line_is_counted_and_its_neighbours_are_read(tmp_path: Path, name: str) -> None:
    export = foreign(tmp_path, plain_line() + BAD_LINES[name] + plain_line())
    skipped = Skipped()
    assert len(list(export.step(1).records(skipped))) == 2
    assert skipped.lines == 1 and skipped.reasons[0].startswith("rank_0.jsonl:2: ")


@pytest.mark.parametrize(
    "data",
    [
        plain_line().rstrip(b"\n"),
        plain_line().replace(b"\n", b"\r\n"),
        b"\n\n" + plain_line() + b"\n",
        plain_line(env_name="a\u2028b"),
        plain_line(unknown_field={"a": 1}, step=1),
    ],
    ids=["no newline at the end", "crlf", "empty lines", "line separator", "unknown field"],
)
def test_unusual_but_sound_lines_are_read(tmp_path: Path, data: bytes) -> None:
    skipped = Skipped()
    assert len(list(foreign(tmp_path, data).step(1).records(skipped))) == 1 and skipped.lines == 0


def test_a_byte_order_mark_costs_one_line(tmp_path: Path) -> None:
    skipped = Skipped()
    export = foreign(tmp_path, b"\xef\xbb\xbf" + plain_line() + plain_line())
    assert len(list(export.step(1).records(skipped))) + skipped.lines == 2


def test_a_line_beyond_all_bounds_is_skipped_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_LINE_BYTES", 1000)
    export = foreign(tmp_path, plain_line() + b'"' + b"x" * 5000 + b'"\n' + plain_line())
    skipped = Skipped()
    assert len(list(export.step(1).records(skipped))) == 2 and skipped.lines == 1


def test_only_trained_tokens_with_finite_values_count(tmp_path: Path) -> None:
    summary = tally(foreign(tmp_path, plain_line()).step(1).records()).as_dict()
    assert summary["mismatch_kl"] == {"count": 1, "mean": 0.5, "min": 0.5, "max": 0.5}
    assert summary["entropy"] == {"count": 2, "mean": 2.0, "min": 1.0, "max": 3.0}
    assert summary["masked_fraction"] == {} and summary["reward"] is None


def test_steps_that_are_not_stable_are_not_shown(tmp_path: Path) -> None:
    export = foreign(tmp_path, plain_line(), stable=False)
    assert export.steps() == []
    with pytest.raises(UnknownKey, match="no finished step 1; the last finished ones: none yet"):
        export.step(1)


def test_steps_come_in_order_of_their_number(tmp_path: Path) -> None:
    make_export(tmp_path, steps=11, groups=1, size=1)
    (tmp_path / "token_exports/step_x").mkdir()
    assert [step.number for step in Export(tmp_path).steps()] == list(range(1, 12))
    assert [step.number for step in Export(tmp_path).steps(after=9)] == [10, 11]


def test_a_folder_without_exports_is_an_error_that_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no token_exports in it"):
        Export(tmp_path)


def test_the_exports_folder_itself_will_do(tmp_path: Path) -> None:
    make_export(tmp_path, steps=1, groups=1, size=1)
    assert Export(tmp_path / "token_exports").steps()[0].number == 1


def test_tokens_command_prints_means_and_maxima_of_one_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_export(tmp_path, steps=3)
    assert main(["tokens", str(tmp_path), "--step", "2", "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["steps"]
    records = list(Export(tmp_path).step(2).records())
    kl = np.concatenate(
        [r.columns["mismatch_kl"][r.columns["loss_mask"]] for r in records if "mismatch_kl" in r.columns]
    )
    kl = kl[np.isfinite(kl)].astype(np.float64)
    assert report["step"] == 2 and report["records"] == len(records)
    assert report["mismatch_kl"]["mean"] == pytest.approx(kl.mean()) and report["mismatch_kl"]["max"] == kl.max()
    assert 0 < report["masked_fraction"]["is_masked"] < 1
    assert report["malformed_lines"] == 0 and report["altered_files"] == []


def test_tokens_command_reads_all_steps_and_says_what_it_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_export(tmp_path, steps=2)
    path = tmp_path / "token_exports/step_2/rank_1.jsonl"
    path.write_bytes(path.read_bytes() + b"junk\n")
    assert main(["tokens", str(tmp_path)]) == 1  # a damaged file; its whole records are shown
    out = capsys.readouterr()
    assert [line.split()[0] for line in out.out.splitlines()[1:]] == ["1", "2"]
    assert "step 2: 1 malformed line skipped" in out.err and "rank_1.jsonl is not what its rank wrote" in out.err


def test_tokens_command_fails_on_a_step_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_export(tmp_path, steps=1, groups=1, size=1)
    assert main(["tokens", str(tmp_path), "--evaluation"]) == 1
    assert "--evaluation: no evaluation groups are in the export" in capsys.readouterr().err
    assert main(["tokens", str(tmp_path), "--step", "9"]) == 1
    assert "no finished step 9; the last finished ones: 1" in capsys.readouterr().err
