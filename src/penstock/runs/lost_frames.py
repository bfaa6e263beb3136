"""Finds frames in files that the log does not know, and checks each as if it had just been put."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import xxhash

from penstock.errors import InvalidInput, PenstockError
from penstock.frames import UNCUT, GroupMetadata, Limits, check_group, read_head
from penstock.plane import MAX_ID
from penstock.storage import Part, Piece, Range, find_frames, read_at

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


def rollouts_digest(metadata: GroupMetadata) -> bytes:
    """Return `LostFrame.rollouts` of a group."""
    return xxhash.xxh3_128_digest(msgspec.msgpack.encode((metadata.ids, metadata.lengths, metadata.loss_tokens)))


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
