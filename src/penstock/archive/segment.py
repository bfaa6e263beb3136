"""One object of an archive: a front that says what was decided, then the frames that belong to it.

    magic     8 bytes   "PSARCHIV"
    format    uint32    1
    length    uint32    bytes of the front
    checksum  16 bytes  XXH3-128 of the front
    front               msgpack, `Front`
    frames              one behind the other; the front has the place, size and checksum of each

Numbers are little-endian. Segments are numbered from 1 without a gap; each holds the checksum of the front before it,
so a segment that is missing, doubled or of another run is noticed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec
import xxhash

from penstock.errors import CorruptFile

MAGIC, FORMAT = b"PSARCHIV", 1
_HEADER = struct.Struct("<8sII16s")
HEADER_BYTES = _HEADER.size
MAX_FRONT_BYTES = 256 << 20
"""No front is so large; what claims to be is damaged."""


class _Entry(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    pass


class GroupEntry(_Entry, frozen=True):
    """A group that was accepted. Its frame is in this segment or a later one, or in none if nothing used it."""

    op: int
    """The decision's number: the order in which groups arrived."""
    id: str
    digest: bytes
    """XXH3-128 of its frame."""
    policy_version: int | None
    samples: int
    tokens: int
    size: int
    """Bytes of its frame."""
    run: str
    prompt: str
    kinds: tuple[tuple[str, str], ...]
    """What all groups of a step must have in common, by column."""
    evaluation: bool
    at: float
    """Seconds since 1970 at which it was accepted; 0 where the plane did not write it down."""


class RecordEntry(_Entry, frozen=True):
    """Any other decision, as the plane's log has it: versions published, priorities, quarantine, shares."""

    op: int
    data: bytes


class StepEntry(_Entry, frozen=True):
    """A step that was trained. One that stands in two segments was planned anew in between: the later one counts."""

    step: int
    op: int
    """The decision by which its groups were drawn."""
    groups: tuple[int, ...]
    """By op, in the order in which they were drawn."""
    digests: tuple[str, ...]
    """Per rank, of its plan and of the samples it was sent; empty where the plane had given that back."""
    policy_version: int
    samples: int
    tokens: int
    loss_tokens: int


class FrameEntry(_Entry, frozen=True):
    """A frame of this segment."""

    op: int
    """Of its group."""
    offset: int
    """From the end of the front."""
    size: int
    digest: bytes
    """XXH3-128."""


class Front(_Entry, frozen=True):
    """What a segment holds, and how far the archive has come with it."""

    number: int
    previous: bytes
    """Checksum of the front before this one; empty for the first."""
    run_id: str
    """Tells runs apart."""
    run: str
    epoch: int
    """Of the plane that wrote it."""
    settings: str
    """The plane's settings, as plane.toml has them."""
    through_op: int
    """Every group and record up to this decision is in this segment or an earlier one."""
    through_step: int
    """So is every step up to this one, and the frames of its groups."""
    step_op: int
    """The op of that step."""
    through_part: int
    """Of the step behind it, the frames of so many groups, in the order in which they were drawn."""
    groups: tuple[GroupEntry, ...] = ()
    records: tuple[RecordEntry, ...] = ()
    steps: tuple[StepEntry, ...] = ()
    frames: tuple[FrameEntry, ...] = ()
    missing: tuple[int, ...] = ()
    """Groups of these steps, and evaluation groups, whose frames were given back before they were archived."""


def name_of(number: int) -> str:
    """The object's name."""
    return f"segments/{number:08}"


def write_segment(front: Front, frames: Sequence[bytes]) -> bytes:
    """The bytes of a segment."""
    data = msgspec.msgpack.encode(front)
    header = _HEADER.pack(MAGIC, FORMAT, len(data), xxhash.xxh3_128_digest(data))
    return b"".join((header, data, *frames))


def checksum_of(data: bytes) -> bytes:
    """Of the front of a segment, as its header has it."""
    checksum: bytes = _HEADER.unpack_from(data)[3]
    return checksum


def front_size(header: bytes, where: str) -> int:
    """How long the front is, by the first bytes of a segment."""
    if len(header) < HEADER_BYTES:
        raise CorruptFile(f"{where}: {len(header)} bytes; a segment of an archive has at least {HEADER_BYTES}")
    magic, found, size, _ = _HEADER.unpack_from(header)
    if magic != MAGIC:
        raise CorruptFile(f"{where}: begins with {magic!r}; not a segment of an archive")
    if found != FORMAT:
        raise CorruptFile(f"{where}: format {found}; this version reads format {FORMAT}")
    if size > MAX_FRONT_BYTES:
        raise CorruptFile(f"{where}: a front of {size:,} bytes; at most {MAX_FRONT_BYTES:,} are read")
    return int(size)


def read_front(data: bytes, where: str) -> Front:
    """The front of a segment, of which `data` is the beginning; raises CorruptFile when it is not as it was written."""
    size = front_size(data, where)
    front = data[HEADER_BYTES : HEADER_BYTES + size]
    if len(front) < size or xxhash.xxh3_128_digest(front) != checksum_of(data):
        raise CorruptFile(f"{where}: {len(front):,} of {size:,} bytes of its front, not as written; restore the object")
    try:
        return msgspec.msgpack.decode(front, type=Front)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptFile(f"{where}: {error}; written by a later version, or altered") from None


def check_frame(frame: bytes, entry: FrameEntry, where: str) -> bytes:
    """The frame, if it is as it was written."""
    if len(frame) != entry.size or xxhash.xxh3_128_digest(frame) != entry.digest:
        raise CorruptFile(
            f"{where}: {len(frame):,} of {entry.size:,} bytes of the frame of group {entry.op}, not as written; "
            "restore the object"
        )
    return frame
