"""Groups that no rank trained on, read from the plane's log: dropped and quarantined ones.

Dropped groups have only a row in the log, because their frames are freed at once. Frames in quarantine are kept until
an operator decides about them. A plane may be running on the folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.errors import CorruptFile, PenstockError, UnknownKey
from penstock.log import State, reading
from penstock.runs import read_run, stored_samples, unused_groups
from penstock.view.plane_steps import plane_of, record_of
from penstock.view.record import Record

MOST = 1000
"""Groups listed. Counts include all."""


def dropped_of(folder: Path) -> dict[str, Any]:
    """Return a run's ledger and its last dropped and quarantined groups. `ledger` is None without a plane."""
    plane = plane_of(folder)
    if plane is None:
        return {"ledger": None, "groups": []}
    try:
        ledger = read_run(plane, steps=0, groups=0)["ledger"]
        groups = unused_groups(plane, most=MOST)
        lengths = _lengths(plane)
    except CorruptFile as error:
        return {"ledger": None, "groups": [], "error": str(error)}
    rows = [
        {
            "id": one.id,
            "prompt": one.prompt,
            "state": one.state.name.lower(),
            "reason": one.reason,
            "samples": one.samples,
            "tokens": one.tokens,
            "policy_version": one.policy_version,
            "is_kept": bool(one.location),
        }
        for one in groups
    ]
    return {"ledger": ledger, "groups": rows, "lengths": lengths}


def _lengths(plane: Path) -> dict[str, float]:
    """Return the mean tokens of a sample by what became of it. A loss of long samples shows as a difference."""
    query = (
        "SELECT state, CAST(SUM(tokens) AS BIGINT), CAST(SUM(samples) AS BIGINT) FROM groups WHERE state != ? "
        "GROUP BY state"
    )
    with reading(plane) as log:
        rows = list(log.rows(query, (int(State.EVALUATION),)))
    found = {State(state).name.lower(): tokens / samples for state, tokens, samples in rows if samples}
    samples = sum(samples for _, _, samples in rows)
    return found | ({"accepted": sum(tokens for _, tokens, _ in rows) / samples} if samples else {})


def records_of(folder: Path, group: str) -> list[Record]:
    """Return the rollouts of a quarantined group. Raises if its frame was freed."""
    plane = plane_of(folder)
    found = [] if plane is None else unused_groups(plane, group=group)
    if plane is None or not found or not found[0].location:
        raise UnknownKey(f"group {group[:80]!r}: its frame is not stored, only its row in the log")
    try:
        samples = stored_samples(plane, found[0].id, found[0].location)
    except PenstockError as error:
        raise UnknownKey(f"group {group[:80]!r}: its frame was freed: {error}") from None
    return [record_of(sample, step=0, index=i) for i, sample in enumerate(samples)]
