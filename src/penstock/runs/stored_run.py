"""Reads a run's log and storage side by side, without owning either: do they belong together, and which lacks what?

The order of reading matters while a plane works. It moves the witness after a commit, and the marker after the
decision it names. So both are read before the log: if one of them is ahead of the log then, the log has lost something.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import xxhash

from penstock.errors import CorruptFile, InvalidInput
from penstock.frames import GroupMetadata
from penstock.log import (
    FORMAT,
    Advance,
    EvictTenant,
    GroupRow,
    LogReader,
    Seen,
    Weigh,
    is_run,
    read_witness,
    reading,
    url_of,
)
from penstock.storage import (
    KeptStorage,
    Location,
    Marker,
    Range,
    is_segment_name,
    open_storage,
    parse_location,
    read_marker,
)


@dataclass(slots=True)
class LogView:
    """A log's contents at one moment, as far as recovery and checks need them."""

    run_id: str = ""
    epoch: int = 0
    commits: int = 0
    last_op: int = 0
    next_step: int = 1
    last_step: int = 0
    policy_version: int = 0
    storage: str = ""
    """Where its frames are; empty: in the log's folder."""
    members: set[str] = field(default_factory=set)
    """Tenants that have a table of their own."""
    groups: dict[str, GroupRow] = field(default_factory=dict)
    segments: set[str] = field(default_factory=set)
    frees: set[str] = field(default_factory=set)
    """Frames and segments that are still to be deleted."""

    @property
    def is_empty(self) -> bool:
        """Whether it holds no decision."""
        return not self.run_id or not (self.last_op or self.groups)

    @property
    def kept(self) -> list[tuple[GroupRow, Location]]:
        """The groups whose frames are needed, with their locations."""
        return [(group, parse_location(group.location)) for group in self.groups.values() if group.location]

    def extents(self) -> dict[str, list[Range]]:
        """Return the byte ranges that the log knows, by segment: of groups, and of frames still to be deleted."""
        found: dict[str, list[Range]] = {}
        places = [at for _, at in self.kept]
        places += [parse_location(name) for name in self.frees if not is_segment_name(name)]
        for at in places:
            found.setdefault(at.segment, []).append((at.offset, at.end))
        return found


@dataclass(slots=True)
class StoredRun:
    """A run's folder: its log, storage, marker and witness, and what is wrong with them."""

    folder: Path
    storage: KeptStorage
    log: LogView | None
    log_problem: str = ""
    """Why there is no log; empty if there is one."""
    log_format: int = FORMAT
    salvaged: LogView | None = None
    """The readable part of a damaged log."""
    marker: Marker | None = None
    marker_problem: str = ""
    """Why the marker cannot be read; empty also if there is none."""
    witness: Seen | None = None
    log_url: str = ""
    """Address of a log in a database, which needs no witness."""

    @property
    def usable(self) -> LogView | None:
        """The log, if it holds anything."""
        return None if self.log is None or self.log.is_empty else self.log

    @property
    def is_log_behind(self) -> bool:
        """Whether marker or witness have seen decisions that the log lacks: it is an older copy."""
        log, marker, seen = self.log, self.marker, self.witness
        if log is None:
            return False
        ahead = marker is not None and (marker.epoch > log.epoch or marker.commits > log.commits)
        return ahead or (seen is not None and seen.commits > log.commits)

    def rollouts_of(self, group: str) -> bytes | None:
        """Return the digest of a group's rollouts by the log's metadata, or None if its frame was freed."""
        assert self.log is not None
        op = self.log.groups[group].op
        with reading(self.folder) as log:
            data = log.metadata_of([op]).get(op)
        row = self.log.groups[group]
        if data is None or row.is_evaluation:
            return None if not row.location else b""
        return rollouts_digest(GroupMetadata.from_bytes(data))

    def disagreements(self) -> dict[str, str]:
        """Compare log, marker and witness. Returns which of them disagrees -> how. A plane starts only if none does."""
        found = {}
        log, marker, seen = self.log, self.marker, self.witness
        if log is None or (log.is_empty and (marker is not None or seen is not None)):
            found["log"] = self.log_problem or "empty, but the run was started before"
        if self.marker_problem or (marker is None and self.storage.segments()):
            found["marker"] = self.marker_problem or "missing"
        if log is None:
            return found
        if marker is not None and marker.run_id != log.run_id:
            found["marker"] = f"of run {marker.run_id[:12]}, and the log is of run {log.run_id[:12] or '(none)'}"
        elif marker is not None and (marker.epoch > log.epoch or marker.commits > log.commits):
            found["marker"] = (
                f"ahead: epoch {marker.epoch}, transaction {marker.commits}; the log ends at epoch {log.epoch}, "
                f"transaction {log.commits}: it lacks decisions"
            )
        if seen is None and log.commits > 1 and not self.log_url:
            found["witness"] = "missing or damaged"
        elif seen is not None and seen.run_id != log.run_id:
            found["witness"] = f"of run {seen.run_id[:12]}, and the log is of run {log.run_id[:12] or '(none)'}"
        elif seen is not None and seen.commits > log.commits:
            found["witness"] = f"ahead: {seen.commits} transactions; the log has {log.commits}: it lacks decisions"
        return found


def rollouts_digest(metadata: GroupMetadata) -> bytes:
    """Return `LostFrame.rollouts` of a group."""
    return xxhash.xxh3_128_digest(msgspec.msgpack.encode((metadata.ids, metadata.lengths, metadata.loss_tokens)))


def look_at(folder: str | Path, storage: str | Path | None = None) -> StoredRun:
    """Read a run's folder. `storage` is where its frames are, if they are elsewhere and the log cannot tell."""
    root = Path(folder)
    if not root.is_dir():
        raise InvalidInput(f"{root}: no such folder; give the folder of a run")
    early = open_storage(storage or _recorded(root), create=False)
    marker, problem = _marker(early)
    seen = read_witness(root)
    run = StoredRun(root, early, None, marker=marker, marker_problem=problem, witness=seen, log_url=url_of(root))
    try:
        run.log, run.log_format = read_view(root)
    except CorruptFile as error:
        run.log_problem = str(error)
    if not is_run(root):
        run.log, run.log_problem = None, "missing"
    elif run.log_format != FORMAT:
        run.log, run.log_problem = None, f"format {run.log_format}; this version reads format {FORMAT}"
    if run.log is None and not early.is_there() and not seen and not any(root.iterdir()):
        raise InvalidInput(f"{root}: empty; give the folder of a run")
    return run


def refuse_old(run: StoredRun) -> None:
    """Raise InvalidInput if log or folder are of an earlier version, which kept frames elsewhere without a marker."""
    is_old = not is_run(run.folder) and (run.folder / "frames").is_dir() and not run.storage.is_there()
    if run.log_format != FORMAT or is_old:
        raise InvalidInput(
            f"{run.folder}: a run of an earlier version; its frames can be used in a new run: "
            f"`penstock storage recover {run.folder} --into NEW_FOLDER`"
        )


def find_damage(run: StoredRun) -> None:
    """Have the database check itself. A damaged log is treated as missing; what was read of it stays in `salvaged`."""
    if run.log is None or run.log.is_empty:
        return
    with reading(run.folder) as log:
        found = log.damage()
    if found:
        run.log, run.log_problem, run.salvaged = None, f"damaged: {found}", run.log


def _recorded(root: Path) -> str:
    """Return where the log says the frames are; the folder's own storage if it says nothing."""
    try:
        log, _ = read_view(root, brief=True)
    except CorruptFile:
        log = LogView()
    return log.storage or str(root / "storage")


def _marker(storage: KeptStorage) -> tuple[Marker | None, str]:
    try:
        return read_marker(storage), ""
    except CorruptFile as error:
        return None, str(error)


def read_view(folder: Path, *, brief: bool = False) -> tuple[LogView, int]:
    """Read a run's log and its format. With `brief`, without groups and segments. Raises CorruptFile if the log cannot
    be read. A log without tables is empty."""
    view = LogView()
    if not is_run(folder):
        return view, FORMAT
    with reading(folder) as log:
        tables = log.tables()
        if "meta" not in tables:
            return view, FORMAT
        meta = log.all_meta()
        found = log.meta("format", FORMAT)
        if found != FORMAT or brief or "frees" not in tables:
            view.storage = meta.get("storage", "")
            return view, found
        try:
            _fill(view, log, meta)
        except (ValueError, TypeError, LookupError, msgspec.MsgspecError) as error:
            raise CorruptFile(f"{log.where}: {type(error).__name__}: {error}; the log cannot be read") from None
    return view, found


def _fill(view: LogView, log: LogReader, meta: dict[str, str]) -> None:
    view.run_id, view.storage = meta.get("run_id", ""), meta.get("storage", "")
    view.epoch, view.commits = log.meta("epoch", 0), log.meta("commits", 0)
    view.next_step = log.meta("next_step", 1)
    view.last_op = log.last_op
    row = log.first("SELECT MAX(step) FROM steps")
    view.last_step = 0 if row is None else row[0] or 0
    view.groups = {row.id: row for row in log.groups()}
    view.segments = {row.name for row in log.segments()}
    view.frees = set(log.frees())
    for _, record in log.records():
        if isinstance(record, Advance):
            view.policy_version = record.policy_version
        elif isinstance(record, Weigh):
            view.members.add(record.tenant)
        elif isinstance(record, EvictTenant):
            view.members.discard(record.tenant)
