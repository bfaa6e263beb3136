"""The interface for image storage: named, immutable blobs in a folder or an object store.

Names are relative paths of plain ASCII components. An implementation of `Blobs` must pass the conformance suite in
`penstock.testing.checks`. The asset store does not know where the bytes are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from penstock.errors import InvalidInput

_COMPONENT = re.compile(r"(?!\.)[A-Za-z0-9_.-]{1,200}")
MAX_DEPTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobInfo:
    name: str
    size: int
    """Bytes."""
    modified: float
    """Seconds since the epoch of the last write or touch."""


class Blobs(Protocol):
    """Named blobs, each written once and atomically: a reader sees all of it or nothing."""

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Store durably. Returns False and changes nothing if the name is taken. Exactly one of many writers wins."""

    def get(self, name: str, *, max_bytes: int) -> bytes:
        """Return the bytes. Raises MissingAsset, or CorruptAsset if larger than `max_bytes` or not a plain file."""

    def part(self, name: str, *, start: int, size: int) -> bytes:
        """Return at most `size` bytes (1 or more) from `start`, fewer where the blob ends. Raises MissingAsset."""

    def head(self, name: str) -> BlobInfo | None:
        """Return name, size and time without reading the blob, or None if absent."""

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        """Yield everything below the folder `prefix` ("" for all), in no particular order."""

    def touch(self, name: str) -> bool:
        """Mark as used now. Returns False if absent."""

    def move(self, name: str, to: str) -> bool:
        """Rename the blob, replacing an existing one. Returns False if absent."""

    def delete(self, name: str) -> bool:
        """Remove the blob. Returns False if absent."""

    def url(self, name: str) -> str:
        """Return where an inference server that shares this storage finds the blob."""


def check_name(name: str) -> list[str]:
    """Split a blob name into components. Raises if one could lead elsewhere.

    >>> check_name("images/ab/abcd.png")
    ['images', 'ab', 'abcd.png']
    """
    parts = name.split("/")
    if len(parts) > MAX_DEPTH or not all(_COMPONENT.fullmatch(part) for part in parts):
        raise InvalidInput(
            f"blob name {name[:80]!r}: give at most {MAX_DEPTH} components of A-Z a-z 0-9 _ . - that start with no dot"
        )
    return parts
