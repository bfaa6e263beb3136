"""Compares a run's log with its storage: frames that are missing or damaged, groups that the log lacks, unneeded bytes.

Nothing is written, and a plane may be at work. It may free a frame after the log was read and before the frame is. So
whenever a frame looks wrong, the log is asked again whether it still needs it. Frames that the log does not know are
checked as if they had just been put.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from penstock.arrays import sample_digests
from penstock.errors import CorruptFrame, InvalidInput, PenstockError
from penstock.frames import UNCUT, Buffer, GroupMetadata, Limits, check_group, describe, read_head
from penstock.log import GroupRow, State, reading
from penstock.plane import MAX_ID
from penstock.runs.stored_run import LogView, StoredRun, find_damage, look_at, refuse_old, rollouts_digest
from penstock.storage import Away, Gone, KeptStorage, Location, Part, Piece, Range, find_frames, read_at, read_each

LIMITS = Limits(max_samples=1 << 16, max_tokens=1 << 26, max_bytes=2 << 30)
"""The most that one group may decode to."""
Progress = Callable[[int], None]
"""Called with the number of bytes that were just read."""


def no_progress(_: int) -> None:
    """Report nothing."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file that may hold frames."""

    part: Part
    known: Sequence[Range] = ()
    """Byte ranges of its segment that the log knows: not searched."""

    @property
    def known_here(self) -> list[Range]:
        """`known`, clipped to this file and counted from its start."""
        # A file that begins at 100 of its segment with 50 bytes: segment range (90, 120) is (0, 20) here.
        start, size = self.part.start, self.part.size
        return [(max(a - start, 0), b - start) for a, b in self.known if b > start and a < start + size]


@dataclass(frozen=True, slots=True, kw_only=True)
class LostFrame:
    """A sound frame of a group."""

    part: Part
    at: int
    """Offset in its file."""
    size: int
    group: str
    digest: bytes
    """XXH3-128 of the frame."""
    content: bytes
    """Digest of its samples: the same however they are encoded."""
    samples: int
    tokens: int
    policy_version: int | None
    rollouts: bytes
    """Digest of what late columns do not change: which samples, and how long."""
    cells: int
    """Columns of its samples, in all. A group that got late columns has more than its earlier frames."""

    @property
    def location(self) -> str:
        return f"{self.segment}:{self.part.start + self.at}:{self.size}"

    @property
    def segment(self) -> str:
        return self.part.segment


@dataclass(frozen=True, slots=True)
class Unusable:
    """Bytes that look like a frame and cannot be accepted."""

    part: Part
    offset: int
    """Offset in its file."""
    size: int
    why: str


@dataclass(slots=True)
class Survey:
    """The frames found in a set of files."""

    lost: list[LostFrame] = field(default_factory=list)
    """Groups that the log does not have, each once."""
    repeated: int = 0
    """Number of frames whose groups the log has, or that were found twice."""
    unused: list[LostFrame] = field(default_factory=list)
    """Other frames of groups that the log has: of a late column that was not attached, or of a group that ended."""
    conflicts: list[Unusable] = field(default_factory=list)
    """Frames whose group is known with other samples."""
    unusable: list[Unusable] = field(default_factory=list)
    frames_in: dict[str, int] = field(default_factory=dict)
    """Segment -> number of sound frames in it."""


def survey(
    sources: Iterable[Source],
    known: Mapping[str, bytes | None],
    progress: Progress = no_progress,
    *,
    rollouts_of: Callable[[str], bytes | None],
) -> Survey:
    """Search files for frames. `known` maps the id of each group in the log to the XXH3-128 of its frame. None instead
    of a digest accepts any frame of that group as known. `rollouts_of` returns `LostFrame.rollouts` of such a group, or
    None if it has ended."""
    found, frames = Survey(), dict[str, LostFrame]()
    for source in sources:
        try:
            with source.part.opened() as file:
                for piece in find_frames(file, source.known_here):
                    _sort(found, frames, known, rollouts_of, source, _read(file, source, piece))
                    progress(piece.size)
        except OSError as error:
            found.unusable.append(Unusable(source.part, 0, 0, error.strerror or str(error)))
    found.lost = list(frames.values())
    return found


def _sort(
    found: Survey,
    frames: dict[str, LostFrame],
    known: Mapping[str, bytes | None],
    rollouts_of: Callable[[str], bytes | None],
    source: Source,
    frame: LostFrame | Unusable,
) -> None:
    if isinstance(frame, Unusable):
        found.unusable.append(frame)
        return
    found.frames_in[frame.segment] = found.frames_in.get(frame.segment, 0) + 1
    if frame.group in known:
        same, where = known[frame.group] in (None, frame.digest), "the log has it with other samples"
        if not same and rollouts_of(frame.group) in (None, frame.rollouts):
            found.unused.append(frame)
            return
    elif (other := frames.setdefault(frame.group, frame)) is frame:
        return
    elif other.rollouts == frame.rollouts and other.cells != frame.cells:
        # One was made of the other when its group got late columns, and is not deleted yet.
        same, where = True, ""
        frames[frame.group] = max(other, frame, key=lambda one: one.cells)
    else:
        # By the digest of samples, not of bytes: a client that repeats a put may have encoded it differently.
        same, where = other.content == frame.content, "found before with other samples"
    if same:
        found.repeated += 1
    else:
        why = f"group {frame.group!r}: {where}"
        found.conflicts.append(Unusable(source.part, frame.at, frame.size, why))


def _read(file: int, source: Source, piece: Piece) -> LostFrame | Unusable:
    if piece.problem:
        return Unusable(source.part, piece.offset, piece.size, piece.problem)
    try:
        frame = read_at(file, piece.offset, piece.size)
        metadata = metadata_of_frame(frame)
    except (PenstockError, MemoryError) as error:
        return Unusable(source.part, piece.offset, piece.size, str(error))
    except Exception as error:  # noqa: BLE001 - whatever one frame provokes, go on with the others
        return Unusable(source.part, piece.offset, piece.size, f"{type(error).__name__}: {error}")
    return LostFrame(
        part=source.part,
        at=piece.offset,
        size=piece.size,
        group=metadata.group,
        digest=xxhash.xxh3_128_digest(frame),
        content=xxhash.xxh3_128_digest(b"".join(metadata.digests)),
        samples=metadata.num_samples,
        tokens=metadata.num_tokens,
        policy_version=metadata.policy_version,
        rollouts=rollouts_digest(metadata),
        cells=sum(metadata.has),
    )


def metadata_of_frame(frame: bytes) -> GroupMetadata:
    """Compute the metadata of a frame, which names its group itself. Raises an error if the frame is not acceptable.

    It is computed for a `seq_len` that truncates nothing. A plane recomputes it for groups that its own one truncates.
    """
    group = next(iter(read_head(frame, limits=LIMITS).text["group"]), "")
    if len(group) > MAX_ID:
        raise InvalidInput(f"group id of {len(group)} characters; a plane takes 1 to {MAX_ID}")
    return check_group(frame, group=group, seq_len=UNCUT, limits=LIMITS, is_partial=True)


def frames_of(part: Part, lost: Sequence[LostFrame]) -> Iterator[tuple[LostFrame, bytes]]:
    """Read the frames that were found in a file."""
    with part.opened() as file:
        for frame in lost:
            yield frame, read_at(file, frame.at, frame.size)


# ------------------------------------------------------------------ the check


_BATCH = 256
"""Groups whose metadata is read at a time: a long transaction would keep a plane's write-ahead log from shrinking."""


@dataclass(frozen=True, slots=True)
class BadFrame:
    """A frame that the log needs and that is missing or damaged in storage."""

    group: str
    location: str
    why: str


@dataclass(slots=True)
class Report:
    """The result of a check."""

    folder: str
    storage: str
    fast: bool
    run_id: str = ""
    epoch: int = 0
    commits: int = 0
    marker: dict[str, Any] | None = None
    witness: dict[str, Any] | None = None
    disagreements: dict[str, str] = field(default_factory=dict)
    """What keeps a plane from starting here: log, marker or witness -> why."""
    frames: int = 0
    """Number of frames that the log needs."""
    bytes: int = 0
    missing: list[BadFrame] = field(default_factory=list)
    damaged: list[BadFrame] = field(default_factory=list)
    segments: int = 0
    unregistered: dict[str, int] = field(default_factory=dict)
    """Unregistered segment -> bytes. While there are any, a plane deletes nothing."""
    dead_bytes: int = 0
    """Bytes in registered segments that no group needs."""
    pending_frees: int = 0
    """Number of frames and segments that are still to be deleted."""
    lost: int = 0
    """Number of groups in storage that the log does not have. `penstock storage recover` adds them."""
    lost_groups: list[str] = field(default_factory=list)
    unused: int = 0
    """Number of frames that a worker wrote for a late column and did not attach, or that are of groups that ended."""
    unused_bytes: int = 0
    conflicts: list[str] = field(default_factory=list)
    """Frames of groups that are known with other samples."""
    broken: list[str] = field(default_factory=list)
    """Damaged frames that the log does not know either."""

    @property
    def ok(self) -> bool:
        return not (self.missing or self.damaged or self.disagreements)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok}


def check(
    folder: str | Path, *, storage: str | Path | None = None, fast: bool = False, progress: Progress = no_progress
) -> Report:
    """Compare log and storage. `fast` compares the sizes of segments only; otherwise every frame is read."""
    run = look_at(folder, storage)
    refuse_old(run)
    if not fast:
        find_damage(run)
    report = Report(str(run.folder), run.storage.place, fast, disagreements=run.disagreements())
    report.marker = (
        None if run.marker is None else {k: getattr(run.marker, k) for k in ("run", "run_id", "epoch", "commits")}
    )
    report.witness = None if run.witness is None else asdict(run.witness)
    log = run.log or LogView()
    report.run_id, report.epoch, report.commits = log.run_id, log.epoch, log.commits
    _check_frames(run, log, report, progress)
    _count_bytes(run.storage, log, report)
    if not fast:
        known = {g.id: g.digest for g in log.groups.values()}
        found = survey(sources_of(run.storage, log), known, progress, rollouts_of=run.rollouts_of)
        _add_survey(run, found, report)
    return report


def sources_of(storage: KeptStorage, log: LogView) -> list[Source]:
    """List the files of a storage, oldest first, with the byte ranges that the log knows."""
    extents = log.extents()
    found = [
        Source(part, extents.get(name, ()))
        for name, parts in storage.parts().items()
        if name not in log.frees
        for part in parts
    ]
    return sorted(found, key=lambda one: (one.part.modified_ns, one.part.name))


def _add_survey(run: StoredRun, found: Survey, report: Report) -> None:
    since = _groups_now(run) if found.lost else set()  # a plane at work accepts groups meanwhile
    report.lost_groups = [frame.group for frame in found.lost if frame.group not in since]
    report.lost, report.unused = len(report.lost_groups), len(found.unused)
    report.unused_bytes = sum(frame.size for frame in found.unused)
    report.conflicts, report.broken = [[*map(_described, some)] for some in (found.conflicts, found.unusable)]


def _described(one: Unusable) -> str:
    return f"{one.part.segment or one.part.name} at {one.part.start + one.offset}: {one.why}"


def _groups_now(run: StoredRun) -> set[str]:
    if run.log is None:
        return set()
    with reading(run.folder) as log:
        return {name for (name,) in log.rows("SELECT id FROM groups")}


# ------------------------------------------------------------------ frames


def _check_frames(run: StoredRun, log: LogView, report: Report, progress: Progress) -> None:
    parts = run.storage.parts() if report.fast and log.kept else {}
    kept = sorted(log.kept, key=lambda one: (one[1].segment, one[1].offset))
    for first in range(0, len(kept), _BATCH):
        batch = kept[first : first + _BATCH]
        metadata = None if report.fast else _metadata(run, [group.op for group, _ in batch])
        frames = None if metadata is None else read_each(run.storage, [group.location for group, _ in batch])
        for group, at in batch:
            report.frames += 1
            report.bytes += at.size
            try:
                if metadata is None or frames is None:
                    _check_size(parts, at)
                else:
                    _check_frame(next(frames), group, metadata.get(group.op))
            except PenstockError as error:
                if isinstance(error, Away):
                    run.storage.segments()  # raises Away itself if the storage cannot be reached at all
                if _is_needed(run, group):
                    found = BadFrame(group.id, group.location, str(error))
                    (report.missing if isinstance(error, Gone) else report.damaged).append(found)
            progress(at.size)


def _check_size(parts: dict[str, list[Part]], at: Location) -> None:
    mine = [part for part in parts.get(at.segment, ()) if part.start <= at.offset]
    if not mine:
        raise Gone(f"{at}: its segment is missing")
    end = mine[-1].start + mine[-1].size
    if end < at.end:
        raise Gone(f"{mine[-1].name}: ends {at.end - end} bytes before the frame at {at.offset} does")


def _check_frame(frame: Buffer | PenstockError, group: GroupRow, metadata: bytes | None) -> None:
    """Raise unless the samples in storage are those that were accepted."""
    if isinstance(frame, PenstockError):
        raise frame
    if not any(frame):
        raise Gone(f"{group.location}: was deleted: nothing but zeros is there")
    if group.state is State.EVALUATION or metadata is None:
        if xxhash.xxh3_128_digest(frame) != group.digest:
            raise CorruptFrame(f"{group.location}: not the bytes that were accepted")
        return
    _, samples, _ = describe(frame, limits=LIMITS)
    if tuple(sample_digests(samples)) != GroupMetadata.from_bytes(metadata).digests:
        raise CorruptFrame(f"{group.location}: other samples than were accepted")


def _metadata(run: StoredRun, ops: list[int]) -> dict[int, bytes]:
    with reading(run.folder) as log:
        return log.metadata_of(ops)


def _is_needed(run: StoredRun, group: GroupRow) -> bool:
    """Return whether the log still has the frame. A plane at work may have freed it since."""
    with reading(run.folder) as log:
        return log.location_at(group.op) == group.location


# ------------------------------------------------------------------ bytes


def _count_bytes(storage: KeptStorage, log: LogView, report: Report) -> None:
    found = storage.segments()
    needed: dict[str, int] = {}
    for _, at in log.kept:
        needed[at.segment] = needed.get(at.segment, 0) + at.size
    report.segments = len(found)
    report.unregistered = {name: size for name, size in sorted(found.items()) if name not in log.segments}
    parts = storage.parts()
    for name, size in found.items():
        if name in log.segments:
            # Disk usage counts full blocks, and can be less than the size where frames were punched out. Whichever is
            # smaller is closest to what was written.
            written = min(size, sum(part.size for part in parts.get(name, ())))
            report.dead_bytes += max(written - needed.get(name, 0), 0)
    report.pending_frees = len(log.frees)
