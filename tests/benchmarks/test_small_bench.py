"""`bench small` at a tiny size, in real processes: every process and every part has a figure."""

from __future__ import annotations

import pytest

from benchmarks import small

pytestmark = pytest.mark.process


@pytest.mark.release  # 14 s of core time for the programs that test_path.py starts as well
def test_every_process_and_part_of_a_small_group_is_measured() -> None:
    rows = small.run(full=False, progress=lambda _: None, rounds=1, cases=("tiny-text",))
    found = {row.name.removeprefix("tiny-text, "): row for row in rows}
    assert not [row.skipped for row in rows if row.skipped]
    for transport in small.TRANSPORTS:
        whole = found[f"{transport}: CPU of a group, all processes"]
        by_process = [found[f"{transport}: CPU of a group, {who}"].ours or 0 for who in small.PROCESSES]
        assert all(spent > 0 for spent in by_process)
        assert whole.ours is not None
        assert abs(sum(by_process) - whole.ours) < 1e-9  # one round: the median of the sum is the sum of the medians
    parts = {name.partition(":")[0] for name in found}
    assert {"producer", "plane", "plane, tcp", "rank"} <= parts
    assert small.TARGET_MS == 2.0
