"""Builds the log of a recovery beside the old one, then puts it in the old one's place. The old log is copied first.

A recovery that is killed leaves the old log or the new one, never half of either, and can be started again.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from penstock.atomic import rename, sync
from penstock.errors import Conflict, CorruptFile
from penstock.frames import GroupMetadata, LateColumns, decode, new_values, with_digests
from penstock.log import (
    LOG,
    WITNESS,
    Advance,
    AttachColumn,
    AwaitColumns,
    GroupRow,
    Log,
    Lose,
    Quarantine,
    SegmentRow,
    SqliteLog,
    Witness,
    carry_over,
    copy_log,
    open_existing,
    set_identity,
    typed_errors,
)
from penstock.plane import OWN, Manifest, put_key, summary_of
from penstock.runs.recovery import ASIDE, BUILDING, Plan
from penstock.runs.storage_check import LIMITS, LostFrame, Progress, frames_of, metadata_of_frame, no_progress
from penstock.storage import (
    Custody,
    KeptStorage,
    Marker,
    Writer,
    address_of,
    check_log,
    new_segment_name,
    open_storage,
    parse_location,
)

As = Literal["held", "quarantined", "dropped"]
WRITER = "recovered"
"""Writer's name of segments that a recovery registers."""
_BATCH = 256
_WHY = "recovered: release it if it was not trained before"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What only an operator can decide."""

    state: As = "held"
    """The state that recovered groups get."""
    step: int | None = None
    """The step that the trainer continues with."""
    policy_version: int | None = None
    """The version that the trainer has published."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """The result of a recovery."""

    groups: int
    segments: int
    epoch: int
    commits: int
    run_id: str
    aside: str = ""
    """Folder with the log and the marker as they were before."""


def recover(plan: Plan, choices: Choices, progress: Progress = no_progress) -> Recovered:
    """Put lost groups back into the log of a run. The caller owns its folder (`owning`)."""
    if plan.run.log_url:
        return _recover_database(plan, choices, progress)
    building = plan.run.folder / BUILDING
    shutil.rmtree(building, ignore_errors=True)  # left by a recovery that was killed
    building.mkdir(mode=0o700)
    log = _begin(plan, building)
    try:
        _put_back(log, plan, choices, progress)
        done = Recovered(len(plan.found.lost), len(plan.register), log.epoch, log.commits, log.run_id)
    finally:
        log.close()
    return _install(plan, building, done)


def _recover_database(plan: Plan, choices: Choices, progress: Progress) -> Recovered:
    """Recover a log in a database, in place: the database has its own backups.

    The marker keeps planes out until the log is past it, and moving the log past it is the last write. So a recovery
    that is killed can be started again."""
    from penstock.log import PostgresLog

    log = open_existing(plan.run.folder)
    assert isinstance(log, PostgresLog)
    try:
        _put_back(log, plan, choices, progress)
        marker = plan.run.marker
        log.move_past(plan.run_id, epoch=marker.epoch if marker else 0, commits=marker.commits if marker else 0)
        done = Recovered(len(plan.found.lost), len(plan.register), log.epoch, log.commits, log.run_id)
    finally:
        log.close()
    _set_marker(plan, done)
    return done


def _put_back(log: Log, plan: Plan, choices: Choices, progress: Progress) -> None:
    """Register the segments of lost groups and add the groups to the log. Their frames stay where they are."""
    known = {row.name for row in log.segments()}  # some, if an earlier recovery was killed
    with log.transaction():
        for name in plan.register:
            if name not in known:
                log.add_segment(SegmentRow(name, WRITER, log.epoch, time.time()))
        if (where := address_of(plan.run.storage.url)) != address_of(plan.run.folder / "storage"):
            log.set_meta("storage", where)
    past = _renew(log, plan, progress)
    read = _read_again(plan.found.lost, progress)
    _accept(log, read, past + 1, choices, set() if plan.log is None else plan.log.members)
    _go_on(log, plan, choices, past)


def _renew(log: Log, plan: Plan, progress: Progress) -> int:
    """Give groups that got late columns since their newest frames, as an attach does. Returns the last decision."""
    op, rows = log.last_op, [row for row, _ in plan.newer]
    awaits = [record for _, record in log.records() if isinstance(record, AwaitColumns)] if rows else []
    columns = {group: one.columns for record in awaits for group, one in record.groups.items()}
    read = _read_again((frame for _, frame in plan.newer), progress)
    for row, (frame, location, data, metadata) in zip(rows, read, strict=True):
        before = GroupMetadata.from_bytes(log.metadata_of([row.op])[row.op])
        found = new_values(before, metadata, decode(data, limits=LIMITS))
        digests = {column: values for column, values in found.items() if column in columns[row.id]}
        late = LateColumns(digests=with_digests(before, digests))
        with log.transaction():
            for column, values in digests.items():
                op += 1
                record = AttachColumn(group=row.op, column=column, values={}, digests=values, location=location)
                log.add_record(op, record)
            kinds = tuple(sorted(metadata.kinds.items()))
            log.set_metadata(row.op, msgspec.structs.replace(metadata, late=late).to_bytes(), kinds)
            if not before.late.digests:  # a repeated put of its first frame is recognised
                log.add_discard(put_key(row.id, row.digest))
            log.set_frame(row.op, location, frame.digest)
    return op


def recover_into(plan: Plan, choices: Choices, progress: Progress = no_progress) -> Recovered:
    """Copy groups into the run of another folder, which may be new."""
    storage = open_storage(plan.run.storage.url)
    folder = plan.run.folder
    log = open_existing(folder) if plan.run.log_url else SqliteLog(folder, guard=partial(check_log, storage))
    try:
        custody = Custody(storage, run_id=log.run_id, run=_name_of(plan), epoch=log.epoch, commits=log.commits)
        names: list[str] = []

        def next_segment() -> str:
            names.append(new_segment_name())
            with log.transaction():
                log.add_segment(SegmentRow(names[-1], OWN, log.epoch))
            return names[-1]

        writer, past = Writer(storage, next_segment), log.last_op
        read = _read_again(plan.found.lost, progress)
        _accept(log, _written(read, writer), past + 1, choices, set() if plan.log is None else plan.log.members)
        writer.finish()
        _go_on(log, plan, choices, past)
        return Recovered(len(plan.found.lost), len(names), custody.marker.epoch, log.commits, log.run_id)
    finally:
        log.close()


# ------------------------------------------------------------------ the log


def _begin(plan: Plan, building: Path) -> Log:
    """Make the log to continue with, in a folder of its own: a copy of the old log, or an empty one."""
    path = building / LOG
    with typed_errors(str(path)):
        if plan.log is None:
            SqliteLog(building).close()
        else:
            copy_log(plan.run.folder, path)
        epoch = max(plan.run.marker.epoch if plan.run.marker else 0, plan.log.epoch if plan.log else 0)
        # Past everything that marker and witness have seen, or a plane would refuse this log too.
        seen = [
            plan.run.marker.commits if plan.run.marker else 0,
            plan.run.witness.commits if plan.run.witness else 0,
        ]
        run_id, commits = set_identity(path, run_id=plan.run_id, epoch=epoch, least_commits=max(seen))
    witness = Witness(building)
    witness.write(run_id, commits)
    witness.close()
    return SqliteLog(building)


class _Read(NamedTuple):
    """A frame that was read again."""

    frame: LostFrame
    location: str
    data: bytes
    metadata: GroupMetadata


def _read_again(frames: Iterable[LostFrame], progress: Progress) -> Iterator[_Read]:
    """Read frames where they are. Raises Conflict if one is not what the survey found."""
    for name, some in groupby(frames, key=lambda one: one.part.name):
        places = list(some)
        for frame, data in frames_of(places[0].part, places):
            metadata = metadata_of_frame(data)
            if metadata.group != frame.group or len(data) != frame.size:
                raise Conflict(f"{name}: changed while it was read; stop the plane that uses it, then call this again")
            progress(frame.size)
            yield _Read(frame, frame.location, data, metadata)


def _written(frames: Iterable[_Read], writer: Writer) -> Iterator[_Read]:
    """Write frames to a storage, with one sync per batch. Yields them with their new locations."""
    batch: list[_Read] = []
    size = 0
    for one in frames:
        batch.append(one)
        size += len(one.data)
        if len(batch) == _BATCH or size >= 16 << 20:
            yield from _write(batch, writer)
            batch, size = [], 0
    yield from _write(batch, writer)


def _write(batch: list[_Read], writer: Writer) -> list[_Read]:
    locations = writer.write([[one.data] for one in batch]) if batch else []
    return [one._replace(location=at) for one, at in zip(batch, locations, strict=True)]


def _accept(log: Log, frames: Iterable[_Read], op: int, choices: Choices, members: set[str]) -> None:
    """Add groups to the log, as a put does."""
    batch: list[tuple[GroupRow, bytes]] = []
    for one in frames:
        batch.append((_row(op + len(batch), one, members), one.metadata.to_bytes()))
        if len(batch) == _BATCH:
            op = _add(log, batch, choices.state)
            batch = []
    if batch:
        _add(log, batch, choices.state)


def _add(log: Log, rows: Sequence[tuple[GroupRow, bytes]], state: As) -> int:
    """Add a batch of groups in one transaction. Returns the number of the next decision."""
    op = rows[-1][0].op + 1
    with log.transaction():
        log.add_groups(rows)
        log.add_summaries([(row.op, summary_of(GroupMetadata.from_bytes(metadata))) for row, metadata in rows])
        if state == "quarantined":
            log.add_record(op, Quarantine(groups={row.op: _WHY for row, _ in rows}))
        elif state == "dropped":
            log.add_record(op, Lose(groups={row.op: "dropped when the log was recovered" for row, _ in rows}))
    return op + 1


def _row(op: int, one: _Read, members: set[str]) -> GroupRow:
    metadata = one.metadata
    return GroupRow(
        op=op,
        id=metadata.group,
        digest=one.frame.digest,
        policy_version=metadata.policy_version,
        samples=metadata.num_samples,
        tokens=metadata.num_tokens,
        size=parse_location(one.location).size,
        # A tenant or environment that the log does not know has no table: its groups go to the common one.
        run=next((name for name in (metadata.run, metadata.env[0]) if name in members), ""),
        prompt=metadata.prompt,
        kinds=tuple(sorted(metadata.kinds.items())),
        location=one.location,
    )


def _name_of(plan: Plan) -> str:
    return "" if plan.run.marker is None else plan.run.marker.run


def _go_on(log: Log, plan: Plan, choices: Choices, past: int) -> None:
    """Write where trainer and plane continue: step, policy version, and a last decision past the marker's."""
    known = 0 if plan.log is None else plan.log.policy_version
    last_step = 0 if plan.log is None else plan.log.last_step
    step = plan.next_step if choices.step is None else choices.step
    version = plan.newest_version if choices.policy_version is None else choices.policy_version
    op = max(log.last_op, past)
    with log.transaction():
        if version != known or log.last_op < past:
            op += 1
            log.add_record(op, Advance(policy_version=version))
        if plan.log is None or step != plan.log.next_step:
            log.set_meta("next_step", step)
        if step > last_step + 1:
            # The log has lost steps. One empty step stands for all of them, so that numbers go on without a hole: a log
            # that ends at step 3 and a trainer that continues with 8 get an empty step 7.
            manifest = Manifest(groups=(), policy_version=version, samples=0, tokens=0)
            log.add_step(step - 1, op + 1, msgspec.msgpack.encode(manifest))
            log.set_meta("oldest_step", step)


# ------------------------------------------------------------------ in the place of the old one


def _install(plan: Plan, building: Path, done: Recovered) -> Recovered:
    folder, storage = plan.run.folder, plan.run.storage
    aside = _copy_aside(folder, storage)
    # The marker first: from here on the old log is behind it, and no plane can go on with it by mistake.
    _set_marker(plan, done)
    _carry_over(folder, is_sound=plan.log is not None)
    # In this order: if we are killed in between, a plane refuses the new log with the old witness, and the recovery can
    # be started again. The old log with a new witness would look damaged for ever.
    for name in (LOG, WITNESS):
        sync(building / name)
        rename(building / name, folder / name)
    shutil.rmtree(building, ignore_errors=True)
    return Recovered(done.groups, done.segments, done.epoch, done.commits, done.run_id, aside)


def _copy_aside(folder: Path, storage: KeptStorage) -> str:
    """Copy log, witness and marker as they are into a new folder. Returns its path, or "" if there is none of them."""
    old = [path for path in (folder / LOG, folder / f"{LOG}-wal", folder / WITNESS) if path.exists()]
    marker = storage.marker()
    if not old and marker is None:
        return ""
    number = next(n for n in range(1, 1_000_000) if not (folder / f"{ASIDE}-{n}").exists())
    aside = folder / f"{ASIDE}-{number}"
    aside.mkdir(mode=0o700)
    for path in old:
        sync(Path(shutil.copy2(path, aside / path.name)))
    if marker is not None:
        (aside / "marker").write_bytes(marker)
        sync(aside / "marker")
    sync(aside)
    sync(folder)
    return str(aside)


def _set_marker(plan: Plan, done: Recovered) -> None:
    """Take the storage over. From now on planes of earlier epochs delete nothing."""
    storage, name = plan.run.storage, _name_of(plan)
    if plan.run.marker_problem:
        new = Marker(run_id=done.run_id, epoch=done.epoch, commits=done.commits, run=name)
        if not storage.set_marker(new.to_bytes(), storage.marker()):
            raise Conflict(f"{storage.url}: another process wrote the marker; call this again")
        return
    Custody(storage, run_id=done.run_id, run=name, epoch=done.epoch, commits=done.commits)


def _carry_over(folder: Path, *, is_sound: bool) -> None:
    """Remove the old write-ahead log, which SQLite would apply to the new log. A copy of it was made."""
    if is_sound and not carry_over(folder / LOG):
        raise CorruptFile(f"{folder / LOG}: another process has it open; stop it and call this again")
    for suffix in ("-wal", "-shm"):
        (folder / f"{LOG}{suffix}").unlink(missing_ok=True)
