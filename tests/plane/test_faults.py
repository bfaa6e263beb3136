"""Faults that a plane must outlive: the same as `scripts/torture faults`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.faults import FAULTS, provoke

pytestmark = pytest.mark.process


def _can_mount() -> bool:
    probe = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("fault", FAULTS)
def test_a_plane_outlives(fault: str, tmp_path: Path) -> None:
    if fault == "disk" and not _can_mount():
        pytest.skip("needs a mount namespace: run as root, or allow user namespaces")
    result = provoke(fault, tmp_path / fault)
    assert result.good, result.words
    assert result.tries > 0
