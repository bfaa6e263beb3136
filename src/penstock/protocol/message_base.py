"""The base of all messages."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    """A record that travels as a msgpack array, with its tag first."""
