"""An image reference: its identity and its size, never its pixels."""

from __future__ import annotations

from typing import Protocol

import msgspec

from penstock.arrays import ImageSpan
from penstock.assets.image_header import EXTENSIONS
from penstock.assets.layouts import Grid


class Geometry(Protocol):
    """The part of a layout that gives an image's tokens without its pixels."""

    @property
    def merge(self) -> int: ...
    def grid(self, width: int, height: int) -> Grid: ...


class ImageRef(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What the store returns for an image: enough to place it in a sample.

    >>> from penstock.assets.layouts import QWEN3_VL
    >>> ref = ImageRef(hash="0" * 64, media_type="image/png", width=1280, height=720, num_bytes=40_000)
    >>> describe(ref, QWEN3_VL), span(ref, QWEN3_VL, offset=5).end
    (((1, 44, 80), 880), 885)
    """

    hash: str
    """sha256 of the original bytes, 64 hex digits: the image's identity."""
    media_type: str
    """Detected from the bytes, not as declared."""
    width: int
    """Upright, in pixels."""
    height: int
    num_bytes: int

    @property
    def file_id(self) -> str:
        """The file's name in the store: the hash and the extension of its media type."""
        return f"{self.hash}.{EXTENSIONS[self.media_type]}"


def describe(ref: ImageRef, layout: Geometry) -> tuple[Grid, int]:
    """Return the image's grid in patches and its number of placeholder tokens, from the header alone."""
    grid = layout.grid(ref.width, ref.height)
    return grid, grid[0] * grid[1] * grid[2] // layout.merge**2


def span(ref: ImageRef, layout: Geometry, *, offset: int) -> ImageSpan:
    """Return the span of the image whose first placeholder token is `offset` in its sample."""
    grid, length = describe(ref, layout)
    return ImageSpan(
        hash=ref.hash,
        grid=grid,
        offset=offset,
        length=length,
        merge=layout.merge,
        media_type=ref.media_type,
        width=ref.width,
        height=ref.height,
        num_bytes=ref.num_bytes,
    )
