"""The command line: what it prints, what it returns, and what it says when something is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from benchmarks import data, wire
from benchmarks.report import Row, as_json, as_table
from penstock.cli import main
from penstock.commands.inspect import inspect_frame

pytestmark = pytest.mark.process

GROUP = [
    ps.Sample(
        id=f"p/{i}",
        group="p",
        env="math",
        token_ids=range(40 + i),
        loss_mask=[False] * 39 + [True] * (i + 1),
        rewards=i,
    )
    for i in range(25)
]


@pytest.fixture
def frame_file(tmp_path: Path) -> Path:
    path = tmp_path / "group.frame"
    path.write_bytes(ps.encode(GROUP))
    return path


def test_inspect_shows_samples_columns_codings_and_bytes(frame_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(frame_file)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("25 samples, 1,300 tokens (325 trained, ")
    lines = text.splitlines()
    columns = {line.split()[0] for line in lines[3 : lines.index("", 3)]}
    assert {"token_ids", "loss_mask", "rewards", "lengths", "id", "shared", "header"} <= columns
    assert any("narrow" in line and "shared prefixes" in line for line in lines)
    assert "p/19" in text
    assert "p/20" not in text
    assert "and 5 more" in text


def test_inspect_shows_a_file_of_several_frames_line_by_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "groups.penstock"
    others = [sample.replace(id=f"q/{i}", group="q") for i, sample in enumerate(GROUP[:2])]
    path.write_bytes(ps.encode(GROUP) + ps.encode(others))
    assert main(["inspect", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 frames, 27 samples, 1,381 tokens (328 trained), ")
    assert [line.split()[:5] for line in lines[3:]] == [["0", "p", "25", "1,300", "325"], ["1", "q", "2", "81", "3"]]
    assert main(["inspect", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["frames"] == 2 and report["bytes"] == path.stat().st_size and report["columns"]["rewards"] == 2
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["inspect", str(path)]) == 1
    assert "groups.penstock frame 1: " in capsys.readouterr().err


def test_inspect_json_is_one_object_with_every_sample(frame_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(frame_file), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == inspect_frame(frame_file.read_bytes())
    assert report["bytes"] == frame_file.stat().st_size
    assert [row["id"] for row in report["rows"]] == [sample.id for sample in GROUP]
    assert [row["loss_tokens"] for row in report["rows"]] == [sample.loss_tokens for sample in GROUP]
    assert 0 <= report["bytes"] - sum(column["bytes"] for column in report["columns"]) < 8 * len(report["columns"])


def test_inspect_escapes_what_a_terminal_would_act_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.frame"
    path.write_bytes(ps.encode([ps.Sample(id="a\u202eb", token_ids=[1], group="數學")]))
    assert main(["inspect", str(path)]) == 0
    text = capsys.readouterr().out
    assert "\u202e" not in text
    assert "a\\u202eb" in text
    assert "數學" in text


def test_a_damaged_frame_is_one_line_on_stderr_and_exit_code_1(
    frame_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame_file.write_bytes(frame_file.read_bytes()[:-1])
    assert main(["inspect", str(frame_file)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("penstock inspect: frame: ")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("words", [["--nonsense"], ["inspect"], ["bench", "nonsense"]])
def test_words_that_make_no_command_exit_with_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"penstock {ps.__version__}\n"


def test_frames_are_as_small_as_the_wire_benchmark_asks() -> None:
    generator = np.random.default_rng(7)
    rows = [
        *wire._sizes("sample", data.long_sample(generator), fast=128_000, small=108_000),
        *wire._sizes("turns", data.turns_as_samples(generator, rollouts=2), fast=1.0, small=0.6, per_token=True),
    ]
    assert [row.ok for row in rows] == [True, True, None] * 2
    contract = {"name", "ours", "rival", "rival_name", "ratio", "target", "ok"}
    report = as_json("wire", rows)
    assert {"bench", "machine", "versions", "rows"} == report.keys()
    assert all(contract <= row.keys() for row in report["rows"])


ROWS = [
    Row(name="fast enough", ours=2.0, rival=6.0, rival_name="lists", ratio=3.0, unit="ms", target=2.5),
    Row(name="too large", ours=9.0, unit="B", target=8.0, bound="max"),
    Row(name="colour", ours=1.5),
]


def test_a_row_is_judged_by_its_own_kind_of_bound() -> None:
    assert [row.ok for row in ROWS] == [True, False, None]
    assert Row(name="rate", ours=9.0, target=8.0, bound="min").ok
    assert Row(name="no rival installed", ours=9.0, target=8.0, skipped="cpprb is not installed").ok is None


def test_reports_for_people_and_programs_hold_every_row() -> None:
    table = as_table("demo", ROWS)
    assert "MISSED" in table
    assert "≥ 2.5x" in table
    assert [row["ok"] for row in as_json("demo", ROWS)["rows"]] == [True, False, None]
    json.dumps(as_json("demo", ROWS))
