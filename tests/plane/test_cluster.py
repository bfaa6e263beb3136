"""Two hosts that share no filesystem, log in PostgreSQL, frames in S3: the short form of `scripts/torture --transports
cluster`. Each host has mount and network namespaces of its own, which takes root."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster_torture import torture_cluster
from tests.support.hosts import NoNamespaces
from tests.support.torture import Result

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]
FIRST_STEP_S = 5.0
"""From the start of a plane's process to its first committed step, on an idle machine."""
FAULTS = (
    "PostgreSQL killed",
    "link cut",
    "plane killed",
    "plane paused while it deletes",
    "producer killed",
    "rank killed",
)


def torture(folder: Path, *faults: str) -> Result:
    """Each of these faults once."""
    try:
        return torture_cluster(folder / "run", kills=len(faults), seed=3, faults=faults)
    except NoNamespaces as error:
        pytest.skip(f"needs mount and network namespaces (root, or user namespaces allowed): {error}")


def test_kills_pauses_and_cuts_on_two_hosts_lose_and_double_nothing(tmp_path: Path) -> None:
    result = torture(tmp_path, *FAULTS)
    assert result.good, result
    assert set(result.kills) == set(FAULTS) == set(result.outages)
    assert result.fenced == 1
    assert (result.late_rows, result.late_changes) == (0, 0)


def test_a_plane_started_on_the_other_host_serves_a_step_within_seconds(tmp_path: Path, pace: float) -> None:
    """However long the run had no plane: its clients have asked for it in vain a few times."""
    result = torture(tmp_path, "plane killed for long")
    assert result.good, result
    (took,) = result.first_steps
    print(f"first committed step {took:.1f} s after the start of the process")
    assert took <= FIRST_STEP_S * pace, f"{took:.1f} s, with a pace of {pace:.1f}"
