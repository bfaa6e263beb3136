"""What did not reach the trainer: groups that were dropped or set aside, why, and their tokens while they are kept.

Read from the plane's log, beside a plane that may be at work. Frames of dropped groups are given back at once; those
in quarantine are kept until somebody decides about them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.errors import CorruptFile, PenstockError, UnknownKey
from penstock.frames import decode
from penstock.runs import read_run, read_stored, unused_groups
from penstock.view.evaluation_runs import plane_of, record_of
from penstock.view.record import Record

MOST = 1000
"""Groups listed; the counts are of all."""


def dropped_of(folder: Path) -> dict[str, Any]:
    """The ledger of a run and the last groups that were dropped or set aside; `ledger` is None without a plane."""
    plane = plane_of(folder)
    if plane is None:
        return {"ledger": None, "groups": []}
    try:
        ledger = read_run(plane, steps=0, groups=0)["ledger"]
        groups = unused_groups(plane, most=MOST)
    except CorruptFile as error:
        return {"ledger": None, "groups": [], "error": str(error)}
    rows = [
        {
            "id": one.id,
            "run": one.run,
            "prompt": one.prompt,
            "state": one.state,
            "reason": one.reason,
            "samples": one.samples,
            "tokens": one.tokens,
            "policy_version": one.policy_version,
            "is_kept": bool(one.location),
        }
        for one in groups
    ]
    return {"ledger": ledger, "groups": rows}


def records_of(folder: Path, group: str) -> list[Record]:
    """The rollouts of a group that was set aside; raises where its frame was given back."""
    plane = plane_of(folder)
    found = [] if plane is None else unused_groups(plane, group=group)
    if plane is None or not found or not found[0].location:
        raise UnknownKey(f"group {group[:80]!r}: its frame is not kept; only its row in the log is")
    try:
        samples = decode(read_stored(plane, found[0].location))
    except PenstockError as error:
        raise UnknownKey(f"group {group[:80]!r}: it was given back: {error}") from None
    return [record_of(sample, step=0, index=i) for i, sample in enumerate(samples)]
