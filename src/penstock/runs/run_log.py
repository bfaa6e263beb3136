"""A run's log outside of a plane: read as plain data, and decisions about a run whose plane is stopped.

Reading needs no ownership: a plane may work on the log. `settle_offline` and `forget` lock the run's folder and write
to its log; what they decide is carried out when the next plane starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from penstock.arrays import Samples
from penstock.errors import Conflict, CorruptFile, InvalidInput, PenstockError, UnknownKey
from penstock.frames import Buffer, GroupMetadata, attach_late, decode
from penstock.log import (
    FORMAT,
    LOG,
    Advance,
    Discard,
    DropGroup,
    GroupRow,
    LogReader,
    ReleaseGroup,
    Shorten,
    State,
    is_run,
    open_existing,
    read_record,
    reading,
    state_of,
)
from penstock.plane import SETTINGS, Ledger, Manifest, read_manifest
from penstock.protocol import OVER_LENGTH
from penstock.storage import Gone, KeptStorage, open_storage

_ALL = 1 << 62
_UNDER_WAY = (int(State.SCHEDULED), int(State.DELIVERED))


def storage_of_run(folder: Path) -> KeptStorage:
    """Open the storage that holds a run's frames."""
    with reading(folder) as log:
        found = log.text("storage")
    return open_storage(found or folder / "storage", create=False)


def read_stored(folder: Path, location: str) -> Buffer:
    """Read a frame of a run, even while its plane works. Raises Gone if it was deleted."""
    return storage_of_run(folder).read(location)[0]


def stored_samples(folder: Path, group: str, location: str) -> Samples:
    """Read the samples of a group, with the values that were attached after its put. Raises Gone if it was deleted.

    A group that got a column of values per token after it was listed has a newer frame: that one is read."""
    return stored_group(folder, group, location)[0]


def stored_group(folder: Path, group: str, location: str) -> tuple[Samples, Sequence[int]]:
    """Return what `stored_samples` returns, and how many tokens of each sample a step takes: 0 of one that is too long
    and dropped, or that was left out when its group got its late values."""
    while True:
        try:
            found: Samples | PenstockError = decode(read_stored(folder, location))
        except PenstockError as error:
            found = error
        with reading(folder) as log:
            known = log.states_of([group]).get(group)
            data = None if known is None or known[1] is State.EVALUATION else log.metadata(known[0])
            now = log.location_of(group)  # the last question: the frame had this metadata, if it still is the group's
        if now == location:
            if isinstance(found, PenstockError):
                raise found
            if not data:
                return found, found.lengths.tolist()
            metadata = GroupMetadata.from_bytes(data)
            return attach_late(found, metadata.late.arrays()), np.frombuffer(metadata.kept, "<i8").tolist()
        if not now:
            raise Gone(f"group {group!r}: its frame was freed meanwhile")
        location = now


@contextmanager
def reading_run(folder: Path) -> Iterator[tuple[LogReader, dict[str, str]]]:
    """Open a run's log to read it, with its named values. Raises an error if there is none, or of another format."""
    if not is_run(folder):
        raise InvalidInput(f"{folder}: no {LOG} in it; give the folder that a plane was opened on")
    with reading(folder) as log:
        meta = log.all_meta()
        if meta.get("format", str(FORMAT)) != str(FORMAT):
            raise CorruptFile(f"{log.where}: format {meta['format']}; this version reads format {FORMAT}")
        yield log, meta


def read_run(folder: str | Path, *, steps: int | None = None, groups: int | None = None) -> dict[str, Any]:
    """Describe a run's folder as plain data: epoch, ledger, sizes, the last `steps` steps and `groups` groups.

    None lists all steps or all groups.
    """
    root = Path(folder)
    if not root.is_dir():
        raise InvalidInput(f"{root}: not a folder; give the folder of a run")
    with reading_run(root) as (log, meta):
        next_step = log.meta("next_step", 1)
        return {
            "folder": str(root),
            "run_id": meta.get("run_id", ""),
            "log": log.where,
            "epoch": log.meta("epoch", 0),
            "session": log.meta("session", 0),
            "next_step": next_step,
            "retain": meta.get("retain", "steps"),
            **_counts(log, next_step),
            "steps": _steps(log, steps, next_step),
            "groups": _groups(log, groups),
            "files": _files(root),
        }


def planned_step(folder: str | Path, step: int | None = None) -> tuple[int, tuple[bytes, ...]]:
    """Return a step's number and each rank's part of its plan. `step` None takes the last step that has a plan."""
    root = Path(folder)
    with reading_run(root) as (log, _):
        plans = {n: read_manifest(data).rank_plans for n, data in log.rows("SELECT step, manifest FROM steps")}
    kept = sorted(n for n, parts in plans.items() if parts)
    number = step if step is not None else kept[-1] if kept else 0
    if number not in kept:
        raise InvalidInput(
            f"step {number}: no plan of it in {root}, only of {', '.join(map(str, kept)) or 'no step'}; plans are "
            "kept until their step can no longer be asked for"
        )
    return number, plans[number]


def quarantine_of(folder: str | Path) -> list[dict[str, Any]]:
    """Return the groups of a run that are in quarantine."""
    with reading(folder) as log:
        rows = log.groups_in(State.QUARANTINED)
    return [{name: getattr(row, name) for name in ("id", "run", "samples", "reason")} for row in rows]


def evaluations_of(folder: str | Path) -> list[GroupRow]:
    """Return the evaluation groups of a run whose frames are kept, oldest first."""
    with reading(folder) as log:
        return [row for row in log.groups_in(State.EVALUATION) if row.location]


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """A step that ranks received, as the log has it."""

    number: int
    op: int
    """Number of the decision that recorded it. A step that is undone and made again has another one."""
    manifest: Manifest
    is_kept: bool
    """Whether the frames of all its groups are kept."""


def logged_steps(folder: str | Path, known: Sequence[LoggedStep] = ()) -> list[LoggedStep]:
    """Return the delivered and committed steps of a run, oldest first. `known` are those of an earlier call: what can
    no longer change is not read again."""
    with reading(folder) as log:
        next_step, kept = log.meta("next_step", 1), log.with_frames()
        ops = dict(log.rows("SELECT step, op FROM steps"))
        # A rewind replaces the last steps, and a plan is forgotten with its frames. Up to there nothing changes.
        found = list(takewhile(lambda step: not step.is_kept and ops.get(step.number) == step.op, known))
        first = found[-1].number + 1 if found else 0
        query = "SELECT step, op, state, manifest FROM steps WHERE step >= ? ORDER BY step"
        for step, op, state, data in log.rows(query, (first,)):
            if step < next_step or state != State.SCHEDULED:  # else planned, and no rank has it yet
                manifest = read_manifest(data)
                is_kept = bool(manifest.groups) and kept.issuperset(manifest.groups)
                found.append(LoggedStep(step, op, manifest, is_kept))
    return found


def kept_groups(folder: str | Path) -> list[GroupRow]:
    """Return every group whose frame is kept, oldest first, in whatever state it is."""
    with reading(folder) as log:
        return log.select_groups("WHERE location != '' ORDER BY op")


def unused_groups(folder: str | Path, *, most: int = 1000, group: str | None = None) -> list[GroupRow]:
    """Return the last groups that were dropped or quarantined, newest first. With `group`, only the one of that id."""
    states, chosen = (int(State.DROPPED), int(State.QUARANTINED)), "" if group is None else "AND id = ?"
    values = (*states, *([] if group is None else [group]), most)
    with reading(folder) as log:
        return log.select_groups(f"WHERE state IN (?, ?) {chosen} ORDER BY op DESC LIMIT ?", values)


def _counts(log: LogReader, next_step: int) -> dict[str, Any]:
    """Compute the ledger from the recorded states, and count what is held."""
    ledger = Ledger()
    totals = {"num_groups": 0, "held_groups": 0, "held_bytes": 0, "frame_bytes": 0, "num_tokens": 0}
    rows = log.rows(
        "SELECT state, reason, COUNT(*), CAST(SUM(samples) AS BIGINT), CAST(SUM(samples * uses) AS BIGINT), "
        "CAST(SUM(tokens) AS BIGINT), CAST(SUM(size) AS BIGINT), "
        "CAST(SUM(CASE WHEN location = '' THEN 0 ELSE size END) AS BIGINT) FROM groups GROUP BY state, reason"
    )
    for state, reason, count, samples, uses, tokens, size, kept in rows:
        ledger.accepted += samples
        ledger.uses += uses
        ledger.add(state_of(state), reason, samples)
        totals["num_groups"] += count
        totals["num_tokens"] += tokens
        totals["frame_bytes"] += kept
        if state in (State.HELD, State.WAITING, *_UNDER_WAY):
            totals["held_bytes"] += size
        if state == State.HELD:
            totals["held_groups"] += count
    # Rows that lag behind the commit: move their samples to where the plane counts them already.
    for state, samples, size in _trained_since(log, next_step):
        ledger.add(state, "", -samples)
        ledger.add(State.COMMITTED, "", samples)
        totals["held_bytes"] -= size
    texts = [text for name, text in log.all_meta().items() if name.startswith(SETTINGS)]
    # Reading every manifest of a long run takes long. Only runs with this setting mask anything.
    if any(re.search(r"^max_token_staleness = \d", text, re.M) for text in texts):
        for (data,) in log.rows("SELECT manifest FROM steps"):
            ledger.mask(*read_manifest(data).masked)
    return totals | _records(log, ledger) | {"ledger": ledger.as_dict()}


def _trained_since(log: LogReader, next_step: int) -> Iterator[tuple[State, int, int]]:
    """Yield (recorded state, samples, bytes) of groups that are trained although their rows do not say so yet.

    A commit moves `next_step` in one transaction and the states of groups in the next one.
    """
    query = "SELECT step, manifest FROM steps WHERE state IN (?, ?) ORDER BY step"
    done: set[int] = set()
    for step, data in log.rows(query, _UNDER_WAY):
        # A group that step 4 trained and step 5 drew again is under way, not trained: 5 takes it out of `done`.
        done = (
            done.union(read_manifest(data).groups) if step < next_step else done.difference(read_manifest(data).groups)
        )
    for op, state, samples, size in log.rows(
        "SELECT op, state, samples, size FROM groups WHERE state IN (?, ?)", _UNDER_WAY
    ):
        if op in done:
            yield State(state), samples, size


def _records(log: LogReader, ledger: Ledger) -> dict[str, Any]:
    version = 0
    for (data,) in log.rows("SELECT data FROM records ORDER BY op"):
        record = read_record(data)
        if isinstance(record, Advance):
            version = record.policy_version
        elif isinstance(record, Discard):
            ledger.discarded[record.reason] += record.samples
        elif isinstance(record, Shorten):
            ledger.shorten({name: getattr(record, name) for name in OVER_LENGTH})
    return {"policy_version": version}


def _steps(log: LogReader, limit: int | None, next_step: int) -> list[dict[str, Any]]:
    query = "SELECT step, state, manifest FROM steps ORDER BY step DESC LIMIT ?"
    found = []
    for step, state, data in log.rows(query, (_ALL if limit is None else limit,)):
        manifest = read_manifest(data)
        low, total, high = manifest.staleness
        found.append(
            {
                "step": step,
                "state": "committed" if step < next_step else State(state).name.lower(),
                "groups": len(manifest.groups),
                "samples": manifest.samples,
                "tokens": manifest.tokens,
                "loss_tokens": manifest.loss_tokens,
                "ranks": len(manifest.digests),
                "policy_version": manifest.policy_version,
                "staleness": {"min": low, "mean": total / max(manifest.num_versions, 1), "max": high},
                "digests": list(manifest.digests),
            }
        )
    return found[::-1]


def _groups(log: LogReader, limit: int | None) -> list[dict[str, Any]]:
    names = ("op", "id", "state", "reason", "samples", "tokens", "size", "policy_version", "uses")
    rows = log.select_groups("ORDER BY op DESC LIMIT ?", (_ALL if limit is None else limit,))
    found = [{name: getattr(row, name) for name in names} | {"state": row.state.name.lower()} for row in rows]
    return found[::-1]


def _files(root: Path) -> dict[str, int]:
    names = (LOG, f"{LOG}-wal")
    return {name: (root / name).stat().st_size for name in names if (root / name).exists()}


# ------------------------------------------------------------------ decisions while the plane is stopped


_ENDED = (int(State.COMMITTED), int(State.DROPPED))


def settle_offline(folder: Path, group: str, *, drop: bool) -> None:
    """Release or drop a group in quarantine. Raises Conflict while a plane has the folder."""
    try:
        log = open_existing(folder)
    except Conflict as error:
        raise Conflict(f"{error}; its plane is at work: give its address instead of the folder") from None
    try:
        waiting = {row.id: row for row in log.groups_in(State.QUARANTINED)}
        if group not in waiting:
            known = ", ".join(map(repr, list(waiting)[:5])) or "none"
            raise UnknownKey(f"group {group!r}: not in quarantine; there are: {known}")
        op = waiting[group].op
        with log.transaction():
            log.add_record(log.last_op + 1, DropGroup(op=op) if drop else ReleaseGroup(op=op))
            log.mark_settled(op)
    finally:
        log.close()


@dataclass(frozen=True, slots=True)
class Forgettable:
    """What a run would free if it kept recent steps only."""

    run_id: str
    groups: int
    num_bytes: int
    before_step: int
    """Plans of steps before this one are dropped."""


def forgettable(folder: Path) -> Forgettable:
    """Count what `forget` would free, without evaluation groups. Raises InvalidInput if `retain` is not "all"."""
    with reading(folder) as log:
        meta = log.all_meta()
        if meta.get("retain") != "all":
            raise InvalidInput(
                f'{folder}: keeps what `retain_steps` says already; it was never started with retain="all"'
            )
        oldest = log.meta("oldest_step", 1)
        rows = log.rows("SELECT op, size FROM groups WHERE location != '' AND state IN (?, ?)", _ENDED)
        sizes = {int(op): int(size) for op, size in rows}
        for (data,) in log.rows("SELECT manifest FROM steps WHERE step >= ?", (oldest,)):
            for op in read_manifest(data).groups:
                sizes.pop(op, None)
    return Forgettable(meta.get("run_id", ""), len(sizes), sum(sizes.values()), oldest)


def forget(folder: Path) -> None:
    """Let the run keep recent steps only. Raises Conflict while a plane has the folder."""
    try:
        log = open_existing(folder)
    except Conflict as error:
        raise Conflict(f"{error}; a run forgets only while its plane is stopped") from None
    try:
        oldest = log.meta("oldest_step", 1)
        with log.transaction():
            log.set_meta("retain", "steps")
            for step, _, data, _ in log.steps():
                if step >= oldest:
                    break
                slim = msgspec.structs.replace(read_manifest(data), rank_plans=(), needs=(), digests=(), packing="")
                log.set_manifest(step, msgspec.msgpack.encode(slim))
    finally:
        log.close()
