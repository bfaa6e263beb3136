"""Plans a recovery: which frames in storage the log has lost, and what putting them back would do.

    log missing, damaged or empty     a new log takes the run over, with all groups that storage holds
    log older than its storage        the groups it lacks are accepted again; groups that got late columns since have
                                      their newest frames
    unregistered segments             their groups are accepted, and the segments are registered
    marker or witness ahead           the log continues past both, in a new epoch

`plan_copy` does the same for frames in any files, also of old folders and archives, to copy them into another run.
Planning changes nothing; `recover` and `recover_into` carry a plan out. Neither ever deletes anything.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import Conflict, InvalidInput
from penstock.frames import MAGIC, GroupMetadata
from penstock.log import LOG, AdmitGroup, GroupRow, State, is_run, own, reading, release
from penstock.runs.storage_check import LostFrame, Progress, Source, Survey, no_progress, sources_of, survey
from penstock.runs.stored_run import LogView, StoredRun, find_damage, look_at, refuse_old
from penstock.storage import FolderStorage, Gone, KeptStorage, Part, file_part, holds_data, is_object_url, open_storage

BUILDING = "recover.building"
ASIDE = "before-recover"
_NO_FRAMES = ("lock", "reserve", "marker", "marker.lock", "log.witness")
_ENDED = (State.COMMITTED, State.DROPPED, State.EVALUATION)
_WAITING = (State.WAITING, State.HELD, State.SCHEDULED, State.DELIVERED, State.QUARANTINED)


@dataclass(slots=True)
class Plan:
    """What a recovery would do to a run."""

    run: StoredRun
    log: LogView | None
    """The log to continue with; None: a new one is made."""
    run_id: str
    """Id of the run; empty: a new run."""
    found: Survey
    problems: dict[str, str] = field(default_factory=dict)
    """What keeps a plane from starting now."""
    register: list[str] = field(default_factory=list)
    """Segments that the recovery registers."""
    left: list[str] = field(default_factory=list)
    """Segments without a sound frame. They stay unregistered, for an operator to look at."""
    newer: list[tuple[GroupRow, LostFrame]] = field(default_factory=list)
    """Groups that got late columns after this copy of the log was made, with the frames that have them."""
    without_frame: int = 0
    """Number of groups that wait in the log and have no frame in storage."""
    ended: int = 0
    """Number of groups that a damaged log says were trained, dropped or only evaluated. They are left out."""
    copied: bool = False
    """Whether frames are copied to another storage."""

    @property
    def is_needed(self) -> bool:
        return bool(self.found.lost or self.problems or self.register or self.newer)

    @property
    def best_known(self) -> LogView:
        """The best source for steps, versions and tenants: the log, or what could be read of a damaged one."""
        return self.log or self.run.salvaged or LogView()

    @property
    def next_step(self) -> int:
        return self.best_known.next_step

    @property
    def newest_version(self) -> int:
        """The newest policy version in the log or in a group."""
        return max([self.best_known.policy_version, *(frame.policy_version or 0 for frame in self.found.lost)])


@contextmanager
def owning(folder: Path) -> Iterator[None]:
    """Lock a run's folder, so that no plane opens it. Raises Conflict while one has it open."""
    if not folder.is_dir():
        raise InvalidInput(f"{folder}: no such folder; give the folder of a run")
    lock = own(folder)
    try:
        yield
    finally:
        release(lock)


def plan_recovery(folder: str | Path, storage: str | Path | None = None, progress: Progress = no_progress) -> Plan:
    """Find out what a run's log lacks. Changes nothing. Raises an error if a recovery would be wrong."""
    run = look_at(folder, storage)
    refuse_old(run)
    find_damage(run)
    log = run.usable
    _check_belongs(run, log)
    view = log or LogView()
    # Groups that a damaged log says were trained count as known: putting them back would train them twice.
    known = {g.id: g.digest for g in view.groups.values()} | dict.fromkeys(_ended(run.salvaged))
    found = survey(sources_of(run.storage, view), known, progress, rollouts_of=run.rollouts_of)
    if log is None and not found.frames_in:
        raise InvalidInput(
            f"{run.folder}: no log and no frames ({run.storage.place}); nothing can be recovered here; give the folder "
            "of the frames with --storage, or recover from the files that hold them with --into"
        )
    plan = Plan(run, log, _run_id(run, log), found, run.disagreements(), ended=len(_ended(run.salvaged)))
    plan.register, plan.left = _sort_segments(run.storage, view, found)
    gone = _without_frame(run.storage, view)
    plan.newer = _newer(run, view, gone, found)
    plan.without_frame = len({row.op for row in gone}.difference(row.op for row, _ in plan.newer))
    return plan


def plan_copy(source: str | Path, into: str | Path, progress: Progress = no_progress) -> Plan:
    """Find the frames in any files, to copy them into the run of another folder."""
    root, target = Path(source), Path(into)
    if is_object_url(str(source)):
        sources = sources_of(open_storage(source), LogView())
    elif not root.exists():
        raise InvalidInput(f"{root}: no such folder or file")
    elif root.resolve() == target.resolve():
        raise InvalidInput(f"{target}: --into must be another folder than the one that is read")
    else:
        sources = _files(root, target.resolve())
    known: dict[str, bytes | None] = {}
    view = None
    if is_run(target):
        run = look_at(target)
        view = run.usable
        if run.disagreements():
            raise Conflict(f"{target}: recover this run first: `penstock storage recover {target}`")
        known = {} if view is None else {g.id: g.digest for g in view.groups.values()}
    else:
        run = StoredRun(target, FolderStorage(target / "storage", create=False), None)
    found = survey(sources, known, progress, rollouts_of=run.rollouts_of)
    return Plan(run, view, "" if view is None else view.run_id, found, copied=True)


def _files(root: Path, without: Path) -> list[Source]:
    """List the files that may hold frames, oldest first."""
    if root.is_file():
        return [Source(file_part(root))]
    found = []
    for folder, folders, names in os.walk(root, followlinks=False):
        folders[:] = [name for name in folders if (Path(folder) / name).resolve() != without]
        for name in names:
            path = Path(folder) / name
            if name not in _NO_FRAMES and not name.startswith(LOG) and path.is_file() and not path.is_symlink():
                found.append(Source(file_part(path)))
    return sorted(found, key=lambda one: (one.part.modified_ns, one.part.name))


# ------------------------------------------------------------------ do log and storage belong together?


def _check_belongs(run: StoredRun, log: LogView | None) -> None:
    """Raise Conflict if frames of one run would enter the log of another, or the storage is missing."""
    marker = run.marker
    if log is not None and marker is not None and marker.run_id != log.run_id:
        raise Conflict(
            f"{run.storage.place}: belongs to run {marker.run_id[:12]}, and the log in {run.folder} is of run "
            f"{log.run_id[:12]}; put the storage of this run back. The other run's frames can be used in a new folder: "
            f"`penstock storage recover {run.storage.place} --into NEW_FOLDER`"
        )
    if log is not None and marker is None and log.kept and not run.storage.segments():
        raise Conflict(
            f"{run.storage.place}: empty, and the log needs {len(log.kept):,} frames there; mount the storage or put "
            "it back; nothing was changed"
        )


def _ended(log: LogView | None) -> list[str]:
    """Return the ids of groups that no step will need."""
    return [] if log is None else [group.id for group in log.groups.values() if group.state in _ENDED]


def _run_id(run: StoredRun, log: LogView | None) -> str:
    """Return the id of the run the frames belong to: from the log, else from the marker or the witness."""
    if log is not None:
        return log.run_id
    if run.marker is not None:
        return run.marker.run_id
    if run.salvaged is not None:
        return run.salvaged.run_id
    return "" if run.witness is None else run.witness.run_id


def _sort_segments(storage: KeptStorage, log: LogView, found: Survey) -> tuple[list[str], list[str]]:
    """Sort unregistered segments into those to register and those to leave to an operator.

    A segment is registered if it holds frames of this run, or no data at all.
    """
    taken = {frame.segment for frame in found.lost}
    doubtful = {one.part.segment for one in (*found.conflicts, *found.unusable)}
    register: list[str] = []
    left: list[str] = []
    parts = storage.parts()
    for name in sorted(parts.keys() - log.segments):
        is_known = name in taken or (found.frames_in.get(name, 0) and name not in doubtful)
        (register if is_known or not any(map(_holds_data, parts[name])) else left).append(name)
    return register, left


def _holds_data(part: Part) -> bool:
    try:
        with part.opened() as file:
            return holds_data(file)
    except OSError:  # unreadable: assume that it holds something
        return True


def _newer(run: StoredRun, log: LogView, gone: Sequence[GroupRow], found: Survey) -> list[tuple[GroupRow, LostFrame]]:
    """Return groups that wait for late columns and whose frame is gone, with the frame that has the most columns.

    A log that is an older copy may lack attaches whose old frames are not deleted yet: then every group that waits gets
    a frame with more columns than its own. Otherwise such a frame was never attached."""
    newest: dict[str, LostFrame] = {}
    for frame in found.unused:  # oldest first: of two with as many columns the later one
        newest[frame.group] = max(frame, newest.get(frame.group, frame), key=lambda one: one.cells)
    rows = [group for group, _ in log.kept] if run.is_log_behind else gone
    waiting = [row for row in rows if row.state is State.WAITING and row.id in newest]
    if not waiting:
        return []
    lost = {row.op for row in gone}
    with reading(run.folder) as now:
        admitted = {record.group for _, record in now.records() if isinstance(record, AdmitGroup)}
        metadata = now.metadata_of([row.op for row in waiting])
    cells = {op: -1 if op in lost else sum(GroupMetadata.from_bytes(data).has) for op, data in metadata.items()}
    return [
        (row, newest[row.id])
        for row in waiting
        if row.op not in admitted and newest[row.id].cells > cells.get(row.op, -1)
    ]


def _without_frame(storage: KeptStorage, log: LogView) -> list[GroupRow]:
    """Return waiting groups whose frames are missing. Reads the first bytes of each only."""
    missing = []
    for group, at in log.kept:
        if group.state in _WAITING:
            try:
                is_there = bytes(storage.read(group.location, [(0, min(len(MAGIC), at.size))])[0]) == MAGIC
            except Gone:
                is_there = False
            if not is_there:
                missing.append(group)
    return missing
