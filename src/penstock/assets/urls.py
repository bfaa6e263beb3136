"""`file:` URLs and `data:` URIs, each read and written by one strict codec.

Writing with percent-encoding and reading by slicing off `file://` (seen in the wild) breaks every path with a space.
Here `path_of(file_url(p)) == p` for every path the system can hold.
"""

from __future__ import annotations

import base64
import binascii
import os
from urllib.parse import quote_from_bytes, unquote_to_bytes, urlsplit

from penstock.errors import ImageRefused, InvalidReference

_MAX_DATA_HEADER = 256


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
