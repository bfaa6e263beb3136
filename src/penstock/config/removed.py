"""Settings that earlier versions had: what to say to somebody who still gives one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_STORAGE = "a plane writes frames to its own storage"
REMOVED = {
    "copies": f"{_STORAGE}: use a folder on a shared filesystem",
    "node": f"{_STORAGE}, and every process is served alike: leave it out",
    "keeper_s": f"{_STORAGE}, and there is no keeper to wait for: leave it out",
    "frames": f"{_STORAGE}, the folder of `log`: give `log` a folder on a shared filesystem",
}
"""Name -> what to do instead."""
REMOVED_COMMANDS = {
    "keep": f"{_STORAGE}: start `penstock serve` on a folder of a shared filesystem",
    "simulate": "there are no keepers to place: docs/sizing.md has the formula for one plane",
}
"""Command -> what to do instead."""


def without_removed(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that an earlier version wrote down with a run, as this version reads them.

    >>> without_removed({"run": "demo", "copies": 0, "timeouts": {"peer_s": 11.0, "keeper_s": 60.0}})
    {'run': 'demo', 'timeouts': {'peer_s': 11.0}}
    """
    kept = {name: value for name, value in tables.items() if name not in REMOVED}
    if isinstance(timeouts := kept.get("timeouts"), Mapping):
        kept["timeouts"] = {name: value for name, value in timeouts.items() if name not in REMOVED}
    return kept
