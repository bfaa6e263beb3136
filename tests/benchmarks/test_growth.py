"""The benchmarks of growth and of starting: every row is there, as the contract asks."""

from __future__ import annotations

import pytest

from benchmarks import growth, start
from benchmarks.report import as_json, as_table

pytestmark = pytest.mark.process


def test_growth_measures_each_kind_of_growth() -> None:
    rows = growth.run(scale=0.004)
    names = " ".join(row.name for row in rows)
    for kind in ("held", "at step", "inline ranks", "tokens, a token", "producers", "exported steps"):
        assert kind in names
    assert all(row.ours is not None for row in rows)
    assert {row.bound for row in rows if row.target is not None} == {"max", "min"}
    assert any(row["ours_ms"] for row in as_json("growth", rows)["rows"])
    assert "median" in as_table("growth", rows)


def test_start_measures_each_kind_of_start() -> None:
    rows = {row.name: row for row in start.run(rounds=1)}
    assert rows["import penstock, beyond numpy"].target == 80.0
    assert rows["ps.open of tcp://"].ours and rows["ps.connect of a rank"].ours and rows["penstock --help"].ours
    assert 10 < (rows["modules of ours in a producer that put a group"].ours or 0) < 400
