"""Processes on an object store, killed at random moments: the short form of `scripts/torture --transports objects`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.object_torture import torture_objects

pytestmark = pytest.mark.process


def test_a_run_on_an_object_store_survives_kills(tmp_path: Path) -> None:
    """Plane, producers and ranks use the store themselves; kills of each lose, double and change nothing."""
    result, proxy = torture_objects(tmp_path / "run", kills=4, seed=5)
    assert result.good, result
    assert proxy.count("PUT", "/segments/") > 10


def test_a_run_on_a_bad_network_survives_kills(tmp_path: Path) -> None:
    rates = {"500": 0.02, "503": 0.01, "lost": 0.02, "cut": 0.01, "short": 0.01, "refuse": 0.01}
    result, proxy = torture_objects(tmp_path / "run", kills=3, seed=2, rates=rates)
    assert result.good, result
    assert sum(proxy.injected.values()) > 10
