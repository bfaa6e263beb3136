"""System calls that fail, or kill, in a run of two writers: the short form of `scripts/torture failing-syncs`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plane.test_kill_points import _strace_works
from tests.support.injected import TARGETS, cut_logs, inject

pytestmark = pytest.mark.process


@pytest.mark.skipif(not _strace_works(), reason="needs strace and the right to trace: apt-get install strace")
@pytest.mark.parametrize("error", ["", "EIO", "ENOSPC+"])
@pytest.mark.parametrize("target", TARGETS)
def test_two_writers_outlive_a_call_that_kills_or_fails(target: str, error: str, tmp_path: Path) -> None:
    every = {"": 300, "EIO": 60, "ENOSPC+": 60}[error] if target == "plane-0" else 24
    found = inject(tmp_path / "run", target, error.strip("+"), goes_on=error.endswith("+"), every=every)
    assert found.good, found


def test_a_write_ahead_log_that_is_cut_is_refused_unless_nothing_is_missing(tmp_path: Path) -> None:
    cuts = cut_logs(tmp_path / "run", copies=3, seed=2)
    assert cuts.good, cuts
    assert cuts.copies == 3
