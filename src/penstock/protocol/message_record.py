"""What all records of the protocol have in common: frozen, tagged by kind, fields by position, only ever appended."""

from __future__ import annotations

import msgspec

SCHEMA = 2


class Message(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    """One of them."""
