"""Files of columns in a folder: blocks are appended to segment files, with one sync for all that come together.

    columns/000003-000001   [block][block][block]...        segment 1, written after the third opening of this folder
    location                000003-000001:8192:310284       segment, offset, bytes

A location is returned after its bytes are synced, so a torn tail is never referenced. Each opening of the folder writes
new segments. `sweep` punches freed blocks out of their segment, if the filesystem supports that, and removes a segment
once every byte of it was freed by name. It may take as long as the disk needs. Segments are memory-mapped for reading.
Their size is checked before each use, because touching pages beyond the end of a file kills the process. The caller's
checksums detect damaged bytes.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import re
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from penstock.arrays import offsets_of
from penstock.atomic import sync
from penstock.errors import CorruptFrame, DiskFull, StorageError
from penstock.frames import Buffer

logger = logging.getLogger("penstock.columns")
SEGMENT_BYTES = 64 << 20
"""Start a new segment when one has grown to this."""
_LOCATION = re.compile(r"(\d{6,}-\d{6,}):(\d{1,15}):(\d{1,15})")
_PUNCH_HOLE, _KEEP_SIZE = 2, 1
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ColumnFiles:
    """Blocks in the files of one folder, owned by one process at a time. `life` counts its owners."""

    def __init__(self, folder: str | Path, *, life: int) -> None:
        self._folder, self._life = Path(folder), life
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._live: dict[str, set[int]] = {}
        """Segment -> offsets of the blocks that are still needed."""
        self._freed: dict[str, dict[int, int]] = {}
        """Segment -> offset and size of the freed blocks."""
        self.removed: deque[str] = deque()
        """Segments that were removed: the owner may forget what was freed in them."""
        self._bytes = 0
        self._count = 0
        self._active: tuple[str, int] | None = None
        """(segment being written, its file descriptor)."""
        self._end = 0
        self._maps: dict[str, mmap.mmap] = {}
        self._to_sweep: deque[tuple[str, int, int]] = deque()
        """(segment, offset, bytes) to punch out; 0 bytes means to remove the segment."""
        self._lock = threading.Lock()

    # -------------------------------------------------------------- writing

    def keep(self, frames: Sequence[Buffer]) -> list[str]:
        """Append blocks and sync once. Returns their locations; after an error none of them is stored."""
        segment, file = self._segment()
        start = self._end
        try:
            for frame in frames:
                _write(file, frame)
            os.fdatasync(file)
        except OSError as error:
            self._abandon(start)
            raise _typed(error, self._folder) from None
        offsets = offsets_of([len(frame) for frame in frames]) + start
        with self._lock:  # not around the sync: `free` must not wait for it
            self._live.setdefault(segment, set()).update(offsets[:-1].tolist())
            self._end = int(offsets[-1])
            self._bytes += self._end - start
        return [f"{segment}:{at}:{len(frame)}" for at, frame in zip(offsets.tolist(), frames, strict=False)]

    def _segment(self) -> tuple[str, int]:
        """Return the segment to write to; a new one if the last is full."""
        if self._active is not None and self._end < SEGMENT_BYTES:
            return self._active
        self._finish()
        self._count += 1
        name = f"{self._life:06}-{self._count:06}"
        try:
            file = os.open(self._folder / name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            sync(self._folder)
        except OSError as error:
            raise _typed(error, self._folder) from None
        self._active, self._end = (name, file), 0
        return self._active

    def _abandon(self, start: int) -> None:
        """Truncate a failed write. Later blocks go where it began, or to a new segment if that fails too."""
        assert self._active is not None
        try:
            os.ftruncate(self._active[1], start)
            os.lseek(self._active[1], start, os.SEEK_SET)
        except OSError as error:
            logger.warning("%s: %s; continuing in a new segment", self._active[0], error)
            self._finish()

    def _finish(self) -> None:
        if self._active is not None:
            name, file = self._active
            os.close(file)
            with self._lock:
                self._active, self._end = None, 0
                self._remove_if_freed(name)

    # -------------------------------------------------------------- reading

    def read(self, location: str) -> Buffer:
        """Return a view of a block. Maps the segment again if it has grown since."""
        segment, offset, size = _parts(location)
        with self._lock:
            mapped = self._maps.get(segment)
            if mapped is None or min(len(mapped), mapped.size()) < offset + size:
                mapped = self._maps[segment] = self._map(segment)
        if len(mapped) < offset + size:
            raise CorruptFrame(f"{self._folder / segment}: {len(mapped)} bytes; a frame should end at {offset + size}")
        return memoryview(mapped)[offset : offset + size]

    def _map(self, segment: str) -> mmap.mmap:
        try:
            file = os.open(self._folder / segment, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CorruptFrame(f"{self._folder / segment}: {error.strerror}") from None
        try:
            return mmap.mmap(file, 0, prot=mmap.PROT_READ)
        except ValueError:
            raise CorruptFrame(f"{self._folder / segment}: it is empty") from None
        finally:
            os.close(file)

    # -------------------------------------------------------------- freeing

    def load(self, live: Iterable[str], freed: Iterable[str]) -> None:
        """Start with these blocks, and free those that an earlier owner freed but did not delete.

        Bytes that neither list names are left alone: nothing is deleted because it is unknown.
        """
        with self._lock:
            self._live, self._freed, self._bytes = {}, {}, 0
            for location in live:
                segment, offset, size = _parts(location)
                self._live.setdefault(segment, set()).add(offset)
                self._bytes += size
            for location in freed:
                self._free(*_parts(location))
        self.sweep()

    def free(self, locations: Iterable[str]) -> None:
        """Mark blocks as freed. `sweep` deletes their bytes."""
        with self._lock:
            for location in locations:
                segment, offset, size = _parts(location)
                if offset in self._live.get(segment, ()):
                    self._live[segment].remove(offset)
                    self._bytes -= size
                self._free(segment, offset, size)

    def _free(self, segment: str, offset: int, size: int) -> None:
        if offset in self._live.get(segment, ()):
            return
        self._freed.setdefault(segment, {})[offset] = size
        if not self._remove_if_freed(segment):
            self._to_sweep.append((segment, offset, size))

    def _remove_if_freed(self, segment: str) -> bool:
        """Queue a segment for removal if every byte of it was freed by name and it is not being written."""
        if self._live.get(segment) or (self._active is not None and self._active[0] == segment):
            return False
        freed = sum(self._freed.get(segment, {}).values())
        try:
            if freed < (self._folder / segment).stat().st_size:
                return False
        except OSError:  # already gone
            pass
        self._live.pop(segment, None)
        self._freed.pop(segment, None)
        self._maps.pop(segment, None)
        self._to_sweep.append((segment, 0, 0))
        return True

    def sweep(self) -> None:
        """Delete what was freed."""
        while self._to_sweep:
            try:
                segment, offset, size = self._to_sweep.popleft()
            except IndexError:  # another thread took the last one
                return
            if size:
                _punch(self._folder / segment, offset, size)
            elif _remove(self._folder / segment):
                self.removed.append(segment)

    @property
    def num_bytes(self) -> int:
        return self._bytes

    def close(self) -> None:
        self._finish()
        self.sweep()
        self._maps.clear()


def _parts(location: str) -> tuple[str, int, int]:
    found = _LOCATION.fullmatch(location)
    if found is None:
        raise CorruptFrame(f"location {location[:80]!r}: not in this folder")
    return found[1], int(found[2]), int(found[3])


def _write(file: int, frame: Buffer) -> None:
    view = memoryview(frame).cast("B")
    while len(view):
        view = view[os.write(file, view) :]


def _remove(path: Path) -> bool:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:  # retried when the folder is opened again
        logger.warning("%s: not removed: %s", path, error.strerror)
        return False
    return True


def _punch(path: Path, offset: int, size: int) -> None:
    """Free pages inside a file. Without filesystem support the space is free when the segment is removed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "fallocate"):
        return
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        libc.fallocate(file, _PUNCH_HOLE | _KEEP_SIZE, ctypes.c_int64(offset), ctypes.c_int64(size))
    finally:
        os.close(file)


def _typed(error: OSError, folder: Path) -> StorageError:
    if error.errno in _NO_ROOM:
        return DiskFull(f"{folder}: {error.strerror}; nothing was stored; free some space")
    return StorageError(f"{folder}: {error.strerror}")
