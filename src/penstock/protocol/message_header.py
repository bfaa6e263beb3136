"""The header of a message: a checksum, the protocol, the run, and a record.

    checksum   8 bytes    XXH3 of the rest: not every path between two hosts keeps bytes as they were
    protocol   1 byte
    run id    16 bytes    the run that sender and receiver belong to; zeros in a client's first message
    record     msgpack    one of `messages.py`

A run gets its id when its folder is made. A client learns it at its first contact (`Attach`, answered by `Attached`),
and everything it says from then on carries it: what was meant for another run, also one that lay in the same folder or
was reached at the same address before, is answered with `Foreign` and goes no further.
"""

from __future__ import annotations

import msgspec
import xxhash

from penstock.errors import CorruptFrame
from penstock.protocol.messages import Buffer, FromClient, FromPlane

PROTOCOL = 2
"""The first byte after the checksum."""
NO_RUN = bytes(16)
"""The run id of a client that has not heard of the plane yet."""
MAX_HEADER = 1 << 24
HEAD_BYTES = 25
"""Of a header, before its record."""
_PREFIX = bytes([PROTOCOL])
_PACK = msgspec.msgpack.Encoder()
_TO_PLANE: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
_TO_CLIENT: msgspec.msgpack.Decoder[FromPlane] = msgspec.msgpack.Decoder(FromPlane)


def pack_message(message: FromClient | FromPlane, run_id: bytes = NO_RUN) -> bytes:
    """Everything but the payload, behind a checksum: not every path between two hosts keeps bytes as they were."""
    return wrap(_PACK.encode(message), run_id)


def wrap(record: bytes, run_id: bytes) -> bytes:
    """A header around a record that is encoded already."""
    body = _PREFIX + run_id + record
    return xxhash.xxh3_64_digest(body) + body


class Packer:
    """Packs messages of one run, one after another; one that goes to many processes is packed once."""

    def __init__(self, run_id: bytes = NO_RUN) -> None:
        self._run_id = run_id
        self._last: FromClient | FromPlane | None = None
        self._packed = b""

    def __call__(self, message: FromClient | FromPlane) -> bytes:
        if message is not self._last:
            self._last, self._packed = message, pack_message(message, self._run_id)
        return self._packed


def run_of(header: Buffer) -> bytes:
    """The run that a message belongs to; read the message first, to know that the header is one."""
    return bytes(memoryview(header)[9:HEAD_BYTES])


def read_from_client(header: Buffer) -> FromClient:
    """The message a producer or rank sent; CorruptFrame for anything else."""
    try:
        return _TO_PLANE.decode(_checked(header))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptFrame(f"message: {error}") from None


def read_from_plane(header: Buffer) -> FromPlane:
    """The message the plane sent; CorruptFrame for anything else."""
    try:
        return _TO_CLIENT.decode(_checked(header))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptFrame(f"message: {error}") from None


def _checked(header: Buffer) -> memoryview:
    view = memoryview(header)
    if not HEAD_BYTES < len(view) <= MAX_HEADER:
        raise CorruptFrame(f"message: a header of {len(view)} bytes; from {HEAD_BYTES + 1} to {MAX_HEADER} are allowed")
    if xxhash.xxh3_64_digest(view[8:]) != view[:8]:
        raise CorruptFrame("message: checksum does not match; the bytes were altered on the way")
    if view[8] != PROTOCOL:
        both = f"protocol {view[8]}, and this is protocol {PROTOCOL}"
        raise CorruptFrame(f"message: of {both}; use the same version of Penstock on both sides")
    return view[HEAD_BYTES:]
