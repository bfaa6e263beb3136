"""Settings, commands and flags of earlier versions: the error for each names its replacement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_STORAGE = "a plane writes frames to its own storage"
_ALL = 'a run that is started with retain="all" keeps everything and is its own archive'
_SOCKET = "use ipc://PATH: on the plane's host ranks and workers read and write its storage themselves"
REMOVED = {
    "copies": f"{_STORAGE}: use a folder on a shared filesystem",
    "node": f"{_STORAGE}, and every process is served alike: leave it out",
    "keeper_s": f"{_STORAGE}, and waits for no other process to store one: leave it out",
    "archive": f"{_ALL}; `penstock copy RUN TARGET` copies a run elsewhere",
    "archive_hold_bytes": f"{_ALL}, and waits for no archive",
    "locking": "a log on a network filesystem is locked exclusively by itself: leave it out",
    "requires": "it is called `needs`",
    "frames": f"{_STORAGE}, the folder of `log`: give `log` a folder on a shared filesystem",
}
"""Name -> what to do instead."""
REMOVED_COMMANDS = {
    "keep": f"{_STORAGE}: start `penstock serve` on a folder of a shared filesystem",
}
"""Command -> what to do instead."""
REMOVED_FLAGS = {
    **{("serve", f"--{name}"): REMOVED[name] for name in ("copies", "node", "frames", "archive", "locking")},
    ("keys", "--keeper"): "use --writer NAME for a process that you trust",
}
"""Command and flag -> what to do instead."""
REMOVED_SCHEMES = {
    "shm": _SOCKET,
    "shm+ipc": _SOCKET,
}
"""Scheme of an address -> what to do instead."""


def removed_message(arguments: Sequence[str]) -> str:
    """Return the error for a command line of an earlier version, or "" for one of this version.

    >>> removed_message(["keys", "runs/keys", "--keeper=node-3"])
    'penstock keys: --keeper: removed; use --writer NAME for a process that you trust'
    """
    command = arguments[0] if arguments else ""
    if command in REMOVED_COMMANDS:
        return f"penstock {command}: removed; {REMOVED_COMMANDS[command]}"
    flags = [argument.partition("=")[0] for argument in arguments[1:]]
    found = next((flag for flag in flags if (command, flag) in REMOVED_FLAGS), None)
    return "" if found is None else f"penstock {command}: {found}: removed; {REMOVED_FLAGS[command, found]}"


def without_removed(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that an earlier version recorded with a run, without those that no longer exist.

    >>> without_removed({"run": "demo", "copies": 0, "timeouts": {"peer_s": 11.0, "keeper_s": 60.0}})
    {'run': 'demo', 'timeouts': {'peer_s': 11.0}}
    """
    kept = {name: value for name, value in tables.items() if name not in REMOVED}
    if "requires" in tables:
        kept["needs"] = tables["requires"]
    if isinstance(timeouts := kept.get("timeouts"), Mapping):
        kept["timeouts"] = {name: value for name, value in timeouts.items() if name not in REMOVED}
    return kept
