"""The header of a message: a checksum, the protocol, the run, and a record.

    checksum   8 bytes    XXH3 of the rest: not every network path delivers bytes unaltered
    protocol   1 byte
    run id    16 bytes    the run that sender and receiver belong to; zeros in a client's first message
    record     msgpack    one of `messages.py`

A run gets its id when its log is created. A client learns the id at first contact (`Attach`, answered by `Attached`)
and sends it with every later message. A message for another run is answered with `Foreign` and has no other effect.
This catches a client that outlives its run while a new one is started in the same folder or at the same address.
"""

from __future__ import annotations

import re

import msgspec
import xxhash

from penstock.errors import CorruptFrame, InvalidInput
from penstock.protocol.messages import Buffer, FromClient, FromPlane

PROTOCOL = 3
"""The first byte after the checksum."""
NO_RUN = bytes(16)
"""The run id of a client that does not know the run yet."""
MAX_HEADER = 1 << 24
HEAD_BYTES = 25
"""Bytes before the record: 8 + 1 + 16."""
_PREFIX = bytes([PROTOCOL])
_UNPACKABLE = (TypeError, ValueError, OverflowError, RecursionError)
"""What the encoder raises for a value that no message can hold. A lone surrogate is a ValueError."""
_PACK = msgspec.msgpack.Encoder()
_TO_PLANE: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
_TO_CLIENT: msgspec.msgpack.Decoder[FromPlane] = msgspec.msgpack.Decoder(FromPlane)


def pack_message(message: FromClient | FromPlane, run_id: bytes = NO_RUN) -> bytes:
    """Return a message's header: everything but the payload."""
    return wrap(_PACK.encode(message), run_id)


def wrap(record: bytes, run_id: bytes) -> bytes:
    """Return the header for a record that is already encoded."""
    body = _PREFIX + run_id + record
    return xxhash.xxh3_64_digest(body) + body


def check_message(message: FromClient) -> None:
    """Raise InvalidInput if a value has a type that the plane cannot read.

    The plane drops a message that it cannot read, like one that was altered on the way, so its sender would ask again
    for ever.
    """
    try:
        _TO_PLANE.decode(_PACK.encode(message))
    except msgspec.ValidationError as error:
        raise InvalidInput(_wrong_value(message, str(error))) from None
    except _UNPACKABLE as error:
        raise InvalidInput(f"{_unpackable(message)}; {error}") from None


def _wrong_value(message: FromClient, problem: str) -> str:
    """Name the field that "Expected `float`, got `bool` - at `$[8]`" is about: a message is an array, its tag first."""
    found = re.search(r"^(.*) - at `\$\[(\d+)\]", problem)
    if found is None:
        return f"{type(message).__name__}: {problem}"
    field = message.__struct_fields__[int(found[2]) - 1]
    return f"{field}: {repr(getattr(message, field))[:60]}; {found[1][:1].lower()}{found[1][1:]}"


def _unpackable(message: FromClient) -> str:
    """Name the first field that cannot be encoded."""
    for field in message.__struct_fields__:
        try:
            _PACK.encode(getattr(message, field))
        except _UNPACKABLE:
            return f"{field}: {repr(getattr(message, field))[:60]}"
    return type(message).__name__


class Packer:
    """Packs messages of one run. A message sent to many processes in a row is packed once."""

    def __init__(self, run_id: bytes = NO_RUN) -> None:
        self._run_id = run_id
        self._last: FromClient | FromPlane | None = None
        self._packed = b""

    def __call__(self, message: FromClient | FromPlane) -> bytes:
        if message is not self._last:  # identity is enough: a broadcast passes the same object to each peer
            self._last, self._packed = message, pack_message(message, self._run_id)
        return self._packed


def run_of(header: Buffer) -> bytes:
    """Return the run id of a header. Call `read_from_*` first: it verifies the header."""
    return bytes(memoryview(header)[9:HEAD_BYTES])


def read_from_client(header: Buffer) -> FromClient:
    """Decode a message from a producer or rank. Raises CorruptFrame for anything else."""
    try:
        return _TO_PLANE.decode(_checked(header))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptFrame(f"message: {error}") from None


def read_from_plane(header: Buffer) -> FromPlane:
    """Decode a message from the plane. Raises CorruptFrame for anything else."""
    try:
        return _TO_CLIENT.decode(_checked(header))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptFrame(f"message: {error}") from None


def _checked(header: Buffer) -> memoryview:
    view = memoryview(header)
    if not HEAD_BYTES < len(view) <= MAX_HEADER:
        raise CorruptFrame(f"message: a header of {len(view)} bytes; must have from {HEAD_BYTES + 1} to {MAX_HEADER}")
    if xxhash.xxh3_64_digest(view[8:]) != view[:8]:
        raise CorruptFrame("message: checksum does not match; the bytes were altered on the way")
    if view[8] != PROTOCOL:
        both = f"protocol {view[8]}, this process speaks protocol {PROTOCOL}"
        raise CorruptFrame(f"message: {both}; use the same version of Penstock on both sides")
    return view[HEAD_BYTES:]
