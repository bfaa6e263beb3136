"""The contract of every benchmark: what a row says, and when it is met, missed or skipped."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.report import Row, Spread, as_json, as_table, faster, skipped
from penstock.cli import main


def test_a_skipped_row_is_neither_met_nor_missed_and_says_why() -> None:
    row = skipped("hand-off", "ray is not installed", ours=9.0, unit="ms", rival_name="Ray", target=5.0)
    assert row.ok is None
    made = as_json("deliver", [row])["rows"][0]
    assert (made["ratio"], made["ok"], made["skipped"]) == (None, None, "ray is not installed")
    table = as_table("deliver", [row, row])
    assert table.count("skipped: ray is not installed") == 1
    assert "MISSED" not in table


def test_a_row_that_was_measured_is_not_skipped() -> None:
    made = as_json("path", [faster("a", 1.0, 2.0, "b", target=3.0)])["rows"][0]
    assert (made["ratio"], made["ok"], made["skipped"]) == (2.0, False, "")


def test_a_row_of_numpy_values_is_written_as_json() -> None:
    row = Row(name="growth", ours=np.float64(1.1), target=2.0, bound="max")
    assert row.ok is True and json.loads(json.dumps(as_json("growth", [row])))["rows"][0]["ok"] is True


def test_a_skipped_row_need_not_have_a_figure_of_ours() -> None:
    row = skipped("2M tokens to tensors", "torch is not installed", target=80.0)
    assert "2M tokens to tensors" in as_table("pack", [row])


@pytest.mark.parametrize(("bound", "ours", "ok"), [("max", 5.0, True), ("max", 5.1, False), ("min", 4.9, False)])
def test_a_bound_is_on_ours(bound: str, ours: float, ok: bool) -> None:
    assert Row(name="a", ours=ours, target=5.0, bound="max" if bound == "max" else "min").ok is ok


@pytest.mark.parametrize("number", [np.float64, np.float32, np.int64])
def test_numbers_of_numpy_are_judged_and_written_as_those_of_python(number: type) -> None:
    row = Row(name="a", ours=number(6), rival=number(3), ratio=number(2), target=5.0, bound="max")
    assert row.ok is False  # `is`: what `--check` asks
    made = json.loads(json.dumps(as_json("growth", [replace(row, ours_ms=Spread.of([number(1)]))])))["rows"][0]
    assert (made["ours"], made["rival"], made["ratio"], made["ok"]) == (6, 3, 2, False)
    assert made["ours_ms"]["median"] == 1000


@pytest.mark.parametrize("flag", ["--rivals", "--baseline"])
def test_a_benchmark_without_such_rivals_refuses_the_flag(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "wire", flag, "python3"]) != 0
    assert f"bench wire: takes no {flag}" in capsys.readouterr().err


def test_the_table_fits_a_terminal_of_100_columns_whatever_was_measured() -> None:
    long = faster("what takes very many words to be said " * 3, 1.0, 2.0, "a rival with a long name", target=1.5)
    rows = [long, replace(long, name="short", note="and a note " * 20), skipped("gone", "not installed " * 20)]
    lines = as_table("wire", rows).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[1].startswith("what takes") and lines[2].startswith("  ")
    assert [line.split()[-1] for line in lines if line.startswith(("what", "short", "gone"))] == ["ok", "ok", "skipped"]
