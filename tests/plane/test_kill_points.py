"""Killed at a write or sync of a short life, and lived to its end: the short form of `scripts/torture kill-points`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.kill_points import LIVES, kill_points

pytestmark = pytest.mark.process


def _strace_works() -> bool:
    try:
        return subprocess.run(["strace", "-f", "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not _strace_works(), reason="needs strace and the right to trace: apt-get install strace")
@pytest.mark.parametrize("life", LIVES)
def test_a_plane_killed_at_a_write_or_sync_goes_on_to_the_same_steps(life: str, tmp_path: Path) -> None:
    result = kill_points(life, tmp_path / life, every=120, twice=True)
    assert result.good, result
    assert result.killed > result.points // 2  # threads differ a little from life to life
    assert 20 < result.calls.total() <= 700
    assert result.calls["writev"] > 0  # frames, in segments with random names
