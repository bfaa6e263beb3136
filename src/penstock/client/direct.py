"""Direct access to storage: find out whether this process sees the plane's storage, and write frames to it.

A process that sees the storage, and that the plane trusts, writes its frames itself and sends only metadata. All
threads that put at the same time share one write and one sync. If storage fails, frames are sent to the plane instead.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.atomic import folder_errors
from penstock.errors import PenstockError
from penstock.protocol import Answer, Attached, Rejected

if TYPE_CHECKING:  # a producer that sends its frames to the plane must not load the storage package
    from penstock.client.encoded_group import EncodedGroup
    from penstock.client.producer_connection import Written
    from penstock.storage import KeptStorage, Pieces, Sign, Writable

logger = logging.getLogger("penstock.storage")
_MARKER_S = 3.0
"""How long to ask an object store for the marker. A rank's heartbeats wait meanwhile."""
_MOST_REPEATS = 20
"""Batches in a row that the plane may reject before direct writing is turned off."""
_PAUSE_S = 1.0
"""How long frames go to the plane after a full disk, or while storage is away: each direct try uses a new segment."""


def reachable(attached: Attached) -> KeptStorage | None:
    """Open the plane's storage if this process sees it, else return None.

    A path may exist here and be another folder than the plane's. So the marker in it must name this run and this epoch.
    """
    if not attached.storage or not _sees(attached, lambda: _opened(attached.storage, patience_s=_MARKER_S)):
        return None
    return _opened(attached.storage)


def writable(attached: Attached, sign: Sign) -> Writable | None:
    """Open the plane's storage if this process may write to it and sees it, else return None."""
    if not attached.may_write or not attached.signs:
        return reachable(attached) if attached.may_write else None
    from penstock.storage import SignedStorage

    if not _sees(attached, lambda: SignedStorage(attached.storage, sign, patience_s=_MARKER_S)):
        return None
    return SignedStorage(attached.storage, sign)


def _sees(attached: Attached, opened: Callable[[], Writable | None]) -> bool:
    """Return whether the marker of a storage names this run and this epoch of the plane."""
    from penstock.storage import read_marker

    try:
        storage = opened()
        marker = None if storage is None else read_marker(storage)
    except PenstockError as error:
        logger.warning("%s; frames go through the plane instead", error)
        return False
    return marker is not None and (marker.run_id, marker.epoch) == (attached.run_id.hex(), attached.epoch)


def _opened(address: str, **patience: float) -> KeptStorage | None:
    """Open storage. Returns None for a folder that does not exist here."""
    from penstock.storage import FolderStorage, is_object_url

    if is_object_url(address):
        from penstock.storage import ObjectStorage  # imports asyncio

        return ObjectStorage(address, **patience)
    with folder_errors(address):  # a plane may name what no folder can be called
        return FolderStorage(address, create=False) if Path(address).is_dir() else None


@dataclass(slots=True, eq=False)
class _Waiting:
    """A frame to write. The thread that has the lock fills in what became of it."""

    pieces: Pieces
    deadline: float
    location: str = ""
    error: BaseException | None = None

    @property
    def size(self) -> int:
        return sum(map(len, self.pieces))


class DirectWriter:
    """Writes this process's frames. Safe to use from many threads."""

    def __init__(self, storage: Writable, open_segment: Callable[[], str]) -> None:
        """`open_segment` asks the plane for a registered segment."""
        from penstock.storage import OBJECT_BYTES, Writer

        self._storage, self._writer, self._enough = storage, Writer(storage, open_segment), OBJECT_BYTES
        self._waiting: deque[_Waiting] = deque()
        self._writing = threading.Lock()

    def write(self, frames: Sequence[Pieces], deadline: float = math.inf) -> list[str]:
        """Write frames and return their locations. They are durable when this returns. Storage that is away is tried
        again until the deadline, or as long as its engine allows."""
        mine = [_Waiting(pieces, deadline) for pieces in frames]
        self._waiting.extend(mine)
        # Group commit: the thread that gets the lock writes the frames of all waiting threads with one sync. The others
        # find theirs written when they get the lock.
        with self._writing:
            while any(not one.location and one.error is None for one in mine):
                self._gather()
                self._write_batch()
        for one in mine:
            if one.error is not None:
                raise one.error
        return [one.location for one in mine]

    def _gather(self) -> None:
        """Wait a moment for other frames to join the batch, where each write costs a request (object stores)."""
        if not self._storage.gather_s:
            return
        until = time.monotonic() + self._storage.gather_s
        while (left := until - time.monotonic()) > 0:
            if sum(one.size for one in list(self._waiting)) >= self._enough:
                return
            time.sleep(min(left, 0.002))

    def _write_batch(self) -> None:
        batch, size = [], 0
        while self._waiting and size < self._storage.batch_bytes:
            batch.append(self._waiting.popleft())
            size += batch[-1].size
        try:
            # The latest deadline: a caller with a short one must not fail the frames of the others.
            locations = self._writer.write([one.pieces for one in batch], max(one.deadline for one in batch))
        except BaseException as error:
            for one in batch:
                one.error = error
            if not isinstance(error, PenstockError):
                raise
        else:
            for one, location in zip(batch, locations, strict=True):
                one.location = location

    def leave(self, segment: str) -> None:
        """Finish a segment, because the plane accepts no further frames from it."""
        with self._writing:
            self._writer.finish(segment)

    def close(self) -> None:
        with self._writing:
            self._writer.finish()


class Direct:
    """Decides whether this process writes directly to storage. The first put finds out."""

    def __init__(self, attach: Callable[[], Attached], open_segment: Callable[[], str], sign: Sign) -> None:
        """`sign` asks the plane for signed URLs."""
        self._attach, self._open_segment, self._sign = attach, open_segment, sign
        self._lock = threading.Lock()
        self._is_known = False
        self._repeats = 0
        """Batches in a row in which the plane rejected a frame that was written to storage."""
        self._writer: DirectWriter | None = None
        self._paused_until = 0.0
        self.seq_len, self.drops_long = 0, False
        """The plane's settings that metadata depends on."""

    def writer(self) -> DirectWriter | None:
        """Return the writer, or None if frames are sent to the plane."""
        if not self._is_known:
            with self._lock:  # many threads may put first at the same time; one finds out
                if not self._is_known:
                    self._find_out()
        return self._writer

    def _find_out(self) -> None:
        attached = self._attach()
        storage = writable(attached, self._sign)
        if storage is not None:
            self._writer = DirectWriter(storage, self._open_segment)
            self.seq_len, self.drops_long = attached.seq_len, attached.drops_long
        self._is_known = True

    @property
    def is_paused(self) -> bool:
        return time.monotonic() < self._paused_until

    def pause(self) -> None:
        """Send the next groups to the plane: storage is full or away from here, and the plane may free or reach it."""
        self._paused_until = time.monotonic() + _PAUSE_S

    def wait_for(self, answer: Answer, deadline: float) -> float:
        """Return how long to wait before putting a group again because storage is away for the plane too, else 0."""
        if not isinstance(answer, Rejected) or answer.kind != "Away" or time.monotonic() + _PAUSE_S > deadline:
            return 0.0
        logger.warning("%s; putting the group again", answer.reason)
        return _PAUSE_S

    def note_repeats(self, repeats: Sequence[tuple[DirectPut, Rejected]]) -> None:
        """Note which frames of a batch must be written again, if any. If the plane never accepts one, it does not see
        this storage."""
        if not repeats:
            self._repeats = 0
            return
        self._repeats += 1
        reason = repeats[0][1].reason
        if self._repeats > _MOST_REPEATS:
            self.turn_off(f"{self._repeats} batches in a row were not accepted from storage, the last because {reason}")
        for answer in (answer for _, answer in repeats if answer.kind == "Unseen"):
            self.turn_off(answer.reason)
        for segment, writer in {put.location.partition(":")[0]: put.writer for put, _ in repeats}.items():
            writer.leave(segment)

    def turn_off(self, reason: object) -> None:
        """Send groups to the plane from now on, because storage cannot be used from here."""
        with self._lock:
            found, self._writer = self._writer, None
        if found is not None:
            logger.warning("%s; groups go through the plane from now on", reason)
            found.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class DirectPut:
    """One put that writes to storage directly."""

    def __init__(self, direct: Direct, writer: DirectWriter, group: EncodedGroup) -> None:
        self.writer, self.group = writer, group
        self.metadata = group.metadata(direct.seq_len, drop=direct.drops_long)
        self.location = ""

    @staticmethod
    def of(direct: Direct, group: EncodedGroup) -> DirectPut | None:
        """Return None if the group must be sent to the plane: storage is out of reach, or the group is invalid and the
        plane should report what is wrong."""
        writer = direct.writer()
        if writer is None or direct.is_paused:
            return None
        try:  # computing the metadata validates the group
            return DirectPut(direct, writer, group)
        except PenstockError:
            return None

    def must_repeat(self, answer: object) -> bool:
        """Return whether the frame must be written or sent again: its segment was sealed meanwhile, or the plane does
        not see it."""
        return isinstance(answer, Rejected) and answer.kind in ("Sealed", "Unseen")


def write_all(puts: Sequence[DirectPut], deadline: float) -> list[Written]:
    """Write frames for which the plane has room, together."""
    locations = puts[0].writer.write([put.group.pieces for put in puts], deadline)
    for put, location in zip(puts, locations, strict=True):
        put.location = location
    return [(put.location, *put.metadata) for put in puts]
