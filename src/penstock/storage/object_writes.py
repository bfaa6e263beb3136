"""Create-only writes of objects, and how a write whose answer was lost is recognised.

Every object is written by one request that must not replace anything. Where the answer is lost the request is made
again, and the store then says that the object exists. Whether it is ours is decided by its bytes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from penstock.errors import Away, Conflict, StorageError
from penstock.storage.object_requests import Missing, Taken


class ObjectWrites(Protocol):
    """Makes the requests of a writer: with credentials of its own, or with URLs that a plane signs."""

    url: str

    async def put_once(self, name: str, data: bytes) -> None:
        """Make one attempt to write an object that must not exist. Raises Taken, or what the client raises."""

    async def get(self, name: str, *, deadline: float | None = None, most: int = 1 << 16) -> tuple[bytes, Any]:
        """An object, or as much of it as tells that it is larger than `most`, and its version. Raises Missing."""

    async def ask(
        self, name: str, act: Callable[[], Awaitable[Any]], *, size: int = 0, deadline: float | None = None
    ) -> Any:
        """The result of a request, which is made again while the store is away."""

    async def put_new(self, name: str, data: bytes, deadline: float | None = None) -> None:
        """Write an object that must not exist. Raises Conflict if it does, with other bytes."""


async def put_new(writes: ObjectWrites, name: str, data: bytes, deadline: float | None = None) -> None:
    """Write an object that must not exist. Raises Conflict if it does, with other bytes."""
    for _ in range(3):
        try:
            await writes.ask(name, lambda: writes.put_once(name, data), size=len(data), deadline=deadline)
        except Taken:
            # Somebody else's, or our own: an attempt whose answer was lost may have written it.
            if await _holds(writes, name, data, deadline):
                return
        except Missing:
            raise StorageError(f"{writes.url}: no such bucket; create it, or correct the address") from None
        else:
            return
    raise Away(f"{writes.url}/{name}: cannot be written and is not there")


async def _holds(writes: ObjectWrites, name: str, data: bytes, deadline: float | None) -> bool:
    """Whether an object is what was to be written; False if there is none. Raises Conflict if it is not."""
    try:
        found = await writes.get(name, deadline=deadline, most=len(data))
    except Missing:  # of two writers at the same time neither was let in
        return False
    except Away:
        raise
    except StorageError as error:  # producers need not be allowed to read: then it is written again elsewhere
        raise Away(f"{writes.url}/{name}: exists; whether this process wrote it is unknown ({error})") from None
    if found[0] != data:
        raise Conflict(f"{writes.url}/{name}: exists; two writers have one name")
    return True
