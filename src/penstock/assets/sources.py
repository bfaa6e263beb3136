"""Convert any accepted image source to the bytes that are stored: bytes, `data:` URIs, `file:` URLs, Pillow images.

Original bytes are stored unchanged, so the hash is theirs. Only a Pillow image, which has no bytes of its own, is
written as PNG (lossless, and the same bytes for the same pixels under one Pillow version).

`file:` URLs are written and read by one strict codec. Writing with percent-encoding and reading by slicing off
`file://` (seen in the wild) breaks every path with a space. Here `path_of(file_url(p)) == p` for every path the system
can hold.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import quote_from_bytes, unquote_to_bytes, urlsplit

from penstock.assets.safe_open import read_beneath
from penstock.errors import CorruptAsset, ImageRefused, InvalidReference

if TYPE_CHECKING:
    from PIL.Image import Image

ImageSource: TypeAlias = "bytes | bytearray | memoryview | str | Image"
"""Bytes of a file, a data: URI, a file: URL inside an allowed folder, or a Pillow image."""
_ALIASES = {"image/jpg": "image/jpeg", "image/pjpeg": "image/jpeg", "image/x-png": "image/png"}
_MAX_DATA_HEADER = 256


def read_source(source: ImageSource, *, allowed: Sequence[str], max_bytes: int) -> tuple[bytes, str | None]:
    """Return the bytes, and the declared media type if there is one."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        if memoryview(source).nbytes > max_bytes:
            raise ImageRefused(f"image: {memoryview(source).nbytes} bytes; at most {max_bytes} are taken")
        return bytes(source), None
    if isinstance(source, str):
        if source[:5].lower() == "data:":
            declared, data = data_bytes(source, max_bytes=max_bytes)
            return data, _ALIASES.get(declared, declared)
        if source.startswith("file:"):
            return _read_file(source, allowed, max_bytes), None
        raise InvalidReference(
            f"{source[:80]!r}: neither a data: URI nor a file: URL; nothing is fetched, hand in the bytes"
        )
    if hasattr(source, "save") and hasattr(source, "getbands"):
        return _write_png(source), None
    raise ImageRefused(f"image: a {type(source).__name__}; give bytes, a data: URI, a file: URL or a Pillow image")


def check_declared(declared: str | None, found: str) -> None:
    """Raise when an image was declared as something its bytes are not."""
    if declared is not None and declared != found:
        raise ImageRefused(f"image: declared {declared[:40]!r} but the bytes are {found}; declare what it is")


def _read_file(url: str, allowed: Sequence[str], max_bytes: int) -> bytes:
    path = PurePosixPath(path_of(url))
    root = next((root for root in allowed if path.is_relative_to(root)), None)
    if root is None:
        raise InvalidReference(f"{url[:80]!r}: outside the allowed folders; allow its folder with files_from=[...]")
    parts = path.relative_to(root).parts
    try:
        if not parts:
            raise IsADirectoryError
        return read_beneath(root, parts, max_bytes=max_bytes)
    except CorruptAsset as error:
        raise ImageRefused(f"{url[:80]!r}: {error}") from None
    except OSError as error:
        # The same message for absent, forbidden and linked files, so that a caller cannot probe for paths.
        raise ImageRefused(f"{url[:80]!r}: no readable plain file there ({os.strerror(error.errno or 21)})") from None


def _write_png(image: Image) -> bytes:
    from PIL import ImageOps

    upright = ImageOps.exif_transpose(image)
    if upright.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
        upright = upright.convert("RGB")
    buffer = io.BytesIO()
    upright.save(buffer, format="PNG", compress_level=3)
    return buffer.getvalue()


# ------------------------------------------------------------------ URLs


def file_url(path: str) -> str:
    """Convert an absolute path to a URL.

    >>> file_url("/run 1/ü.png")
    'file:///run%201/%C3%BC.png'
    """
    return "file://" + quote_from_bytes(os.fsencode(path), safe="/")


def path_of(url: str) -> str:
    """Return the absolute path of a `file:` URL on this host. Raises InvalidReference for anything else.

    >>> path_of("file:///run%201/%C3%BC.png")
    '/run 1/ü.png'
    """
    split = urlsplit(url) if url.startswith(("file:///", "file://localhost/")) else None
    # The raw text is checked too, because urlsplit drops tabs and newlines and hides an empty query.
    if split is None or not url.isascii() or not url.isprintable() or any(c in url for c in "?#\\ "):
        raise InvalidReference(f"{url[:80]!r}: not a file URL of this host; write file:///path, percent-encoded")
    path = os.fsdecode(unquote_to_bytes(split.path))
    parts = path.split("/")[1:]
    if "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise InvalidReference(f"{url[:80]!r}: the path holds an empty, '.', '..' or NUL part; give the plain path")
    return path


def data_bytes(uri: str, *, max_bytes: int) -> tuple[str, bytes]:
    """Return media type and decoded bytes of a base64 `data:` URI. The size is checked before anything is decoded."""
    comma = uri.find(",", 0, _MAX_DATA_HEADER)
    if comma < 0:
        raise ImageRefused("data URI: no comma in its first 256 characters; write data:image/png;base64,<data>")
    media_type, *parameters = uri[len("data:") : comma].lower().split(";")
    if not media_type.startswith("image/") or parameters[-1:] != ["base64"]:
        raise ImageRefused(f"data URI {uri[:comma][:60]!r}: must be of type image/... and end in ;base64")
    size = (len(uri) - comma - 1) // 4 * 3
    if size > max_bytes + 2:
        raise ImageRefused(f"data URI: {size} bytes of image; at most {max_bytes} are taken, make it smaller")
    try:
        return media_type, base64.b64decode(uri[comma + 1 :], validate=True)
    except (binascii.Error, ValueError):
        raise ImageRefused("data URI: not valid base64; encode the bytes again") from None
