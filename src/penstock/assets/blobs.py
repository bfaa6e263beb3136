"""The one small interface behind which images live: named, immutable blobs in a folder or an object store.

Names are relative paths of plain ASCII components. Whoever implements `Blobs` runs the conformance suite in
`penstock.testing.stores`; the store above it never knows where the bytes are.
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
    """Named blobs, each written once and whole: a reader sees all of it or nothing."""

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Store durably; False, and nothing changed, when the name is taken. Of many writers one gets True."""

    def get(self, name: str, *, max_bytes: int) -> bytes:
        """The bytes; `MissingAsset` when absent, `CorruptAsset` when larger than `max_bytes` or not a plain file."""

    def part(self, name: str, *, start: int, size: int) -> bytes:
        """At most `size` bytes, 1 or more, from `start` on, fewer where the blob ends; `MissingAsset` when absent."""

    def head(self, name: str) -> BlobInfo | None:
        """What is known without reading; None when absent."""

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        """Everything below the folder `prefix` ("" for all), in no particular order."""

    def touch(self, name: str) -> bool:
        """Mark as used now; False when absent."""

    def move(self, name: str, to: str) -> bool:
        """Give the blob another name, replacing what had it; False when absent."""

    def delete(self, name: str) -> bool:
        """Remove; False when absent."""

    def url(self, name: str) -> str:
        """Where an inference server that shares this storage finds the blob."""


def check_name(name: str) -> list[str]:
    """The components of a blob name; raises when one could lead elsewhere.

    >>> check_name("images/ab/abcd.png")
    ['images', 'ab', 'abcd.png']
    """
    parts = name.split("/")
    if len(parts) > MAX_DEPTH or not all(_COMPONENT.fullmatch(part) for part in parts):
        raise InvalidInput(
            f"blob name {name[:80]!r}: give at most {MAX_DEPTH} components of A-Z a-z 0-9 _ . - that start with no dot"
        )
    return parts
