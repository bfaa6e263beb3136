"""The memory of a run's processes does not grow with its steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.memory import Measured, Series, measure, plot

pytestmark = pytest.mark.process

ROLES = {"launcher", "forkserver", "plane", "rank-0", "rank-1", "worker-0", "worker-1"}


@pytest.mark.release
@pytest.mark.timeout(600)
def test_no_process_of_a_run_grows_with_its_steps(tmp_path: Path) -> None:
    measured = measure(80)
    plot(measured, tmp_path / "memory.svg")
    assert measured.steps == 80 and (tmp_path / "memory.svg").stat().st_size > 1000
    trends = {trend.role: trend for trend in measured.trends()}
    assert trends.keys() == ROLES
    for trend in trends.values():
        # In so short a run the allocator's own ups and downs show. A rank that keeps 600 kB of every step has 60 here.
        assert trend.per_100_steps_mb < 40, trend
        assert 50 < trend.peak_mb < 1000, trend


def test_growth_is_that_of_the_last_two_thirds_of_training() -> None:
    times = [float(second) for second in range(101)]
    leaking = [500.0 if t < 10 else 100.0 + t / 2 for t in times]  # imports first, then half a megabyte per second
    series = {
        "rank-0": Series(times=times, rss_mb=leaking, peak_mb=500.0),
        "plane": Series(times=times, rss_mb=[7.0] * 101),
    }
    growing, flat = Measured(series=series, began=10.0, ended=100.0, steps=300).trends()
    assert growing.slope_mb_per_min == pytest.approx(30.0) and growing.peak_mb == 500.0
    assert growing.per_100_steps_mb == pytest.approx(15.0)
    assert flat.slope_mb_per_min == pytest.approx(0.0, abs=1e-9)
