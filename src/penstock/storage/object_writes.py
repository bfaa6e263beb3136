"""Writes segments to an object store: create-only requests, and how one whose answer was lost is recognised.

Every object is written by one request that must not replace anything. If the answer is lost the request is repeated,
and the store then says that the object exists. Its bytes tell whether it is ours.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol

from penstock.errors import Away, Conflict, StorageError
from penstock.storage.interface import Location, Pieces
from penstock.storage.object_ranges import OBJECT_BYTES, begin_name, object_name
from penstock.storage.object_requests import Missing, Taken, at_once, run

_MOST_OBJECTS = 1_000_000
"""In one segment: object names have six digits."""
_WRITES = 8
"""Concurrent requests of one `append`."""


class ObjectWrites(Protocol):
    """Makes the requests of a writer: with credentials of its own, or with URLs that a plane signs."""

    url: str

    async def put_once(self, name: str, data: bytes) -> None:
        """Make one attempt to write an object that must not exist. Raises Taken, or what the client raises."""

    async def get(self, name: str, *, deadline: float | None = None, most: int = 1 << 16) -> tuple[bytes, Any]:
        """Read an object and its version. Of one larger than `most`, reads just enough to tell. Raises Missing."""

    async def ask(
        self, name: str, act: Callable[[], Awaitable[Any]], *, size: int = 0, deadline: float | None = None
    ) -> Any:
        """Make a request and return its result. Repeats it while the store does not answer."""


async def put_new(writes: ObjectWrites, name: str, data: bytes, deadline: float | None = None) -> None:
    """Write an object that must not exist. Raises Conflict if it does, with other bytes."""
    for _ in range(3):
        try:
            await writes.ask(name, lambda: writes.put_once(name, data), size=len(data), deadline=deadline)
        except Taken:
            # It is another writer's, or ours: an attempt whose answer was lost may have written it.
            if await _holds(writes, name, data, deadline):
                return
        except Missing:
            raise StorageError(f"{writes.url}: no such bucket; create it, or correct the address") from None
        else:
            return
    raise Away(f"{writes.url}/{name}: cannot be written and is not there")


async def _holds(writes: ObjectWrites, name: str, data: bytes, deadline: float | None) -> bool:
    """Return whether an object holds these bytes; False if there is none. Raises Conflict if it holds others."""
    try:
        found = await writes.get(name, deadline=deadline, most=len(data))
    except Missing:  # two writers at the same time, and the store let neither in
        return False
    except Away:
        raise
    except StorageError as error:  # a producer need not have the right to read: it then writes elsewhere
        raise Away(f"{writes.url}/{name}: exists; whether this process wrote it is unknown ({error})") from None
    if found[0] != data:
        raise Conflict(f"{writes.url}/{name}: exists; two writers have one name")
    return True


def begin_segment(storage: ObjectWrites, name: str) -> ObjectSegment:
    """Create a segment. Raises Conflict if one of that name exists."""
    # Random bytes tell this writer's object from another writer's, if the answer is lost.
    run(put_new(storage, begin_name(name), secrets.token_bytes(16)))
    return ObjectSegment(storage, name)


class ObjectSegment:
    """A segment that this process writes."""

    def __init__(self, storage: ObjectWrites, name: str) -> None:
        self.name, self.end = name, 0
        self._storage, self._number = storage, 0

    def append(self, frames: Sequence[Pieces], deadline: float = math.inf) -> list[str]:
        locations, objects = [], []
        for batch in _batches([b"".join(pieces) for pieces in frames]):
            at = self._number * OBJECT_BYTES
            for frame in batch:
                locations.append(str(Location(self.name, at, len(frame))))
                at += len(frame)
            objects.append((object_name(self.name, self._number), batch[0] if len(batch) == 1 else b"".join(batch)))
            # The next object begins at the next multiple of 8 MiB: after 3 MiB in object 0 that is object 1, after one
            # frame of 20 MiB in object 1 (8 to 28 MiB) it is object 4, which begins at 32 MiB.
            self._number = max(-(-at // OBJECT_BYTES), self._number + 1)
        if self._number > _MOST_OBJECTS:
            raise StorageError(f"{self._storage.url}: segment {self.name} has {_MOST_OBJECTS:,} objects")
        limit = None if deadline == math.inf else deadline
        run(at_once([partial(put_new, self._storage, name, data, limit) for name, data in objects], _WRITES))
        self.end += sum(len(data) for _, data in objects)
        return locations

    def close(self) -> None:
        """Nothing is open."""


def _batches(frames: Sequence[bytes]) -> list[list[bytes]]:
    """Split frames into those that share an object."""
    found: list[list[bytes]] = []
    size = OBJECT_BYTES
    for frame in frames:
        if size + len(frame) > OBJECT_BYTES:
            found.append([])
            size = 0
        found[-1].append(frame)
        size += len(frame)
    return found
