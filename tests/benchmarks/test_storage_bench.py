"""What `penstock bench storage` measures: reading ahead hides the way to an object store."""

from __future__ import annotations

import pytest

from benchmarks.storage import Setting, measure

pytestmark = pytest.mark.process


def test_reading_ahead_hides_the_way_to_storage() -> None:
    """Without it a rank waits for a request at least; with it some steps are there before they are asked for."""
    setting = Setting(case="tiny-text", steps=6, step_s=1.0, delay_s=0.2)
    ahead, behind = measure(setting, prefetch=1), measure(setting, prefetch=0)
    assert min(ahead.waits) < 0.2 <= min(behind.waits)
    assert min(ahead.puts) >= 0.2
