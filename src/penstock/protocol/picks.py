"""Picks: which samples of which stored groups a rank trains in a step, and how it verifies what it read.

About 1 kB per group: the front of its frame gives the byte ranges of the samples, the digests verify their content.
"""

from __future__ import annotations

import math
import struct

import msgspec

from penstock.errors import CorruptFrame

_NAN = struct.pack("<f", math.nan)


class PickedGroup(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Some samples of one group."""

    group: str
    location: str
    """Where its frame is in storage."""
    rows: tuple[int, ...]
    """Which samples of the frame, ascending."""
    front: bytes
    """The first bytes of the frame, which describe its columns and where they are."""
    digests: tuple[bytes, ...]
    """Digests of these samples, 16 bytes each, as they are stored."""
    late: dict[str, bytes] = {}
    """Column -> float32 per sample, for values that were attached after the put; NaN = none."""


class StepPicks(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """All samples of one rank's step, in the order of its plan."""

    groups: tuple[PickedGroup, ...]

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @property
    def digests(self) -> list[bytes]:
        return [digest for picked in self.groups for digest in picked.digests]

    def late(self) -> dict[str, bytes]:
        """Return the late values of all samples, by column; NaN = none."""
        names = {name for picked in self.groups for name in picked.late}
        return {
            name: b"".join(picked.late.get(name, _NAN * len(picked.rows)) for picked in self.groups)
            for name in sorted(names)
        }

    def group_of(self, sample: int) -> str:
        """Return the group of a sample, by the sample's index in the step."""
        # Example: groups with 3 and 2 samples; sample 4 -> 4 - 3 = 1, so it is in the second group.
        for picked in self.groups:
            if sample < len(picked.rows):
                return picked.group
            sample -= len(picked.rows)
        raise IndexError(sample)

    @staticmethod
    def from_bytes(data: bytes) -> StepPicks:
        """Decode picks. Raises CorruptFrame."""
        try:
            found = _READ.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CorruptFrame(f"picks of a step: {error}") from None
        for picked in found.groups:
            if not picked.rows or len(picked.rows) != len(picked.digests):
                raise CorruptFrame(
                    f"picks of a step: group {picked.group[:80]!r}: {len(picked.rows)} samples, "
                    f"{len(picked.digests)} digests; there must be one for each"
                )
            if any(len(data) != 4 * len(picked.rows) for data in picked.late.values()):
                raise CorruptFrame(f"picks of a step: group {picked.group[:80]!r}: late values of other samples")
        return found


# Made at import: msgspec crashes when two threads are the first to decode a type.
_READ = msgspec.msgpack.Decoder(StepPicks)
