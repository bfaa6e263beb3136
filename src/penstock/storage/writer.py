"""Writes frames to segments of this process. Frames that are written together share one sync.

A segment belongs to one process. Its name is registered in the log before its first byte, so `next_segment` asks the
process that holds the log. After a failed write the segment is abandoned: the kernel may have dropped pages it could
not sync, and a later sync of the same file would succeed without them.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

from penstock.storage.interface import Pieces, SegmentFile, SegmentSealed, Writable

logger = logging.getLogger("penstock.storage")
_SLOW_S, _SLOW_REQUEST_S = 0.1, 1.0
SEGMENT_AGE_S = 300.0
"""Age at which a segment is finished. The plane seals it after twice this time, by its own clock."""


class Writer:
    """Appends frames. Used by one thread at a time."""

    def __init__(
        self,
        storage: Writable,
        next_segment: Callable[[], str],
        finished: Callable[[str, int], None] = lambda _segment, _end: None,
        *,
        segment_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`next_segment` returns a registered name. `finished` is called with a segment that will get no further
        frames, and with its size."""
        self.storage, self._next, self._finished = storage, next_segment, finished
        self._segment_bytes, self._clock = segment_bytes or storage.segment_bytes, clock
        self._open: SegmentFile | None = None
        self._opened_at = 0.0
        self.on_write: Callable[[float, str], None] = self._report_slow
        """Called after each write with its duration, sync included, and what was written."""
        self._slow = 0

    def write(self, frames: Sequence[Pieces], deadline: float = math.inf) -> list[str]:
        """Write frames and return their locations. All of them are durable when this returns; after an error none
        counts."""
        begin = time.perf_counter()
        try:
            try:
                return self._append(frames, deadline)
            except SegmentSealed:  # a restarted plane sealed it and does not sign this write
                return self._append(frames, deadline)
        finally:
            size = sum(len(piece) for pieces in frames for piece in pieces)
            self.on_write(time.perf_counter() - begin, f"{len(frames)} frames, {size:,} bytes")

    def _report_slow(self, seconds: float, doing: str) -> None:
        """Log a slow write of a client: the plane does not see it, and the caller only waits."""
        # A request to an object store (`gather_s`) takes longer than a sync of a disk.
        if seconds >= (_SLOW_S if not self.storage.gather_s else _SLOW_REQUEST_S):
            self._slow += 1
            if self._slow <= 10 or str(self._slow).rstrip("0") == "1":  # a slow disk would fill the log
                logger.warning("slow write: %.0f ms, %s (%d so far)", seconds * 1000, doing, self._slow)

    def _append(self, frames: Sequence[Pieces], deadline: float) -> list[str]:
        segment = self._segment()
        try:
            return segment.append(frames, deadline)
        except BaseException:
            self.finish()  # never write to it again, see above; the next write opens a new segment
            raise

    def _segment(self) -> SegmentFile:
        if self._open is not None and not self._is_full(self._open):
            return self._open
        self.finish()
        self._open, self._opened_at = self.storage.create(self._next()), self._clock()
        return self._open

    def _is_full(self, segment: SegmentFile) -> bool:
        return segment.end >= self._segment_bytes or self._clock() - self._opened_at >= SEGMENT_AGE_S

    def finish(self, segment: str = "") -> None:
        """Close a segment to further frames. "" closes the one that is open, whichever it is."""
        found = self._open
        if found is None or (segment and found.name != segment):
            return
        self._open = None
        found.close()
        self._finished(found.name, found.end)
