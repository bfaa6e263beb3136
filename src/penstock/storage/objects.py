"""Storage in an object store: S3, Google Cloud Storage, Azure, and servers that speak S3.

    PREFIX/marker                                the run these frames belong to, and how far its log was
    PREFIX/segments/3f9c21d07b6a4e58/begin       a segment: a prefix that belongs to one writer
    PREFIX/segments/3f9c21d07b6a4e58/000000      [frame][frame]...: frames that were written together
    PREFIX/segments/3f9c21d07b6a4e58/000001

Frames that are put at the same time share an object. Every object is written with one create-only request, so nothing
is ever overwritten. Objects begin at multiples of 8 MiB of their segment's offsets and are numbered accordingly, so a
location tells which object holds its frame:

    3f9c21d07b6a4e58:8396800:310284              object 000001, which begins at 8388608; bytes 8192 to 318476 of it

An object is deleted with its last frame, or with its segment. A write that timed out may still arrive, even in a
segment that was deleted: see `lands_late`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from tempfile import TemporaryFile
from typing import Any, Literal

from penstock.errors import Away, Fenced, StorageError
from penstock.frames import Buffer
from penstock.storage.interface import (
    Gone,
    Part,
    Range,
    Wanted,
    check_wanted,
    is_segment_name,
    parse_location,
    read_ranges,
)
from penstock.storage.object_ranges import OBJECT_BYTES, READ_BYTES, Fetch, fetches_for, object_name
from penstock.storage.object_requests import (
    PATIENCE_S,
    Missing,
    Taken,
    at_once,
    make_store,
    parse_object_url,
    persist,
    run,
)
from penstock.storage.object_writes import ObjectSegment, begin_segment

_READS = 32
"""Concurrent requests of one call."""
MARKER = "marker"
_SURE_S = 1.0
"""How long a marker that was moved counts as still ours: a plane that replaces another takes longer to start."""


class ObjectStorage:
    """Segments as prefixes of one bucket."""

    segment_bytes = 64 << 20
    batch_bytes = 32 << 20
    gather_s = 0.010
    lands_late = True

    def __init__(self, url: str, *, patience_s: float = PATIENCE_S) -> None:
        """Makes no request yet. `patience_s` is how long the store may be unreachable before a call raises Away."""
        parsed, self._patience_s = parse_object_url(url), patience_s
        self.url = str(parsed)
        self.store = make_store(parsed)
        self._freed: dict[str, set[Range]] = {}
        """Object -> ranges of it that this process deleted. The object goes when they cover all of it."""
        self._sizes: dict[str, float] = {}
        self._moved: bytes | None = None
        """The marker as this process wrote it; None while it has not."""
        self._sure_at = 0.0
        """When the marker was last known to be that, on the monotonic clock."""

    def __repr__(self) -> str:
        return f"ObjectStorage({self.url!r})"

    def prove(self) -> str:
        from penstock.storage.object_proof import prove

        return prove(self)

    # -------------------------------------------------------------- writing

    def create(self, segment: str) -> ObjectSegment:
        return begin_segment(self, segment)

    async def put_once(self, name: str, data: bytes) -> None:
        """Make one attempt to write an object that must not exist."""
        import obstore

        await obstore.put_async(self.store, name, data, mode="create", use_multipart=False)

    def sign(self, method: Literal["GET", "PUT"], names: Sequence[str], seconds: float) -> list[str]:
        """Return URLs that each allow one kind of request on one object, to anyone who has them, for a time."""
        return run(self.sign_async(method, names, seconds))

    async def sign_async(self, method: Literal["GET", "PUT"], names: Sequence[str], seconds: float) -> list[str]:
        """`sign`, for callers on the thread that makes all requests."""
        import obstore

        valid = timedelta(seconds=seconds)
        return list(await self.ask(names[0], lambda: obstore.sign_async(self.store, method, list(names), valid)))

    # -------------------------------------------------------------- reading

    def read(self, location: str, ranges: Sequence[Range] | None = None) -> list[Buffer]:
        return read_ranges(self, location, ranges)

    def read_into(self, wanted: Sequence[Wanted]) -> None:
        check_wanted(wanted)
        fetches = fetches_for(wanted)
        run(at_once([partial(self._fetch, one) for one in fetches], _READS))

    async def _fetch(self, one: Fetch) -> None:
        import obstore

        async def act() -> Any:
            found = await obstore.get_range_async(self.store, one.name, start=one.start, end=one.end)
            if len(found) < one.end - one.start:
                # Is the object too short, or only this answer? The first is damage, the second is worth a retry.
                if (await obstore.head_async(self.store, one.name))["size"] < one.end:
                    raise Gone(f"{self.url}/{one.name}: ends before byte {one.end:,}")
                raise Away(f"{self.url}/{one.name}: {len(found):,} bytes instead of {one.end - one.start:,}")
            return found

        try:
            data = memoryview(await self.ask(one.name, act, size=one.end - one.start))
        except Missing:
            raise Gone(f"{self.url}/{one.name}: no such object") from None
        except Away:
            raise
        except StorageError:
            if await self._size(one.name) < one.end:  # stores reject a range that begins past the end
                raise Gone(f"{self.url}/{one.name}: ends before byte {one.end:,}") from None
            raise
        for start, view in one.parts:
            view[:] = data[start : start + len(view)]

    async def _size(self, name: str) -> float:
        """Return an object's size: 0 if there is none, infinity if the store does not tell."""
        import obstore

        try:
            return float((await self.ask(name, lambda: obstore.head_async(self.store, name)))["size"])
        except Missing:
            return 0
        except StorageError:
            return math.inf

    async def get(self, name: str, *, deadline: float | None = None, most: int = 1 << 16) -> tuple[bytes, Any]:
        """Read a small object and its version. For one larger than `most`, returns `most + 1` zero bytes instead."""
        import obstore

        async def act() -> tuple[bytes, Any]:
            answer = await obstore.get_async(self.store, name)
            if answer.meta["size"] > most:
                return bytes(most + 1), answer.meta
            return bytes(await answer.bytes_async()), answer.meta

        found: tuple[bytes, Any] = await self.ask(name, act, size=most, deadline=deadline)
        return found

    async def ask(
        self, name: str, act: Callable[[], Awaitable[Any]], *, size: int = 0, deadline: float | None = None
    ) -> Any:
        where = f"{self.url}/{name}"
        return await persist(act, where, size=size, deadline=deadline, patience_s=self._patience_s)

    # -------------------------------------------------------------- deleting

    def delete(self, names: Iterable[str]) -> None:
        # An object cannot be shortened. Remember which ranges were freed; delete it when they add up to its size.
        whole, touched = set(), set()
        for name in names:
            if is_segment_name(name):
                whole.add(name)
                continue
            at = parse_location(name)
            number, start = divmod(at.offset, OBJECT_BYTES)
            touched.add(object_name(at.segment, number))
            self._freed.setdefault(object_name(at.segment, number), set()).add((start, start + at.size))
        run(self._delete(whole, {name for name in touched if name.split("/")[1] not in whole}))
        for name in [name for name in self._freed if name.split("/")[1] in whole]:
            self._forget(name)

    async def _delete(self, segments: set[str], touched: set[str]) -> None:
        paths = await at_once([partial(self._paths, segment) for segment in segments], _READS)
        new = sorted(touched - self._sizes.keys())
        sizes = await at_once([partial(self._size, name) for name in new], _READS)
        self._sizes |= {name: size for name, size in zip(new, sizes, strict=True) if size < math.inf}
        done = [name for name in touched if sum(b - a for a, b in self._freed[name]) >= self._sizes.get(name, math.inf)]
        await self.remove([*done, *(path for some in paths for path in some)])
        for name in done:
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._freed.pop(name, None)
        self._sizes.pop(name, None)

    async def _paths(self, segment: str) -> list[str]:
        return [meta["path"] for meta in await self.listed(f"segments/{segment}")]

    async def remove(self, paths: list[str]) -> None:
        """Delete objects by name. Those that are not there are ignored."""
        import obstore

        async def remove(what: str | list[str]) -> None:
            await self._check_marker()  # before each attempt: minutes may have passed since the last one
            await obstore.delete_async(self.store, what)

        async def one(path: str) -> None:
            try:
                await self.ask(path, lambda: remove(path))
            except Missing:
                return

        if not paths:
            return
        try:
            await self.ask("segments", lambda: remove(paths))
        except Missing:  # some stores stop at a name that is not there
            await at_once([partial(one, path) for path in paths], _READS)

    # -------------------------------------------------------------- listing

    async def listed(self, prefix: str) -> list[dict[str, Any]]:
        """List every object below a prefix."""
        import obstore

        async def act() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = []
            async for page in obstore.list(self.store, prefix, chunk_size=1000):
                found += page
            return found

        try:
            return list(await self.ask(prefix, act, size=100 << 20))
        except Missing:
            return []

    @property
    def place(self) -> str:
        """Its location, for messages."""
        return self.url

    def is_there(self) -> bool:
        return True

    def parts(self) -> dict[str, list[Part]]:
        """Return the objects of each segment, in order. Opening one copies it to an unnamed temporary file."""
        found: dict[str, list[Part]] = {}
        for meta in sorted(run(self.listed("segments")), key=lambda one: str(one["path"])):
            _, segment, last = meta["path"].rsplit("/", 2)
            if not is_segment_name(segment) or not (last == "begin" or last.isdecimal()):
                continue
            some = found.setdefault(segment, [])
            if last != "begin":
                name, size = object_name(segment, int(last)), int(meta["size"])
                modified_ns = int(meta["last_modified"].timestamp() * 1e9)
                opened, start = partial(self._opened, name, size), int(last) * OBJECT_BYTES
                some.append(Part(f"{self.url}/{name}", size, modified_ns, opened, segment, start))
        return found

    @contextmanager
    def _opened(self, name: str, size: int) -> Iterator[int]:
        with TemporaryFile() as file:
            for start in range(0, size, 4 * READ_BYTES):
                data = memoryview(bytearray(min(4 * READ_BYTES, size - start)))
                fetches = []
                for first in range(0, len(data), READ_BYTES):
                    view = data[first : first + READ_BYTES]
                    fetches.append(Fetch(name, start + first, start + first + len(view), [(0, view)]))
                try:
                    run(at_once([partial(self._fetch, one) for one in fetches], _READS))
                except Gone as error:
                    raise FileNotFoundError(str(error)) from None
                file.write(data)
            file.flush()
            yield file.fileno()

    def segments(self) -> dict[str, int]:
        return {name: sum(part.size for part in parts) for name, parts in self.parts().items()}

    # -------------------------------------------------------------- the marker

    def marker(self) -> bytes | None:
        found = run(self._marker())
        return None if found is None else found[0]

    async def _marker(self) -> tuple[bytes, Any] | None:
        try:
            return await self.get(MARKER)
        except Missing:
            return None

    def set_marker(self, new: bytes, old: bytes | None) -> bool:
        asked = time.monotonic()
        is_moved = run(self._set_marker(new, old))
        if is_moved:
            self._moved, self._sure_at = new, asked
        return is_moved

    async def _set_marker(self, new: bytes, old: bytes | None) -> bool:
        import obstore

        found = await self._marker()
        if (None if found is None else found[0]) != old:
            return False
        # Conditional on the version we compared: the store rejects the write if another plane wrote in between.
        mode: Any = "create" if found is None else version_of(found[1])
        attempts = 0

        async def act() -> Any:
            nonlocal attempts
            attempts += 1
            return await obstore.put_async(self.store, MARKER, new, mode=mode, use_multipart=False)

        try:
            await self.ask(MARKER, act)
        except Taken:
            # Another process was faster; or an earlier attempt of ours succeeded and its answer was lost.
            now = await self._marker() if attempts > 1 else None
            return now is not None and now[0] == new
        except Missing:
            return False
        return True

    async def _check_marker(self) -> None:
        """Raise Fenced if the marker is not as this process wrote it. Asks the store only if that was a while ago: a
        process that was paused between moving the marker and deleting may have been replaced meanwhile."""
        while self._moved is not None and time.monotonic() - self._sure_at > _SURE_S:
            asked = time.monotonic()
            found = await self._marker()
            if found is None or found[0] != self._moved:
                raise Fenced(f"{self.url}: another plane moved the marker; this one deletes nothing")
            self._sure_at = asked

    def marked(self) -> list[str]:
        """Return the prefixes at or below this one that have a marker, relative to it. This one is ""."""
        found = [meta["path"] for meta in run(self.listed(""))]
        return sorted(path.removesuffix(MARKER).rstrip("/") for path in found if path.split("/")[-1] == MARKER)

    def remove_marker(self) -> None:
        """Delete the marker, with the run."""
        self._moved = None
        run(self.remove([MARKER]))

    def close(self) -> None:
        """Connections close by themselves."""


def version_of(meta: Any) -> dict[str, str]:
    """Return what a conditional write compares with. The client rejects fields that are None."""
    return {key: meta[key] for key in ("e_tag", "version") if meta.get(key) is not None}
