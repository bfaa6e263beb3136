"""Chunks in which a list of prompts is sent, and the digests by which the plane knows what it has.

A list is sent once, in chunks of about a megabyte. The digest of the list is made of the digests of its chunks, so the
plane can check each chunk as it arrives, in any order, and a client that restarts sends only what is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import xxhash

from penstock.arrays import MAX_TEXT
from penstock.errors import InvalidInput
from penstock.protocol.lease_messages import MAX_PROMPT_BYTES

CHUNK_PROMPTS = 4096
"""Prompts of a chunk, at most."""
_CHUNK_BYTES = 1 << 20
"""Names and payloads of a chunk, unless one prompt alone has more."""
_PACK = msgspec.msgpack.Encoder()


class PromptChunk(NamedTuple):
    """Consecutive prompts of a list."""

    first: int
    names: tuple[str, ...]
    payloads: tuple[bytes, ...]

    @property
    def digest(self) -> bytes:
        """XXH3-128 of place, names and payloads."""
        return xxhash.xxh3_128_digest(_PACK.encode((self.first, self.names, self.payloads)))


def chunk_prompts(prompts: Iterable[tuple[str, bytes]]) -> Iterator[PromptChunk]:
    """Split a list into chunks.

    >>> [(chunk.first, len(chunk.names)) for chunk in chunk_prompts([("a", b"")] * 5000)]
    [(0, 4096), (4096, 904)]
    """
    first, names, payloads, size = 0, list[str](), list[bytes](), 0
    for name, payload in prompts:
        if names and (len(names) == CHUNK_PROMPTS or size + len(name) + len(payload) > _CHUNK_BYTES):
            yield PromptChunk(first, tuple(names), tuple(payloads))
            first, names, payloads, size = first + len(names), [], [], 0
        names.append(name)
        payloads.append(payload)
        size += len(name) + len(payload)
    if names:
        yield PromptChunk(first, tuple(names), tuple(payloads))


def list_digest(chunks: Sequence[bytes]) -> bytes:
    """Return the digest of a list, from those of its chunks."""
    return xxhash.xxh3_128_digest(b"".join(chunks))


def check_prompt(name: str, payload: bytes) -> None:
    """Raise InvalidInput for a prompt that no list may have."""
    if not 0 < len(name) <= MAX_TEXT:
        raise InvalidInput(f"prompt {name[:40]!r}: a name of {len(name):,} characters; give 1 to {MAX_TEXT}")
    # A sample's prompt may hold no such character: its group could never be put.
    odd = () if name.isprintable() else name
    bad = next((c for c in odd if ord(c) < 32 or 0x7F <= ord(c) < 0xA0 or 0xD800 <= ord(c) < 0xE000), None)
    if bad is not None:
        raise InvalidInput(f"prompt {name[:40]!r}: its name holds the control character U+{ord(bad):04X}; remove it")
    if len(payload) > MAX_PROMPT_BYTES:
        raise InvalidInput(
            f"prompt {name[:40]!r}: {len(payload):,} bytes of JSON; give at most {MAX_PROMPT_BYTES:,}, and keep "
            "the rest where workers find it by the prompt's name"
        )
