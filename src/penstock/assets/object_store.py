"""Blobs in an object store (S3, GCS, Azure, memory) through `obstore`, one maintained client for all of them.

The store is atomic per object, so a put is one conditional request. An object store has no modification time that can
be set: `touch` writes the object again, and only if its time is older than `touch_after_s`, because a sweep only asks
for "used within the last minutes".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

try:
    import obstore
    from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError
except ImportError as error:
    from penstock.extras import missing

    raise missing("ObjectStore", error) from None

from penstock.assets.blobs import BlobInfo, check_name
from penstock.errors import ConfigError, CorruptAsset, MissingAsset, StorageError

T = TypeVar("T")


class ObjectStore:
    """Blobs in an `obstore` store, below an optional prefix.

    >>> from obstore.store import MemoryStore
    >>> blobs = ObjectStore(MemoryStore(), url="memory://demo")
    >>> blobs.put_if_absent("a/b", b"hello"), blobs.get("a/b", max_bytes=99)
    (True, b'hello')
    """

    def __init__(self, store: Any, *, url: str, touch_after_s: float = 300.0) -> None:
        if "://" not in url or url.endswith("/"):
            raise ConfigError(
                f"url {url!r}: give where the blobs are, as s3://bucket/prefix without a slash at the end"
            )
        self._store = store
        self._url = url
        self._touch_after_s = touch_after_s

    def __repr__(self) -> str:
        return f"ObjectStore({self._url!r})"

    def put_if_absent(self, name: str, data: bytes) -> bool:
        check_name(name)
        try:
            _call(name, lambda: obstore.put(self._store, name, data, mode="create"))
        except FileExistsError:
            return False
        return True

    def get(self, name: str, *, max_bytes: int) -> bytes:
        check_name(name)
        answer = _call(name, lambda: obstore.get(self._store, name))
        size = int(answer.meta["size"])
        if size > max_bytes:  # the body has not been fetched yet
            raise CorruptAsset(f"{name}: {size} bytes; at most {max_bytes} are read")
        return bytes(_call(name, answer.bytes))

    def part(self, name: str, *, start: int, size: int) -> bytes:
        check_name(name)
        try:
            return bytes(_call(name, lambda: obstore.get_range(self._store, name, start=start, end=start + size)))
        except StorageError:
            found = self.head(name)  # stores reject a range that begins after the end
            if found is None or start < found.size:
                raise
            return b""

    def head(self, name: str) -> BlobInfo | None:
        check_name(name)
        try:
            return _info(_call(name, lambda: obstore.head(self._store, name)))
        except MissingAsset:
            return None

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        if prefix:
            check_name(prefix)
        pages = iter(obstore.list(self._store, prefix or None))
        while (page := _call(prefix, lambda: next(pages, None))) is not None:
            yield from map(_info, page)

    def touch(self, name: str) -> bool:
        info = self.head(name)
        if info is not None and time.time() - info.modified > self._touch_after_s:
            data = self.get(name, max_bytes=info.size)
            _call(name, lambda: obstore.put(self._store, name, data))
        return info is not None

    def move(self, name: str, to: str) -> bool:
        check_name(name)
        check_name(to)
        try:
            # Copy, then delete: a writer that replaces `name` in between loses its copy. A folder has no such gap.
            _call(name, lambda: obstore.rename(self._store, name, to))
        except MissingAsset:
            return False
        return True

    def delete(self, name: str) -> bool:
        present = self.head(name) is not None
        if present:  # S3 answers a delete of nothing with success
            _call(name, lambda: obstore.delete(self._store, name))
        return present

    def url(self, name: str) -> str:
        return f"{self._url}/{'/'.join(check_name(name))}"


def _info(meta: Any) -> BlobInfo:
    return BlobInfo(name=meta["path"], size=int(meta["size"]), modified=meta["last_modified"].timestamp())


def _call(name: str, act: Callable[[], T]) -> T:
    """Translate obstore's errors to ours."""
    try:
        return act()
    except AlreadyExistsError:
        raise FileExistsError(name) from None
    except (NotFoundError, FileNotFoundError):
        raise MissingAsset(f"{name}: nothing is stored under that name") from None
    except (BaseError, OSError) as error:
        # The client's message may contain headers and addresses. The class says enough.
        raise StorageError(f"{name}: the object store failed with {type(error).__name__}; see its own log") from None
