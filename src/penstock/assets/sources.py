"""Convert any accepted image source to the bytes that are stored.

Original bytes are stored unchanged, so the hash is theirs. Only a Pillow image, which has no bytes of its own, is
written as PNG (lossless, and the same bytes for the same pixels under one Pillow version).
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, TypeAlias

from penstock.assets.safe_open import read_beneath
from penstock.assets.urls import data_bytes, path_of
from penstock.errors import CorruptAsset, ImageRefused, InvalidReference

if TYPE_CHECKING:
    from PIL.Image import Image

ImageSource: TypeAlias = "bytes | bytearray | memoryview | str | Image"
"""Bytes of a file, a data: URI, a file: URL inside an allowed folder, or a Pillow image."""
_ALIASES = {"image/jpg": "image/jpeg", "image/pjpeg": "image/jpeg", "image/x-png": "image/png"}


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
