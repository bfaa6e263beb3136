"""Which samples a rank takes from whom: the payload of a step whose frames are with keepers. Two to four kilobytes."""

from __future__ import annotations

import msgspec

from penstock.errors import CorruptFrame
from penstock.send.messages import Frames


class PickedGroup(msgspec.Struct, frozen=True, array_like=True):
    """Some samples of one group."""

    group: str
    copies: tuple[tuple[int, int], ...]
    """(which keeper of `StepPicks.keepers`, the number it has there)."""
    rows: tuple[int, ...]
    """Which samples of its frame, ascending."""


class StepPicks(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """All that one rank takes, in the order in which its plan counts samples."""

    keepers: tuple[str, ...]
    groups: tuple[PickedGroup, ...]

    def to_bytes(self) -> bytes:
        return _PACK.encode(self)

    @staticmethod
    def from_frames(frames: Frames) -> StepPicks:
        """Of a payload; raises CorruptFrame."""
        try:
            found = _READ.decode(frames[0] if len(frames) == 1 else b"")
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CorruptFrame(f"picks of a step: {error}") from None
        for picked in found.groups:
            if not picked.rows or not all(0 <= keeper < len(found.keepers) for keeper, _ in picked.copies):
                raise CorruptFrame(f"picks of a step: group {picked.group!r}: {picked.copies}, rows {picked.rows[:8]}")
        return found


_PACK = msgspec.msgpack.Encoder()
_READ: msgspec.msgpack.Decoder[StepPicks] = msgspec.msgpack.Decoder(StepPicks)
