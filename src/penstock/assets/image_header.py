"""Judge an image by its header: what it is, how large it will be, whether we take it.

A 20 kB PNG can hold 169 megapixels (843 MB decoded), so nothing is decoded before its size was judged here.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.assets.containers import Header, Malformed, read_header
from penstock.errors import ImageRefused

EXTENSIONS = {"image/png": "png", "image/jpeg": "jpg", "image/webp": "webp", "image/gif": "gif"}
"""File extension of each media type we take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is taken; the defaults fit screenshots and photographs."""

    max_bytes: int = 32 << 20
    """Of the file."""
    max_pixels: int = 32_000_000
    """Width times height: 32 MP are 96 MB decoded."""
    max_side: int = 16_384
    max_frames: int = 1
    """Animations are refused by default: which frame would the model have seen?"""


DEFAULT_LIMITS = Limits()


def probe(data: bytes, limits: Limits = DEFAULT_LIMITS, *, where: str = "image") -> Header:
    """The header of an image within the limits; `ImageRefused` otherwise.

    >>> probe(bytes.fromhex("89504e470d0a1a0a"))
    Traceback (most recent call last):
    penstock.errors.ImageRefused: image: the PNG is cut short; give a whole PNG, JPEG, WebP or GIF file
    """
    if len(data) > limits.max_bytes:
        raise ImageRefused(f"{where}: {len(data)} bytes; at most {limits.max_bytes} are taken, make it smaller")
    try:
        header = read_header(data)
    except Malformed as error:
        raise ImageRefused(f"{where}: {error}; give a whole PNG, JPEG, WebP or GIF file") from None
    width, height = header.width, header.height
    if width < 1 or height < 1 or max(width, height) > limits.max_side or width * height > limits.max_pixels:
        raise ImageRefused(
            f"{where}: {width} x {height} pixels; must be 1 to {limits.max_side} a side "
            f"and at most {limits.max_pixels} in all, scale it down"
        )
    if not 1 <= header.frames <= limits.max_frames:
        raise ImageRefused(
            f"{where}: {header.frames} frames; must be 1 to {limits.max_frames}, "
            "extract the frame the model saw or raise Limits.max_frames"
        )
    return header


def upright_size(header: Header) -> tuple[int, int]:
    """(width, height) as the picture is looked at, after its orientation was applied."""
    return (header.height, header.width) if header.orientation >= 5 else (header.width, header.height)
