"""Storage in a folder, on a local disk or a filesystem that several hosts share.

    FOLDER/marker                        whose frames these are, and how far its log was
    FOLDER/marker.lock                   held for the moment in which the marker is replaced
    FOLDER/segments/3f9c21d07b6a4e58     [frame][frame][frame]...

Every writing process appends to segments of its own and calls `fdatasync` before it names a location, so a torn tail
is never referred to. A segment is never truncated and never reused: another process may be reading it. Deleted frames
are punched out of their segment where the filesystem can do that; otherwise their bytes are free when the segment is.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby
from pathlib import Path

from penstock.atomic import REMEDIES, replacing, sync
from penstock.errors import Conflict, DiskFull, StorageError
from penstock.frames import Buffer
from penstock.storage.filesystem import is_shared
from penstock.storage.interface import (
    Away,
    Gone,
    Location,
    Part,
    Pieces,
    Range,
    Wanted,
    check_wanted,
    is_segment_name,
    parse_location,
)
from penstock.storage.scan import reading_file

logger = logging.getLogger("penstock.storage")
SEGMENT_BYTES = 256 << 20
"""Each costs a registration and a frame that the plane reads back. Dead frames are punched out, so few are enough."""
SHARED_SEGMENT_BYTES = 8 << 20
"""On a filesystem that many hosts write to: one live frame must not pin more than this for each of them."""
_PUNCH_HOLE, _KEEP_SIZE = 2, 1
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
_MAX_MARKER = 1 << 16
_MOST_PIECES = 512
"""Buffers of one `writev`; the kernel takes 1,024."""


class FolderStorage:
    """Segments as files of one folder."""

    batch_bytes = 32 << 20
    """Written with one sync, at most: frames that come later wait for the next."""
    gather_s = 0.0
    lands_late = False

    def __init__(self, folder: str | Path, *, create: bool = True) -> None:
        """`create`: make the folder if it is missing. Readers and writers elsewhere leave that to the plane."""
        self.folder = Path(folder)
        self.url = f"file://{self.folder}"
        self.segment_bytes = SHARED_SEGMENT_BYTES if is_shared(self.folder) else SEGMENT_BYTES
        self._segments = self.folder / "segments"
        if create:
            with _typed(self.folder):
                self._segments.mkdir(parents=True, exist_ok=True, mode=0o700)

    def path(self, segment: str) -> Path:
        return self._segments / segment

    def prove(self) -> str:
        return ""

    def create(self, segment: str) -> FolderSegment:
        with _typed(self.folder):
            try:
                file = os.open(self.path(segment), os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except FileExistsError:
                raise Conflict(f"{self.path(segment)}: exists; two writers have one name") from None
            try:
                sync(self._segments)
            except BaseException:
                os.close(file)
                raise
        return FolderSegment(segment, self.path(segment), file)

    def restore(self, segment: str, frames: Iterable[tuple[Location, Buffer]]) -> None:
        """Write frames of a segment that is copied from another storage, each at its place; durable when this returns.

        What lies between them stays a hole. Writing a frame again changes nothing, so a copy may be repeated."""
        with _typed(self.folder):
            file = os.open(self.path(segment), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                for at, frame in frames:
                    os.lseek(file, at.offset, os.SEEK_SET)
                    _write(file, [frame])
                os.fdatasync(file)
            finally:
                os.close(file)
            sync(self._segments)

    # -------------------------------------------------------------- reading

    def read(self, location: str, ranges: Sequence[Range] | None = None) -> list[Buffer]:
        at = parse_location(location)
        with self.opened(at.segment) as file:
            return [_pread(file, self.path(at.segment), at, one) for one in ranges or [(0, at.size)]]

    def read_into(self, wanted: Sequence[Wanted]) -> None:
        check_wanted(wanted)
        for segment, some in groupby(wanted, key=lambda one: one[0].segment):
            with self.opened(segment) as file:
                for _, offset, view in some:
                    _pread_into(file, self.path(segment), offset, view)

    @contextmanager
    def opened(self, segment: str) -> Iterator[int]:
        """A descriptor to read a segment with. Opened for each use: network filesystems check a file's size then."""
        path = self.path(segment)
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _MISSING and self._segments.is_dir():
                raise Gone(f"{path}: {error.strerror}") from None
            raise Away(f"{path}: {error.strerror}; is the storage mounted here?") from None
        try:
            yield file
        finally:
            os.close(file)

    # -------------------------------------------------------------- looking for what no log knows

    @property
    def place(self) -> str:
        """For people."""
        return str(self.folder)

    def is_there(self) -> bool:
        return self._segments.is_dir()

    def parts(self) -> dict[str, list[Part]]:
        """The files of each segment."""
        return {name: [file_part(self.path(name), name)] for name in self.segments()}

    # -------------------------------------------------------------- deleting

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            if is_segment_name(name):
                with suppress(FileNotFoundError), _typed(self.folder):
                    self.path(name).unlink(missing_ok=True)
            else:
                at = parse_location(name)
                _punch(self.path(at.segment), at)

    def segments(self) -> dict[str, int]:
        found = {}
        try:
            with os.scandir(self._segments) as entries:
                for entry in entries:
                    if is_segment_name(entry.name):
                        with suppress(FileNotFoundError):
                            found[entry.name] = entry.stat(follow_symlinks=False).st_blocks * 512
        except OSError as error:
            raise Away(f"{self._segments}: {error.strerror}") from None
        return found

    # -------------------------------------------------------------- the marker

    def marker(self) -> bytes | None:
        try:
            with (self.folder / "marker").open("rb") as file:
                return file.read(_MAX_MARKER)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Away(f"{self.folder / 'marker'}: {error.strerror}") from None

    def set_marker(self, new: bytes, old: bytes | None) -> bool:
        with _typed(self.folder), self._marker_locked():
            if self.marker() != old:
                return False
            try:
                with replacing(self.folder / "marker") as file:
                    file.write(new)
            except OSError as error:
                if error.errno not in _NO_ROOM or old is None:
                    raise
                self._overwrite_marker(new)
            return True

    def _overwrite_marker(self, new: bytes) -> None:
        """On a full volume there is no room for a second file, and without the marker nothing could ever be deleted.
        It is smaller than a sector, which reaches the disk as a whole."""
        file = os.open(self.folder / "marker", os.O_RDWR | os.O_CLOEXEC)
        try:
            os.pwrite(file, new.ljust(os.fstat(file).st_size), 0)
            os.fdatasync(file)
        finally:
            os.close(file)

    @contextmanager
    def _marker_locked(self) -> Iterator[None]:
        descriptor = os.open(self.folder / "marker.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def remove_marker(self) -> None:
        """Of a run that is deleted."""
        with _typed(self.folder):
            (self.folder / "marker").unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing is open."""


class FolderSegment:
    """One segment file that this process writes."""

    def __init__(self, name: str, path: Path, file: int) -> None:
        self.name, self.end, self._path, self._file = name, 0, path, file

    def append(self, frames: Sequence[Pieces], deadline: float = math.inf) -> list[str]:  # noqa: ARG002 - one try
        locations, start = [], self.end
        try:
            with _typed(self._path):
                for pieces in frames:
                    size = _write(self._file, pieces)
                    locations.append(f"{self.name}:{self.end}:{size}")
                    self.end += size
                os.fdatasync(self._file)
                self._check_name()
        except DiskFull:  # what was written is of no use to anybody, and others may need the room
            _punch(self._path, Location(self.name, start, os.fstat(self._file).st_size - start))
            raise
        return locations

    def _check_name(self) -> None:
        """A file that was removed or moved away still takes writes, and nobody will ever read them."""
        mine = os.fstat(self._file)
        try:
            found = self._path.stat()
        except FileNotFoundError:
            found = None
        if found is None or (found.st_ino, found.st_dev) != (mine.st_ino, mine.st_dev):
            raise StorageError(f"{self._path}: removed or replaced while it was written; put the folder back")

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def file_part(path: Path, segment: str = "") -> Part:
    """A file that may hold frames."""
    try:
        found = path.stat()
        size, modified_ns = found.st_size, found.st_mtime_ns
    except OSError:
        size = modified_ns = 0
    return Part(str(path), size, modified_ns, partial(reading_file, path), segment)


def _pread(file: int, path: Path, at: Location, wanted: Range) -> bytes:
    start, end = wanted
    if not 0 <= start <= end <= at.size:
        raise Gone(f"{path}: bytes {start} to {end} of a frame of {at.size}")
    try:
        found = os.pread(file, end - start, at.offset + start)
        while len(found) < end - start:
            more = os.pread(file, end - start - len(found), at.offset + start + len(found))
            if not more:
                raise Gone(f"{path}: ends {end - start - len(found)} bytes before the frame at {at.offset} does")
            found += more
    except OSError as error:
        if error.errno == errno.ESTALE:
            raise Gone(f"{path}: {error.strerror}") from None
        raise Away(f"{path}: {error.strerror}") from None
    return found


def _pread_into(file: int, path: Path, offset: int, view: memoryview) -> None:
    got = 0
    try:
        while got < len(view):
            count = os.preadv(file, [view[got:]], offset + got)
            if not count:
                raise Gone(f"{path}: ends {len(view) - got} bytes before the bytes at {offset} do")
            got += count
    except OSError as error:
        if error.errno == errno.ESTALE:
            raise Gone(f"{path}: {error.strerror}") from None
        raise Away(f"{path}: {error.strerror}") from None


def _write(file: int, pieces: Pieces) -> int:
    """Write all of it; returns the bytes."""
    views = [view for view in (memoryview(piece).cast("B") for piece in pieces) if len(view)]
    for first in range(0, len(views), _MOST_PIECES):
        batch = views[first : first + _MOST_PIECES]
        written = os.writev(file, batch)
        for view in batch:  # a short write stops inside one of them
            left, written = view[written:], max(written - len(view), 0)
            while len(left):
                left = left[os.write(file, left) :]
    return sum(map(len, views))


def _punch(path: Path, at: Location) -> None:
    """Free the pages inside a file; where that cannot be done, they are free when the segment is."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "fallocate"):
        return
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        libc.fallocate(file, _PUNCH_HOLE | _KEEP_SIZE, ctypes.c_int64(at.offset), ctypes.c_int64(at.size))
    finally:
        os.close(file)


@contextmanager
def _typed(path: Path) -> Iterator[None]:
    """OSErrors become ours, with the path and what to do."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        if error.errno in _NO_ROOM:
            words = 'nothing was kept; make room (a run with retain="all" frees nothing by itself)'
            raise DiskFull(f"{path}: {error.strerror}; {words}") from None
        remedy = REMEDIES.get(error.errno or 0, "look at the volume")
        raise StorageError(f"{error.filename or path}: {error.strerror}; {remedy}") from None
