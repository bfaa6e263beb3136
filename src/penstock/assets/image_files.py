"""Images as files: read a header and check it against limits, then decode to RGB.

**Headers.** A 20 kB PNG can hold 169 megapixels (843 MB decoded), so sizes are checked here before anything is decoded.
The parsers of the four formats are ours, not Pillow's, for three reasons:

- Sizes are checked before any decoder allocates. Pillow allocates a WebP's canvas on open, and reads a PNG's pixels to
  find an orientation stored after them.
- The rollout side needs no Pillow.
- The complete file is walked, so a truncated file, or one with other data after its end, is rejected on arrival.

Each parser takes the bytes of a file and returns a `Header`. Anything unexpected raises `Malformed`. No pixel is
decoded.

**Pixels** are the same on every rank: upright, opaque on white, eight bits. A model must see in training what it saw
when sampling. So these rules apply, in this order:

1. The EXIF orientation is applied.
2. 16-bit greyscale keeps its high byte, as Pillow does for 16-bit colour.
3. Transparency of any kind is flattened onto white.
4. CMYK, palette and greyscale become RGB.
5. The first frame of an animation is taken. Colour profiles are ignored.
"""

from __future__ import annotations

import io
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, CorruptAsset, ImageRefused
from penstock.extras import require

if TYPE_CHECKING:
    from PIL.Image import Image

EXTENSIONS = {"image/png": "png", "image/jpeg": "jpg", "image/webp": "webp", "image/gif": "gif"}
"""File extension of each accepted media type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is accepted. The defaults fit screenshots and photographs."""

    max_bytes: int = 32 << 20
    """Of the file."""
    max_pixels: int = 32_000_000
    """Width times height: 32 MP are 96 MB decoded."""
    max_side: int = 16_384
    max_frames: int = 1
    """Animations are rejected by default: it is unknown which frame the model saw."""


DEFAULT_LIMITS = Limits()


def probe(data: bytes, limits: Limits = DEFAULT_LIMITS, *, where: str = "image") -> Header:
    """Return the header of an image within the limits. Raises `ImageRefused` otherwise.

    >>> probe(bytes.fromhex("89504e470d0a1a0a"))
    Traceback (most recent call last):
    penstock.errors.ImageRefused: image: the PNG is cut short; give a complete PNG, JPEG, WebP or GIF file
    """
    if len(data) > limits.max_bytes:
        raise ImageRefused(f"{where}: {len(data)} bytes; at most {limits.max_bytes} are taken, make it smaller")
    try:
        header = read_header(data)
    except Malformed as error:
        raise ImageRefused(f"{where}: {error}; give a complete PNG, JPEG, WebP or GIF file") from None
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
    """Return (width, height) as displayed, after the orientation was applied."""
    return (header.height, header.width) if header.orientation >= 5 else (header.width, header.height)


class Malformed(Exception):
    """What is wrong with the file, as half a sentence. Never leaves the package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    media_type: str
    width: int
    """As stored, before the orientation is applied."""
    height: int
    frames: int = 1
    orientation: int = 1
    """The EXIF tag, 1..8; 5 and up swap width and height."""


_MAX_BLOCKS = 100_000  # chunks or segments in one file; a 32 MiB PNG in 8 KiB chunks has 4,096
_MAX_SCANS = 64
"""In one JPEG. Encoders write about ten. Each is as much work as all pixels: 5,000 scans of 40 bytes took minutes."""
_PNG = b"\x89PNG\r\n\x1a\n"


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield (type, start, length) of each chunk. The last one is IEND and ends the file."""
    at = len(_PNG)
    for _ in range(_MAX_BLOCKS):
        if at + 12 > len(data):
            raise Malformed("the PNG is cut short")
        length = int.from_bytes(data[at : at + 4])
        kind = data[at + 4 : at + 8]
        if length > len(data) - at - 12:
            raise Malformed("the PNG is cut short")
        yield kind, at + 8, length
        at += length + 12
        if kind == b"IEND":
            if at != len(data):
                raise Malformed(f"{len(data) - at} bytes follow the end of the PNG")
            return
    raise Malformed("the PNG has too many chunks")


def read_png(data: bytes) -> Header:
    width = height = pixels = 0
    frames = orientation = 1
    for index, (kind, start, length) in enumerate(_png_chunks(data)):
        if (index == 0) != (kind == b"IHDR") or (kind == b"IHDR" and length != 13):
            raise Malformed("the PNG does not begin with one IHDR chunk")
        if kind == b"IHDR":
            width, height = struct.unpack_from(">II", data, start)
        elif kind == b"acTL" and length == 8:
            frames = int.from_bytes(data[start : start + 4])
        elif kind == b"eXIf":
            orientation = read_orientation(data[start : start + length])
        pixels += kind == b"IDAT"
    if not pixels:
        raise Malformed("the PNG has no IDAT chunk")
    return Header(media_type="image/png", width=width, height=height, frames=frames, orientation=orientation)


# The next marker inside entropy-coded data: FF 00 is a literal FF, FF D0..D7 restart, FF FF padding.
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)
_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, start, length) of each segment up to EOI. Entropy-coded data is skipped."""
    at = 2
    for _ in range(_MAX_BLOCKS):
        found = _MARKER.search(data, at)
        if found is None:
            raise Malformed("the JPEG is cut short")
        marker, at = data[found.end() - 1], found.end()
        if marker == 0xD9:
            if data[at:].strip(b"\0"):  # cameras pad with zeros
                raise Malformed(f"{len(data) - at} bytes follow the end of the JPEG")
            return
        length = int.from_bytes(data[at : at + 2]) if marker not in (0x01, 0xD8) else 0
        if length > len(data) - at or (length < 2 and marker not in (0x01, 0xD8)):
            raise Malformed("the JPEG is cut short")
        yield marker, at + 2, length - 2
        at += length
    raise Malformed("the JPEG has too many segments")


def read_jpeg(data: bytes) -> Header:
    width = height = scans = 0
    orientation = 1
    for marker, start, length in _jpeg_segments(data):
        if marker in _FRAMES and length >= 6:
            height, width = struct.unpack_from(">HH", data, start + 1)
        elif marker == 0xE1 and data[start : start + 6] == b"Exif\0\0":
            orientation = read_orientation(data[start + 6 : start + length])
        scans += marker == 0xDA
    if not 0 < scans <= _MAX_SCANS:
        raise Malformed(f"the JPEG has {scans} scans, and must have 1 to {_MAX_SCANS}")
    return Header(media_type="image/jpeg", width=width, height=height, orientation=orientation)


def read_gif(data: bytes) -> Header:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + _gif_table(flags)
    frames = 0
    for _ in range(_MAX_BLOCKS):
        if at >= len(data) or data[at] == 0x3B:
            break
        if data[at] == 0x2C:  # an image: descriptor, colour table, code size, data
            frames += 1
            at = _gif_blocks(data, at + 11 + _gif_table(data[at + 9]))
        elif data[at] == 0x21:  # an extension
            at = _gif_blocks(data, at + 2)
        else:
            raise Malformed("the GIF holds an unknown block")
    if at != len(data) - 1:
        raise Malformed("the GIF is cut short, has too many blocks, or bytes follow its end")
    return Header(media_type="image/gif", width=width, height=height, frames=frames)


def _gif_table(flags: int) -> int:
    return 3 * 2 ** ((flags & 7) + 1) if flags & 0x80 else 0


def _gif_blocks(data: bytes, at: int) -> int:
    """Return the position after a chain of length-prefixed blocks."""
    for _ in range(10 * _MAX_BLOCKS):
        if at >= len(data) or not data[at]:
            return at + 1
        at += data[at] + 1
    raise Malformed("the GIF has too many blocks")


def _riff_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield (type, start, length) of each chunk after the RIFF header."""
    at = 12
    for _ in range(_MAX_BLOCKS):
        length = int.from_bytes(data[at + 4 : at + 8], "little")
        if at + 8 > len(data) or length > len(data) - at - 8:
            raise Malformed("the WebP is cut short")
        yield data[at : at + 4], at + 8, length
        at += 8 + length + length % 2
        if at == len(data):
            return
    raise Malformed("the WebP has too many chunks")


def read_webp(data: bytes) -> Header:
    if int.from_bytes(data[4:8], "little") + 8 != len(data):
        raise Malformed("the WebP is cut short, or bytes follow its end")
    width = height = frames = pixels = 0
    orientation = 1
    for kind, start, length in _riff_chunks(data):
        # Only the first bytes matter: do not copy a chunk of megabytes to read ten of them.
        body = data[start : start + min(length, 1 << 16)]
        if kind == b"VP8X" and len(body) >= 10:
            width, height = int.from_bytes(body[4:7], "little") + 1, int.from_bytes(body[7:10], "little") + 1
        elif kind in (b"VP8 ", b"VP8L"):
            pixels += 1
            if not width:
                width, height = _webp_size(kind, body)
        elif kind == b"EXIF":
            orientation = read_orientation(body.removeprefix(b"Exif\0\0"))
        frames += kind == b"ANMF"
    if not (pixels or frames):
        raise Malformed("the WebP has no image")
    return Header(
        media_type="image/webp", width=width, height=height, frames=max(frames, pixels), orientation=orientation
    )


def _webp_size(kind: bytes, body: bytes) -> tuple[int, int]:
    if kind == b"VP8 " and body[3:6] == b"\x9d\x01\x2a" and len(body) >= 10:
        width, height = struct.unpack_from("<HH", body, 6)
        return width & 0x3FFF, height & 0x3FFF
    if kind == b"VP8L" and body[:1] == b"\x2f" and len(body) >= 5:
        bits = int.from_bytes(body[1:5], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    raise Malformed("the WebP's frame header is damaged")


def read_orientation(exif: bytes) -> int:
    """Return EXIF tag 0x0112 of the first image directory; 1 (upright) when absent or unreadable."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return 1
    try:
        (offset,) = struct.unpack_from(f"{order}I", exif, 4)
        (count,) = struct.unpack_from(f"{order}H", exif, offset)
        # Bounded: a hostile count of 65,535 entries would only cost time.
        for entry in range(min(count, 512)):
            tag, kind, number, value = struct.unpack_from(f"{order}HHIH", exif, offset + 2 + 12 * entry)
            if tag == 0x0112 and kind == 3 and number == 1:
                return int(value) if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


READERS: dict[bytes, Callable[[bytes], Header]] = {
    _PNG: read_png,
    b"\xff\xd8\xff": read_jpeg,
    b"GIF87a": read_gif,
    b"GIF89a": read_gif,
}
"""Parsers by the first bytes of a file. WebP has its magic at 0 and at 8."""


def read_header(data: bytes) -> Header:
    """Parse the header of a file in any of the four formats."""
    reader = next((reader for magic, reader in READERS.items() if data.startswith(magic)), None)
    if reader is None and data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        reader = read_webp
    if reader is None:
        raise Malformed("not a PNG, JPEG, WebP or GIF")
    try:
        return reader(data)
    except (struct.error, IndexError):
        raise Malformed("the file ends inside its header") from None


# ------------------------------------------------------------------ pixels


_FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP", "image/gif": "GIF"}
# What Pillow's decoders raise on damaged files; anything else is a bug and should be seen.
_DAMAGED = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, struct.error, zlib.error)


def decode_rgb(data: bytes, limits: Limits = DEFAULT_LIMITS, *, where: str = "image") -> NDArray[np.uint8]:
    """Return [height, width, 3] pixels. Checks the header first, so nothing larger than the limits is allocated."""
    header = probe(data, limits, where=where)
    opened = _open(data, header.media_type, where)
    # Our parser and Pillow must agree on the size, or the limits were checked for another image.
    if opened.size != (header.width, header.height):
        raise CorruptAsset(f"{where}: {opened.size} decoded for {header.width} x {header.height} in the header")
    try:
        opened.load()
        rgb = _rgb(opened)
    except _DAMAGED as error:
        # Pillow's messages may name objects and addresses; the class is enough.
        raise CorruptAsset(f"{where}: does not decode ({type(error).__name__}); store the image again") from None
    return np.ascontiguousarray(_upright(rgb, header.orientation))


def _open(data: bytes, media_type: str, where: str) -> Image:
    require("decoding images", "PIL")
    from PIL import Image, ImageFile, WebPImagePlugin  # noqa: F401 - the plugin registers itself

    if ImageFile.LOAD_TRUNCATED_IMAGES:
        raise ConfigError("PIL.ImageFile.LOAD_TRUNCATED_IMAGES is on: damaged images would train as grey; turn it off")
    try:
        return Image.open(io.BytesIO(data), formats=(_FORMATS[media_type],))
    except (*_DAMAGED, Image.DecompressionBombError) as error:
        raise CorruptAsset(f"{where}: does not open ({type(error).__name__}); store the image again") from None


def _rgb(image: Image) -> NDArray[np.uint8]:
    if image.mode.startswith("I"):
        grey = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        from PIL import Image

        clear = image.convert("RGBA")
        white = Image.new("RGBA", clear.size, (255, 255, 255, 255))
        return np.asarray(Image.alpha_composite(white, clear).convert("RGB"))
    return np.asarray(image.convert("RGB"))


def _upright(rgb: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Undo the EXIF orientation: 2 to 4 mirror and rotate in place, 5 to 8 also swap the sides."""
    if orientation >= 5:
        rgb = rgb.swapaxes(0, 1)
    down, right = {2: (1, -1), 3: (-1, -1), 4: (-1, 1), 6: (1, -1), 7: (-1, -1), 8: (-1, 1)}.get(orientation, (1, 1))
    return rgb[::down, ::right]
