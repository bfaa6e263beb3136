"""Opens a storage by its address: a folder, or an object store by URL."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from penstock.atomic import folder_errors, resolved
from penstock.errors import Conflict, InvalidInput
from penstock.storage.custody import Marker, read_marker
from penstock.storage.folder import FolderStorage
from penstock.storage.interface import is_object_url
from penstock.storage.object_requests import parse_object_url
from penstock.storage.objects import ObjectStorage

KeptStorage: TypeAlias = FolderStorage | ObjectStorage
"""A storage that outlives the process, and that other processes open by its address."""

_DEPTHS = ("", "*/", "*/*/", "*/*/*/")
"""Levels at which a folder is searched for runs: runs/demo/plane/storage is the deepest that commands make."""


def address_of(text: str | Path) -> str:
    """Return a storage's address as other processes open it: an absolute path, or the URL of an object store.

    >>> address_of("s3://bucket/runs/mine/")
    's3://bucket/runs/mine'
    """
    given = str(text)
    if is_object_url(given):
        return str(parse_object_url(given))
    with folder_errors(given):
        return str(resolved(_folder(given)))


def open_storage(text: str | Path, *, create: bool = True) -> KeptStorage:
    """Open a storage by its address. `create` makes a folder that is missing; buckets are never created."""
    given = str(text)
    if is_object_url(given):
        return ObjectStorage(given)
    return FolderStorage(_folder(given), create=create)


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageRun:
    """A run whose frames are in a storage."""

    address: str
    marker: Marker
    segments: int
    num_bytes: int


def runs_below(text: str | Path) -> list[StorageRun]:
    """Return the runs that have their storage at or below an address: every folder or prefix with a marker."""
    found = []
    for address in _marked(str(text)):
        storage = open_storage(address, create=False)
        marker = read_marker(storage)
        if marker is not None:
            sizes = storage.segments()
            found.append(StorageRun(address=address, marker=marker, segments=len(sizes), num_bytes=sum(sizes.values())))
        storage.close()
    return found


def erase(address: str, run_id: str) -> int:
    """Delete all frames of a run, then its marker. Returns the number of segments. Raises Conflict if the storage
    belongs to another run."""
    storage = open_storage(address, create=False)
    try:
        marker = read_marker(storage)
        if marker is None:
            return 0
        if marker.run_id != run_id:
            raise Conflict(f"{address}: holds run {marker.run_id[:12]}, not {run_id[:12]}; nothing was deleted")
        names = list(storage.segments())
        storage.delete(names)
        storage.remove_marker()  # last, so that an interrupted deletion can be found and finished
        return len(names)
    finally:
        storage.close()


def _folder(given: str) -> Path:
    path = given.removeprefix("file://")
    if "://" in path:
        parse_object_url(given)  # raises: it knows which schemes there are
    return Path(path)


def _marked(text: str) -> list[str]:
    if is_object_url(text):
        url = address_of(text)
        with closing(ObjectStorage(url)) as storage:
            return [f"{url}/{place}".rstrip("/") for place in storage.marked()]
    root = _folder(text)
    if not root.is_dir():
        raise InvalidInput(f"{root}: no such folder")
    found = [path.parent for depth in _DEPTHS for path in root.glob(f"{depth}marker")]
    return sorted(str(path) for path in found if (path / "segments").is_dir())
