"""The benchmark of leased prompts runs, small."""

from __future__ import annotations

import pytest

from benchmarks import tasks
from penstock.commands.bench import BENCHES

pytestmark = pytest.mark.process


def test_leases_puts_and_open_leases_are_measured() -> None:
    rows = {row.name: row for row in tasks.run(scale=0.1)}
    assert "tasks" in BENCHES
    assert all(row.ours is not None and row.ours > 0 for row in rows.values())
    for name in ("one worker: leases", "one judge: lease and attach 8 rewards"):
        assert "--rivals" in rows[name].note
    assert {"one judge: lease and attach 8 rewards, p99", "8 judges at once: lease and attach 8 rewards"} <= set(rows)
