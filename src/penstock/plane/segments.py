"""Register, seal and free segments. Only decisions in the log delete anything, never a timeout or a guess.

    register    in the log, before the first byte is written
    accept      a frame, only in a registered unsealed segment of its sender, and overlapping no other frame
    seal        the segment takes no further frames: it is full, old, or its writer is gone
    free        by name, as a decision in the log, listed there until storage has deleted it

Nothing is deleted because it is unknown. A segment that the log never registered stops all deletion until an operator
decides. Frames that an earlier epoch left unaccepted stay for a day, because the log may have been restored from a copy
that is slightly too old to list them.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any

from penstock.errors import Conflict, DiskFull, InvalidInput, StorageError
from penstock.log import GroupRow, Log, SegmentRow
from penstock.storage import (
    SEGMENT_AGE_S,
    Custody,
    Location,
    Storage,
    is_segment_name,
    new_segment_name,
    parse_location,
)

logger = logging.getLogger("penstock.storage")
OWN = "plane"
"""The writer's name of segments that the plane itself writes."""
KEEP_UNACCEPTED_S = 24 * 3600.0
"""How long sealed segments of earlier epochs keep frames that were never accepted."""
_SPARE = 4
"""Own segments registered ahead, so that the intake thread never waits for the log."""
_SPARE_S = 30.0
"""How long the intake thread waits for a registered segment."""
_MOST_NAMED = 20
_LATE_S = 3600.0
"""Interval for deleting segments again that may still receive a late write."""
_MAX_OPEN = 4096
"""Unsealed segments that one writer may have."""


@dataclass(frozen=True, slots=True)
class Outside:
    """Clocks and names. Simulations bring their own."""

    wall: Callable[[], float] = time.time
    steady: Callable[[], float] = time.monotonic
    """Used only for ages."""
    new_name: Callable[[], str] = new_segment_name


class Sealed(Conflict):
    """The segment takes no further frames. The client writes the frame again, to a new segment."""


@dataclass(slots=True)
class _Segment:
    row: SegmentRow
    registered_s: float
    """On the monotonic clock, for its age."""
    live: int = 0
    """Accepted frames that are not freed."""
    pending: int = 0
    """Frames that were put and are neither accepted nor rejected yet."""
    accepted_bytes: int = 0
    taken: list[tuple[int, int]] = field(default_factory=list)
    """Extents accepted or being checked in this epoch, by offset. A location is never used twice."""
    rejected: list[tuple[int, int]] = field(default_factory=list)
    """Extents rejected and freed in this epoch. A repeated put must not accept bytes that are being deleted."""
    is_begun: bool = False
    """Whether the segment is known to exist in storage."""
    verified: bool = False
    """Whether the plane has read a frame of it."""
    is_freed: bool = False


class Segments:
    """All segments of a run, and the deletions that were decided."""

    def __init__(
        self, log: Log, storage: Storage, custody: Custody, outside: Outside | None = None, *, keeps: str = ""
    ) -> None:
        """`keeps` is the reason that nothing may be deleted in this storage, or ""."""
        self._log, self._storage, self._custody, self._outside = log, storage, custody, outside or Outside()
        self.keeps = keeps
        self._all = {row.name: _Segment(row, 0.0) for row in log.segments()}
        self.live_bytes = 0
        for text in log.locations():
            at = parse_location(text)
            self.live_bytes += at.size
            if at.segment in self._all:
                self._all[at.segment].live += 1
                self._all[at.segment].is_begun = True
        found = storage.segments()
        self.unregistered = sorted(found.keys() - self._all.keys())
        """Segments in storage that this log never registered. While there are any, nothing is deleted."""
        self.missing = sorted(name for name, one in self._all.items() if one.live and name not in found)
        """Segments with accepted frames that are missing in storage."""
        self.dead_bytes = max(sum(found.values()) - self.live_bytes, 0)
        """Bytes in storage that no group needs: freed and not deleted yet, or never accepted."""
        self._frees: list[str] = log.frees()
        """Freed by decision and not deleted yet."""
        self._under_way: set[str] = set()
        self._late: list[str] = []
        """Freed segments that a slow writer may still create or write to. Deleted again every hour."""
        self._late_at = 0.0
        self._to_free: list[str] = []
        self._to_seal: dict[str, bool] = {}
        self._deleted: list[str] = []
        self._own: SimpleQueue[str] = SimpleQueue()
        self._finished: deque[tuple[str, int]] = deque()
        self._is_full = False
        """Whether the log had no room to register an own segment."""
        self._open: Counter[str] = Counter()
        """Unsealed segments of this epoch, by writer."""
        self._tick_at = 0.0
        self._maybe_empty = dict.fromkeys(self._all)
        """Segments that may hold no frame, to be checked when something changes."""
        if storage.lands_late:
            self._late = [name for name in self._frees if is_segment_name(name) and name not in found]
            self._put_aside(self._late)
            self._frees = sorted(set(self._frees).difference(self._late))
        self._seal_earlier_epochs()
        self._report(found)

    def _seal_earlier_epochs(self) -> None:
        """Seal the segments of earlier epochs. A writer that still uses one writes its frame again to a new segment:
        that costs one write, where leases would cost a protocol."""
        for name, one in self._all.items():
            if not one.row.sealed_at:
                self._to_seal[name] = False
        self._look_for_empty()

    def _put_aside(self, late: Iterable[str]) -> None:
        """Forget everything but the names of deleted segments that may still receive a late write."""
        for name in late:
            self._all.pop(name, None)
            self._maybe_empty.pop(name, None)

    def _report(self, found: dict[str, int]) -> None:
        if self.keeps:
            logger.error("%s: %s; nothing is deleted there", self._storage.url, self.keeps)
        if self.unregistered:
            size = sum(found[name] for name in self.unregistered)
            logger.error(
                "%s: %d segments (%d bytes) that this log never registered, the first %s; nothing is deleted until "
                "you decide about them: see `penstock storage check`",
                self._storage.url,
                len(self.unregistered),
                size,
                self.unregistered[0],
            )
        if self.missing:
            logger.error(
                "%s: %d segments are missing, the first %s; their groups are counted as lost when a step needs them",
                self._storage.url,
                len(self.missing),
                self.missing[0],
            )

    @property
    def num_bytes(self) -> int:
        """Bytes of the run in storage, dead ones included."""
        return self.live_bytes + self.dead_bytes

    def status(self) -> dict[str, Any]:
        """Return what `penstock top` shows."""
        return {
            "url": self._storage.url,
            "live_bytes": self.live_bytes,
            "dead_bytes": self.dead_bytes,
            "segments": len(self._all),
            "writers": sum(1 for count in self._open.values() if count),
            "to_delete": len(self._frees) + len(self._under_way),
            "unregistered": self.unregistered[:_MOST_NAMED],
            "missing": self.missing[:_MOST_NAMED],
            "keeps": self.keeps,
        }

    # -------------------------------------------------------------- registering

    def register(self, writer: str, count: int = 1) -> list[str]:
        """Register new segments for a writer. They are in the log when this returns."""
        if self._open[writer] + count > _MAX_OPEN:
            raise InvalidInput(f"writer {writer[:80]!r}: {_MAX_OPEN} segments are open; finish some first")
        rows = [SegmentRow(self._outside.new_name(), writer, self._log.epoch) for _ in range(count)]
        with self._log.transaction():
            for row in rows:
                self._log.add_segment(row)
        self._all |= {row.name: _Segment(row, self._outside.steady()) for row in rows}
        self._open[writer] += count
        return [row.name for row in rows]

    def stock_up(self) -> None:
        """Register own segments ahead, on the loop's thread. Raises DiskFull."""
        if self._own.qsize() > 1:
            return
        self._is_full = True
        for name in self.register(OWN, _SPARE):
            self._own.put(name)
        self._is_full = False

    def finished(self, name: str, end: int) -> None:
        """Note that the plane's writer has finished a segment. May be called from any thread."""
        self._finished.append((name, end))

    def take_finished(self) -> list[tuple[str, int]]:
        """Return segments that the plane's writer has finished, with their sizes.

        Seal them only after every frame written to them is accepted or rejected."""
        if not self._finished:
            return []
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def tidy(self, finished: Sequence[tuple[str, int]]) -> None:
        """Seal finished segments of the plane's own writer and old ones of clients, and register new ones."""
        for name, end in finished:
            self.seal(name, end=end)
        self.tick()
        if self._own.qsize() <= 1:
            with suppress(DiskFull):  # the writer has a spare one, and every turn tries again
                self.stock_up()

    def close(self) -> None:
        """Seal own segments that were never begun, as empty, so that the next epoch can free them at once."""
        while self._own.qsize():
            self.seal(self._own.get(), end=0)

    def next_own(self) -> str:
        """Return a registered segment for the plane's own writer. May be called from any thread."""
        try:
            return self._own.get(timeout=0 if self._is_full else _SPARE_S)
        except Empty:
            if self._is_full:
                raise DiskFull(f"{self._storage.url}: no segment could be registered; make room for the log") from None
            raise StorageError(f"{self._storage.url}: no segment could be registered for {_SPARE_S:g} s") from None

    # -------------------------------------------------------------- accepting

    def expect(self, location: str, writer: str) -> bool:
        """Expect a frame that a put names. Returns True if the plane must read it before it counts.

        Raises Sealed or InvalidInput. The plane reads the first frame of every segment, to find a wrong mount or a
        copied folder at once.
        """
        at = parse_location(location)
        one = self._open_for(at.segment, writer)
        if one.rejected and _overlaps(one.rejected, at):
            raise Sealed(f"location {at}: was rejected before and is freed; write the frame again to a new segment")
        if not at.size or _overlaps(one.taken, at):
            raise InvalidInput(f"location {at}: overlaps a frame that was put before; locations are never reused")
        self._expect(one, at)
        return not one.verified

    def _open_for(self, segment: str, writer: str) -> _Segment:
        one = self._all.get(segment)
        if one is None or one.row.sealed_at or segment in self._to_seal:
            raise Sealed(f"segment {segment}: sealed or unknown here; write the frame again to a new segment")
        if one.row.writer != writer:
            # Also of a client that came back under another address: it gets a segment of its own.
            raise Sealed(f"segment {segment}: belongs to another writer; write the frame again to a new segment")
        return one

    def check_writer(self, segment: str, writer: str) -> None:
        """Raise Sealed unless a writer may write to this segment now."""
        self._open_for(segment, writer)

    def expect_own(self, location: str) -> None:
        """Expect a frame that the plane itself has written."""
        at = parse_location(location)
        one = self._all[at.segment]
        one.verified = one.is_begun = True
        self._expect(one, at)

    def _expect(self, one: _Segment, at: Location) -> None:
        one.pending += 1
        insort(one.taken, (at.offset, at.end))

    def verified(self, location: str) -> None:
        """Note that the plane has read this frame and found the bytes that were put."""
        one = self._all[parse_location(location).segment]
        one.verified = one.is_begun = True

    def settle(self, location: str, *, accepted: bool) -> None:
        """Note that an expected frame was accepted, or will not be."""
        at = parse_location(location)
        one = self._all.get(at.segment)
        if one is None:
            return
        one.pending -= 1
        if accepted:
            one.live += 1
            one.accepted_bytes += at.size
            self.live_bytes += at.size
        else:
            self.dead_bytes += at.size
            # After a failed commit the same put may be repeated, so the extent is open again; `reject` closes it.
            one.taken.remove((at.offset, at.end))
            self._maybe_empty[at.segment] = None

    def reject(self, location: str) -> None:
        """Free an expected frame that was rejected."""
        self.settle(location, accepted=False)
        at = parse_location(location)
        if at.segment in self._all:
            insort(self._all[at.segment].rejected, (at.offset, at.end))
        self.free([location])

    # -------------------------------------------------------------- sealing and freeing, with the next transaction

    def seal(self, name: str, *, end: int | None = None) -> None:
        """Accept no further frames from a segment. `end` is its size in bytes, if the plane knows it.

        A segment whose accepted frames fill it up to `end` is clean: it holds nothing of unknown fate."""
        one = self._all.get(name)
        if one is not None and not one.row.sealed_at:
            self._to_seal[name] = end is not None and one.accepted_bytes == end

    def seal_writer(self, writer: str) -> None:
        """Seal all segments of a writer that is gone. If it returns, it writes unaccepted frames again."""
        if not self._open[writer]:
            return
        for name, one in self._all.items():
            if one.row.writer == writer:
                self.seal(name)

    def free(self, names: Iterable[str]) -> None:
        """Free frames with the next transaction."""
        self._to_free += names

    def tick(self) -> None:
        """Seal old segments and free empty ones. Does nothing if called again within a second."""
        now = self._outside.steady()
        if now < self._tick_at:
            return
        self._tick_at = now + 1.0
        for name, one in self._all.items():
            if one.row.writer != OWN and not one.row.sealed_at and now - one.registered_s > 2 * SEGMENT_AGE_S:
                self.seal(name)
        if self._late and now >= self._late_at:
            self._frees, self._late, self._late_at = [*self._frees, *self._late], [], now + _LATE_S
        self._look_for_empty()

    def _look_for_empty(self) -> None:
        """Free sealed segments that hold no frame."""
        now = self._outside.wall()
        for name in list(self._maybe_empty):
            one = self._all.get(name)
            if one is None or one.live or one.is_freed:
                del self._maybe_empty[name]
            elif one.row.sealed_at and not one.pending and self._is_known(one, now):
                one.is_freed = True
                self._to_free.append(name)

    def _is_known(self, one: _Segment, now: float) -> bool:
        """Return whether every frame in a segment was decided about. Segments of earlier epochs wait a day."""
        known = one.row.clean or one.row.epoch == self._log.epoch
        return known or now - one.row.sealed_at > KEEP_UNACCEPTED_S

    def write(self, freed: Sequence[str] = ()) -> None:
        """Write decisions to the log, inside a transaction. `freed` are frames that the transaction makes it forget."""
        at = self._outside.wall()
        for name, clean in self._to_seal.items():
            self._log.seal_segment(name, at=at, clean=clean)
        if self._to_free or freed:  # a put frees nothing, and statements without rows take time as well
            self._log.add_frees([*self._to_free, *freed])
        if self._deleted:
            self._log.remove_frees(self._deleted)

    def written(self, freed: Sequence[str] = ()) -> None:
        """Apply what `write` wrote, after the transaction was committed."""
        at = self._outside.wall()
        for name, clean in self._to_seal.items():
            one = self._all[name]
            one.row = replace(one.row, sealed_at=at, clean=clean)
            self._maybe_empty[name] = None
            if one.row.epoch == self._log.epoch:
                self._open[one.row.writer] -= 1
                if not self._open[one.row.writer]:
                    del self._open[one.row.writer]
        for text in freed:
            place = parse_location(text)
            self.live_bytes -= place.size
            self.dead_bytes += place.size
            if place.segment in self._all:
                self._all[place.segment].live -= 1
                self._maybe_empty[place.segment] = None
        for name in self._deleted:
            self._all.pop(name, None)
        self._frees += [*self._to_free, *freed]
        self._to_free, self._to_seal, self._deleted = [], {}, []
        if self._maybe_empty:
            self._look_for_empty()

    # -------------------------------------------------------------- deleting

    @property
    def is_deleting(self) -> bool:
        """Whether a deletion is in progress."""
        return bool(self._under_way)

    def take_deletions(self) -> list[str]:
        """Return names to delete now. Call `deleted` or `not_deleted` afterwards. Empty while an operator must
        decide."""
        if self.unregistered or self._under_way or self.keeps:
            return []
        names, self._frees = self._frees, []
        self._under_way = set(names)
        return names

    def delete(self, names: Sequence[str], op: int) -> tuple[list[str], dict[str, int]]:
        """Move the marker, then delete. Returns what is deleted for good and the sizes of all segments left in storage.

        May be called from any thread. A writer that was suspended may still create a segment that was not there, and
        an object may still land in a deleted one. These stay listed and are deleted again every hour."""
        segments = set(filter(is_segment_name, names))
        missing = segments - self._storage.segments().keys() if segments else set()
        if self._storage.lands_late:  # one request per name and hour is too much for names that are not there
            self._custody.delete([name for name in names if name not in missing], op)
            late = segments
        else:
            self._custody.delete(names, op)
            late = {name for name in missing if self._may_begin(name)}
        return [name for name in names if name not in late], self._storage.segments()

    def _may_begin(self, name: str) -> bool:
        """Return whether a client may still create a segment. Own segments that were not begun never will be."""
        one = self._all.get(name)
        return one is not None and not one.is_begun and one.row.writer != OWN

    def deleted(self, names: Sequence[str], held: dict[str, int]) -> None:
        """Note that storage has deleted these. The next transaction records it."""
        late = sorted(self._under_way.difference(names))
        self._late += late
        if self._storage.lands_late:
            self._put_aside(late)
        self._under_way = set()
        self._deleted += names
        self.dead_bytes = max(sum(held.values()) - self.live_bytes, 0)

    def not_deleted(self, names: Sequence[str]) -> None:
        """List names again that storage failed to delete."""
        self._under_way = set()
        self._frees = [*names, *self._frees]


def _overlaps(extents: Sequence[tuple[int, int]], at: Location) -> bool:
    """Return whether a location overlaps one of these extents, which are sorted and disjoint.

    Extents (0, 10) and (20, 30), location (8, 12): bisect gives k = 1. The extent before it ends at 10 > 8, so they
    overlap. Location (10, 20) touches both and overlaps neither."""
    if not extents or extents[-1][1] <= at.offset:  # the usual case: a writer appends
        return False
    k = bisect_left(extents, (at.offset, at.end))
    return bool(k and extents[k - 1][1] > at.offset) or bool(k < len(extents) and extents[k][0] < at.end)


class Freeing:
    """Frames that nothing needs any longer: the next transaction makes the log forget them, then storage deletes
    them."""

    def __init__(self, *, keeps_all: bool = False) -> None:
        """`keeps_all`: free nothing (`retain="all"`)."""
        self._keeps_all = keeps_all
        self.ops: list[int] = []
        """Groups whose frame and metadata the log is about to forget."""
        self._locations: list[str] = []

    def add(self, row: GroupRow) -> None:
        """Free the frame of a group."""
        if self._keeps_all:
            return
        self.ops.append(row.op)
        if row.location:
            self._locations.append(row.location)

    def supersede(self, location: str) -> None:
        """Free a frame whose group has another one. Call it inside the transaction that says so."""
        self._locations.append(location)

    def keep(self, location: str) -> None:
        """Undo `supersede`, after the transaction failed."""
        if location in self._locations:
            self._locations.remove(location)

    def keep_differences(self, frames: Container[int]) -> None:
        """After a rebuild, keep only groups that the log has not forgotten yet."""
        self.ops = [op for op in self.ops if op in frames]

    @property
    def locations(self) -> list[str]:
        """Frames that the next transaction frees."""
        return list(self._locations)

    def done(self) -> None:
        """Note that the transaction was committed."""
        self._locations, self.ops = [], []
