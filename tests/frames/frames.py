"""Frames to take apart: the golden ones, and putting a frame together again with checksums that fit.

An accident on the way changes bytes under the checksums; a hostile peer writes checksums that fit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from penstock.frames.layout import assemble, split

GOLDEN = Path(__file__).parent.parent / "golden"
FRAMES = sorted(GOLDEN.glob("v*/*.frame"))
REFUSED = sorted((GOLDEN / "refused").glob("*.frame"))
"""Frames that earlier writers made and no reader takes any more."""


def parts(frame: bytes) -> tuple[list[Any], bytes, bytes]:
    """(header as plain lists, head, body)."""
    sections = split(frame)
    header: list[Any] = msgspec.msgpack.decode(sections.header)
    return header, bytes(sections.head), bytes(sections.body)


def forged(header: Any, head: bytes, body: bytes) -> bytes:
    """A frame of these parts whose sizes and checksums are right."""
    raw = header if isinstance(header, bytes) else msgspec.msgpack.encode(header)
    return b"".join(assemble(raw, [head], [body]))
