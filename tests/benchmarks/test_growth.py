"""The benchmarks of growth, of starting and of small groups at a tiny size: every row is there, and has what the contract asks for."""

from __future__ import annotations

from benchmarks import growth, small, start
from benchmarks.report import as_json, as_table


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


def test_small_groups_are_measured_in_all_processes() -> None:
    rows = {(row.name, row.rival_name): row for row in small.run(rounds=1)}
    cost = rows["16 x 512 tokens, direct: CPU of a group", ""]
    assert cost.target == 2.0 and (cost.ours or 0) > 0 and "plane" in cost.note
    assert rows["16 x 512 tokens, tcp: a step", "TransferQueue"].skipped == "no --rivals interpreter"
    assert (rows["16 x 512 tokens, tcp: a step of 64 groups", "ZeroMQ + msgpack lists"].ratio or 0) > 0
