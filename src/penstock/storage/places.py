"""Opens a storage by its address: a folder, or an object store by URL."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from penstock.storage.folder import FolderStorage
from penstock.storage.object_requests import is_object_url, parse_object_url
from penstock.storage.objects import ObjectStorage

KeptStorage: TypeAlias = FolderStorage | ObjectStorage
"""One that outlives the process, and that others may open by its address."""


def address_of(text: str | Path) -> str:
    """The address of a storage as other processes open it: an absolute path, or the URL of an object store.

    >>> address_of("s3://bucket/runs/mine/")
    's3://bucket/runs/mine'
    """
    words = str(text)
    return str(parse_object_url(words)) if is_object_url(words) else str(Path(words.removeprefix("file://")).resolve())


def open_storage(text: str | Path, *, create: bool = True) -> KeptStorage:
    """`create`: make the folder if it is missing. Buckets are never made."""
    words = str(text)
    if is_object_url(words):
        return ObjectStorage(words)
    return FolderStorage(words.removeprefix("file://"), create=create)
