"""A plane killed again and again archives every group once: the short form of `scripts/torture archive`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from penstock.testing.archive_torture import torture_archive


def test_a_plane_killed_at_any_moment_leaves_no_gap_and_no_double() -> None:
    with tempfile.TemporaryDirectory(prefix="ps-") as folder:  # whose path is short enough for a socket
        found = torture_archive(Path(folder), kills=3, seed=1)
    assert found.good, found
    assert found.groups > found.steps > 3
