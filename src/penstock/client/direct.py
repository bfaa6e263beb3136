"""Frames that this process writes to storage itself: one sync for all threads that put at the same time."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.client.encoded_group import EncodedGroup
from penstock.client.producer_connection import Written
from penstock.client.reachable import writable
from penstock.errors import PenstockError
from penstock.protocol import Answer, Attached, Rejected

if TYPE_CHECKING:  # a producer whose frames pass the plane needs no storage
    from penstock.storage import Pieces, Sign, Writable

logger = logging.getLogger("penstock.storage")
_MOST_REPEATS = 20
_PAUSE_S = 1.0
"""After a full disk, or while storage is away, for which groups pass the plane: each try takes a new segment."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A frame that is to be written."""

    pieces: Pieces
    deadline: float
    written: Future[str] = field(default_factory=Future)

    @property
    def size(self) -> int:
        return sum(map(len, self.pieces))


class DirectWriter:
    """Writes frames of this process. Safe to use from many threads."""

    def __init__(self, storage: Writable, open_segment: Callable[[], str]) -> None:
        """`open_segment` asks the plane for a registered segment."""
        from penstock.storage import OBJECT_BYTES, Writer

        self._storage, self._writer, self._enough = storage, Writer(storage, open_segment), OBJECT_BYTES
        self._waiting: deque[_Waiting] = deque()
        self._writing = threading.Lock()

    def write(self, pieces: Pieces, deadline: float = math.inf) -> str:
        """The location of a frame, which is durable when this returns. Storage that is away is asked until the
        deadline, or as long as the engine finds reasonable."""
        mine = _Waiting(pieces, deadline)
        self._waiting.append(mine)
        with self._writing:  # whoever gets here first writes for all who wait
            while not mine.written.done():
                self._gather()
                self._write_batch()
        return mine.written.result()

    def _gather(self) -> None:
        """Give others a moment to join, where each write costs a request."""
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
            locations = self._writer.write([one.pieces for one in batch], max(one.deadline for one in batch))
        except BaseException as error:
            for one in batch:
                one.written.set_exception(error)
            if not isinstance(error, PenstockError):
                raise
        else:
            for one, location in zip(batch, locations, strict=True):
                one.written.set_result(location)

    def leave(self, location: str) -> None:
        """The plane takes no more frames from this segment."""
        with self._writing:
            self._writer.finish(location.partition(":")[0])

    def close(self) -> None:
        with self._writing:
            self._writer.finish()


class Direct:
    """Whether groups of this process go straight to storage, found out by the first put."""

    def __init__(self, attach: Callable[[], Attached], open_segment: Callable[[], str], sign: Sign) -> None:
        """`sign` asks the plane for signed URLs."""
        self._attach, self._open_segment, self._sign = attach, open_segment, sign
        self._lock = threading.Lock()
        self._is_known = False
        self._repeats = 0
        """Frames in a row that the plane did not take from storage."""
        self._writer: DirectWriter | None = None
        self._paused_until = 0.0
        self.seq_len, self.drops_long = 0, False
        """What metadata is made for."""

    def writer(self) -> DirectWriter | None:
        """Writes to storage; None: groups are sent to the plane."""
        if not self._is_known:
            with self._lock:
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
        """There was no room, or no answer: the plane writes the next groups, or says that it cannot either."""
        self._paused_until = time.monotonic() + _PAUSE_S

    def wait_for(self, answer: Answer, deadline: float) -> float:
        """Seconds to wait before a group is put again, because storage is away for the plane as well; 0: do not."""
        if not isinstance(answer, Rejected) or answer.kind != "Away" or time.monotonic() + _PAUSE_S > deadline:
            return 0.0
        logger.warning("%s; the group is put again", answer.reason)
        return _PAUSE_S

    def count_repeat(self, reason: str) -> None:
        """A frame must be written once more. A plane that never takes one is not reached by storage at all."""
        self._repeats += 1
        if self._repeats > _MOST_REPEATS:
            self.turn_off(f"{self._repeats} frames in a row were not taken from storage, the last because: {reason}")

    def count_taken(self) -> None:
        self._repeats = 0

    def turn_off(self, reason: object) -> None:
        """Storage cannot be used from here: send groups to the plane from now on."""
        with self._lock:
            found, self._writer = self._writer, None
        if found is not None:
            logger.warning("%s; groups pass the plane from now on", reason)
            found.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class DirectPut:
    """One group on its way to storage."""

    def __init__(self, direct: Direct, writer: DirectWriter, group: EncodedGroup, deadline: float) -> None:
        self._direct, self._writer, self._group, self._deadline = direct, writer, group, deadline
        self._metadata = group.metadata(direct.seq_len, drop=direct.drops_long)
        self._location = ""

    @staticmethod
    def of(direct: Direct, group: EncodedGroup, deadline: float) -> DirectPut | None:
        """None where the group is to be sent to the plane: nothing is in reach, or the plane should say what is wrong
        with it."""
        writer = direct.writer()
        if writer is None or direct.is_paused:
            return None
        try:
            return DirectPut(direct, writer, group, deadline)
        except PenstockError:
            return None

    def write(self) -> Written:
        """Called when there is room."""
        self._location = self._writer.write(self._group.pieces, self._deadline)
        return self._location, *self._metadata

    def should_repeat(self, answer: Answer) -> bool:
        """Whether the frame must be written, or sent, once more: its segment was sealed meanwhile, or the plane does
        not see it."""
        if not isinstance(answer, Rejected) or answer.kind not in ("Sealed", "Unseen"):
            self._direct.count_taken()
            return False
        self._direct.count_repeat(answer.reason)
        if answer.kind == "Unseen":
            self._direct.turn_off(answer.reason)
        else:
            self._writer.leave(self._location)
        return True
