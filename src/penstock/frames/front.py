"""A frame's front: prefix, header and head, all that must be known to read samples of it by range.

The front of a group of sixteen samples takes about half a kilobyte. It travels with the group's metadata, so a reader
that has it needs one round trip to the storage.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from penstock.errors import CorruptFrame
from penstock.frames.layout import PREFIX_SIZE, Buffer, read_sizes


def front_size(data: Buffer) -> int:
    """The size of the front of the frame that begins with these bytes, at least 48 of them."""
    header_size, head_size, _ = read_sizes(data)
    return PREFIX_SIZE + header_size + head_size


def front_of(frame: Buffer) -> bytes:
    """The front of a frame, or of any first bytes of it that hold the front.

    >>> import penstock as ps
    >>> frame = ps.encode([ps.Sample(id="a", token_ids=[1, 2, 3])])
    >>> front = front_of(frame)
    >>> frame.startswith(front), len(front) == front_size(frame)
    (True, True)
    """
    size = front_size(frame)
    view = memoryview(frame).cast("B")
    if len(view) < size:
        raise CorruptFrame(f"frame: {len(view)} bytes where its front takes {size}; it was cut off")
    return bytes(view[:size])


def digest_of(pieces: Sequence[Buffer]) -> bytes:
    """xxh3-128 of the frame that these pieces make, without joining them."""
    state = xxhash.xxh3_128()
    for piece in pieces:
        state.update(piece)
    return state.digest()
