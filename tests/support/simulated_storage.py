"""Storage that fails as a disk, a mount or a network can, and workers that take their time.

`SimulatedStorage` holds the bytes. Each process sees it through a `StorageView` of its own, which can be away, be the
wrong mount, see writes of others late, and end its process before or after any effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from random import Random

from penstock.errors import DiskFull, StorageError
from penstock.frames.layout import Buffer
from penstock.plane.workers import Inline, Job, Then
from penstock.storage import Away, Gone, MemoryStorage, SegmentFile, parse_location
from penstock.storage.interface import Pieces, Range, Wanted, check_wanted
from tests.support.fault_rates import StorageFaults
from tests.support.simulated import Crash


class SimulatedStorage(MemoryStorage):
    """What the disk holds. Remembers what it would lose in a power cut."""

    def __init__(self, now: Callable[[], float], rng: Random, faults: StorageFaults) -> None:
        super().__init__()
        self.now, self.rng, self.faults = now, rng, faults
        self.away_until = self.full_until = -1.0
        self.poisoned: set[str] = set()
        """Segments with a failed sync: the kernel reports later writes as durable, and they are not."""
        self._volatile: list[str] = []
        self._visible_at: dict[str, float] = {}
        self.deletions, self.deleted_at = 0, -1.0
        """Frames that were deleted, and when the last one was."""

    def happens(self, probability: float) -> bool:
        return probability > 0 and self.rng.random() < probability

    def peek(self, location: str) -> bytes | None:
        """What is really stored, which nothing in the simulation can see."""
        at = parse_location(location)
        frame = self._frames.get(at.segment, {}).get(at.offset, b"")
        return frame if len(frame) == at.size else None

    def all_frames(self) -> Iterator[bytes]:
        for frames in self._frames.values():
            yield from frames.values()

    def store(self, segment: str, offset: int, frame: bytes, *, durable: bool, late_s: float) -> None:
        """A write reaches the disk, or only its cache; others see it later."""
        if segment not in self._frames:
            return  # the file was removed: writes to it succeed, and are never read
        self._frames[segment][offset] = frame
        location = f"{segment}:{offset}:{len(frame)}"
        if late_s:
            self._visible_at[location] = self.now() + late_s
        if not durable:
            self._volatile.append(location)

    def is_visible(self, location: str) -> bool:
        return self._visible_at.get(location, -1.0) <= self.now()

    def power_cut(self) -> None:
        """The host loses what was not synced."""
        for location in self._volatile:
            at = parse_location(location)
            self._frames.get(at.segment, {}).pop(at.offset, None)
        self._volatile = []

    def end_faults(self) -> None:
        self.faults = StorageFaults()
        self.away_until = self.full_until = -1.0
        self._visible_at = {}


class StorageView:
    """The storage as one process sees it."""

    url = "simulated:storage"
    segment_bytes = 64 << 20
    batch_bytes = 32 << 20
    gather_s = 0.0
    lands_late = False

    def __init__(
        self, storage: SimulatedStorage, *, late: bool = False, elsewhere: MemoryStorage | None = None
    ) -> None:
        """`late`: sees what others write a moment later. `elsewhere`: another storage is mounted here."""
        self._storage, self._late = storage, late
        self._bytes: MemoryStorage = elsewhere or storage
        self._is_elsewhere = elsewhere is not None
        self.fuse: int | None = None
        """Effects until the process crashes: odd numbers before they happen, even ones after."""
        self.is_bad = False
        """Whether nothing can be read through this mount."""

    @contextmanager
    def _effect(self) -> Iterator[None]:
        if self._storage.now() < self._storage.away_until:
            raise Away("simulated: storage does not answer")
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse <= 0 and self.fuse % 2:
                raise Crash
        yield
        if self.fuse is not None and self.fuse <= 0:
            raise Crash

    def prove(self) -> str:
        return ""

    def read_into(self, wanted: Sequence[Wanted]) -> None:
        check_wanted(wanted)
        for at, offset, view in wanted:
            view[:] = self.read(str(at), [(offset - at.offset, offset - at.offset + len(view))])[0]

    def create(self, segment: str) -> SegmentFile:
        with self._effect():
            self._bytes.create(segment)
            return SimulatedSegment(segment, self._storage, self)

    def append(self, segment: str, offset: int, frames: Sequence[bytes]) -> None:
        with self._effect():
            if self._is_elsewhere:
                for frame in frames:
                    self._bytes._frames[segment][offset] = frame
                    offset += len(frame)
                return
            self._write(segment, offset, frames)

    def _write(self, segment: str, offset: int, frames: Sequence[bytes]) -> None:
        storage, faults = self._storage, self._storage.faults
        if storage.now() < storage.full_until:
            storage.store(segment, offset, frames[0][: len(frames[0]) // 2], durable=False, late_s=0.0)
            raise DiskFull("simulated: storage is full; half of a frame was written")
        failed = storage.happens(faults.sync_fails)
        durable = segment not in storage.poisoned and not failed
        for frame in frames:
            late_s = storage.rng.random() * 0.3 if storage.happens(faults.late) else 0.0
            storage.store(segment, offset, frame, durable=durable, late_s=late_s)
            offset += len(frame)
        if failed:
            storage.poisoned.add(segment)
            raise StorageError("simulated: the sync failed; what is on disk is unknown")

    def read(self, location: str, ranges: Sequence[Range] | None = None) -> list[Buffer]:
        if self._storage.now() < self._storage.away_until:
            raise Away("simulated: storage does not answer")
        if self.is_bad:
            raise Gone(f"{location}: not on this mount")
        if self._late and not self._storage.is_visible(location):
            raise Gone(f"{location}: not visible yet")
        return self._bytes.read(location, ranges)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            with self._effect():
                if self._storage.happens(self._storage.faults.delete_fails):
                    raise Away("simulated: storage went away in the middle of a deletion")
                self._bytes.delete([name])
                if ":" in name:
                    self._storage.deletions += 1
                    self._storage.deleted_at = self._storage.now()

    def segments(self) -> dict[str, int]:
        with self._effect():
            return self._bytes.segments()

    def marker(self) -> bytes | None:
        if self._storage.now() < self._storage.away_until:
            raise Away("simulated: storage does not answer")
        return self._bytes.marker()

    def set_marker(self, new: bytes, old: bytes | None) -> bool:
        with self._effect():
            if self._storage.happens(self._storage.faults.marker_fails):
                raise Away("simulated: the marker could not be written")
            return self._bytes.set_marker(new, old)

    def close(self) -> None:
        """Nothing is open."""


class SimulatedSegment:
    """A segment that one process writes."""

    def __init__(self, name: str, storage: SimulatedStorage, view: StorageView) -> None:
        self.name, self.end = name, 0
        self._storage, self._view = storage, view

    def append(self, frames: Sequence[Pieces], deadline: float = math.inf) -> list[str]:
        made, at = [b"".join(pieces) for pieces in frames], self.end
        self.end += sum(map(len, made))
        self._view.append(self.name, at, made)
        locations = []
        for frame in made:
            locations.append(f"{self.name}:{at}:{len(frame)}")
            at += len(frame)
        return locations

    def close(self) -> None:
        """Nothing is open."""


class SlowWorkers(Inline):
    """Jobs that take their time: each queue in order, beside the loop."""

    def __init__(self, now: Callable[[], float], rng: Random, slow: Callable[[], float]) -> None:
        super().__init__()
        self._now, self._rng, self._slow = now, rng, slow
        self._queues: dict[str, list[tuple[float, Job, Then]]] = {}
        self.results = ("any job may be done by now",)

    def submit(self, queue: str, job: Job, then: Then) -> None:
        takes_s = self._rng.random() * 0.3 if self._rng.random() < self._slow() else 0.0
        waiting = self._queues.setdefault(queue, [])
        if takes_s or waiting:
            waiting.append((self._now() + takes_s, job, then))
        else:
            super().submit(queue, job, then)

    def finish(self) -> bool:
        for queue, waiting in self._queues.items():
            while waiting and waiting[0][0] <= self._now():
                _, job, then = waiting.pop(0)
                super().submit(queue, job, then)
        return super().finish()
