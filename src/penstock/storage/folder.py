"""Storage in a folder, on a local disk or on a filesystem that several hosts share.

    FOLDER/marker                        the run these frames belong to, and how far its log was
    FOLDER/marker.lock                   held while the marker is replaced
    FOLDER/segments/3f9c21d07b6a4e58     [frame][frame][frame]...

Every writing process appends to segments of its own and calls `fdatasync` before it returns a location, so no location
ever points into a torn tail. A segment is never truncated and never reused: another process may be reading it. Deleted
frames are punched out of their segment if the filesystem can do that; otherwise their bytes are freed with the segment.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby
from pathlib import Path

from penstock.atomic import REMEDIES, read_small, replacing, sync
from penstock.errors import Conflict, DiskFull, StorageError
from penstock.frames import Buffer
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
    read_ranges,
)
from penstock.storage.scan import reading_file

logger = logging.getLogger("penstock.storage")
SEGMENT_BYTES = 256 << 20
"""Large, because each segment costs a registration and a frame that the plane reads back. Dead frames are punched out,
so a large segment wastes nothing."""
SHARED_SEGMENT_BYTES = 8 << 20
"""On a shared filesystem, where holes cannot be punched: one live frame must not keep more than this from being freed.
"""
_PUNCH_HOLE, _KEEP_SIZE = 2, 1
# Loaded once: opening the library again took a tenth of the plane's time for small groups.
_FALLOCATE = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
_MAX_MARKER = 1 << 16
_MOST_PIECES = 512
"""Buffers of one `writev`; the kernel's limit is 1,024."""


class FolderStorage:
    """Segments as files of one folder."""

    batch_bytes = 32 << 20
    """The most that is written with one sync. Frames that come later wait for the next one."""
    gather_s = 0.0
    lands_late = False

    def __init__(self, folder: str | Path, *, create: bool = True) -> None:
        """`create` makes the folder if it is missing. Clients pass False and leave that to the plane."""
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
            # Sync the folder as well: after a power cut the file's data would be on disk and its name not.
            try:
                sync(self._segments)
            except BaseException:
                os.close(file)
                raise
        return FolderSegment(segment, self.path(segment), file)

    def restore(self, segment: str, frames: Iterable[tuple[Location, Buffer]]) -> None:
        """Write frames of a segment copied from another storage, each at its own offset. Durable when this returns.

        Gaps between them stay holes. Writing a frame again changes nothing, so a copy may be repeated."""
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
        return read_ranges(self, location, ranges)

    def read_into(self, wanted: Sequence[Wanted]) -> None:
        check_wanted(wanted)
        for segment, some in groupby(wanted, key=lambda one: one[0].segment):
            with self.opened(segment) as file:
                for at, offset, view in some:
                    _pread_into(file, self.path(segment), at, offset, view)

    @contextmanager
    def opened(self, segment: str) -> Iterator[int]:
        """Open a segment to read it. Opened for each use, because network filesystems refresh a file's size then."""
        path = self.path(segment)
        try:
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # never waits for the writer of a pipe
        except OSError as error:
            # A missing file in a folder that is there is gone. Without the folder the storage may just not be mounted.
            if error.errno in _MISSING and self._segments.is_dir():
                raise Gone(f"{path}: {error.strerror}") from None
            raise Away(f"{path}: {error.strerror}; is the storage mounted here?") from None
        try:
            yield file
        finally:
            os.close(file)

    # -------------------------------------------------------------- for checks and recovery

    @property
    def place(self) -> str:
        """Its location, for messages."""
        return str(self.folder)

    def is_there(self) -> bool:
        return self._segments.is_dir()

    def parts(self) -> dict[str, list[Part]]:
        """Return the files of each segment."""
        return {name: [file_part(self.path(name), name)] for name in self.segments()}

    # -------------------------------------------------------------- deleting

    def delete(self, names: Iterable[str]) -> None:
        frames = []
        for name in names:
            if is_segment_name(name):
                with suppress(FileNotFoundError), _typed(self.folder):
                    self.path(name).unlink(missing_ok=True)
            else:
                frames.append(parse_location(name))
        for at in _side_by_side(frames):
            _punch(self.path(at.segment), at)

    def segments(self) -> dict[str, int]:
        found = {}
        try:
            with os.scandir(self._segments) as entries:
                for entry in entries:
                    if is_segment_name(entry.name):
                        with suppress(FileNotFoundError):
                            # Blocks, not the size: punched holes take no room.
                            found[entry.name] = entry.stat(follow_symlinks=False).st_blocks * 512
        except OSError as error:
            raise Away(f"{self._segments}: {error.strerror}") from None
        return found

    # -------------------------------------------------------------- the marker

    def marker(self) -> bytes | None:
        try:
            return read_small(self.folder / "marker", _MAX_MARKER)
        except FileNotFoundError:
            return None
        except IsADirectoryError as error:
            where = self.folder / "marker"
            raise StorageError(f"{where}: {error.strerror}; {REMEDIES[errno.EISDIR]}") from None
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
        """Overwrite the marker in place. On a full volume there is no room for a second file, and a plane that cannot
        move the marker could never delete anything. The marker is smaller than a sector, so the write is atomic."""
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
        """Delete the marker, with the run."""
        with _typed(self.folder):
            (self.folder / "marker").unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing is open."""


class FolderSegment:
    """A segment file that this process writes."""

    def __init__(self, name: str, path: Path, file: int) -> None:
        self.name, self.end, self._path, self._file = name, 0, path, file
        self._name = str(path)

    def append(self, frames: Sequence[Pieces], deadline: float = math.inf) -> list[str]:  # noqa: ARG002 - one try
        locations, start = [], self.end
        try:
            with _typed(self._path):
                for pieces in frames:
                    size = _write(self._file, pieces)
                    locations.append(f"{self.name}:{self.end}:{size}")
                    self.end += size
                os.fdatasync(self._file)
                self._check_name()  # after the sync, before any location is returned
        except DiskFull:  # free what was written: no location refers to it, and steps need the room
            _punch(self._path, Location(self.name, start, os.fstat(self._file).st_size - start))
            raise
        return locations

    def _check_name(self) -> None:
        """Raise StorageError if the file was removed or moved. Writes to it would succeed, and never be read again."""
        mine = os.fstat(self._file)
        try:
            found = os.stat(self._name)  # noqa: PTH116 - once per put, and a Path takes three times as long
        except FileNotFoundError:
            found = None
        if found is None or (found.st_ino, found.st_dev) != (mine.st_ino, mine.st_dev):
            raise StorageError(f"{self._path}: removed or replaced while it was written; put the folder back")

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def file_part(path: Path, segment: str = "") -> Part:
    """Describe a file that may hold frames."""
    try:
        found = path.stat()
        size, modified_ns = found.st_size, found.st_mtime_ns
    except OSError:
        size = modified_ns = 0
    return Part(str(path), size, modified_ns, partial(reading_file, path), segment)


def _pread_into(file: int, path: Path, at: Location, offset: int, view: memoryview) -> None:
    got = 0
    try:
        while got < len(view):
            count = os.preadv(file, [view[got:]], offset + got)
            if not count:
                raise Gone(f"{path}: ends {len(view) - got} bytes before the frame at {at.offset} does")
            got += count
    except OSError as error:
        if error.errno == errno.ESTALE:
            raise Gone(f"{path}: {error.strerror}") from None
        raise Away(f"{path}: {error.strerror}") from None


def _write(file: int, pieces: Pieces) -> int:
    """Write all buffers. Returns the number of bytes."""
    views = [view for view in (memoryview(piece).cast("B") for piece in pieces) if len(view)]
    for first in range(0, len(views), _MOST_PIECES):
        batch = views[first : first + _MOST_PIECES]
        written = os.writev(file, batch)
        # A short write stops inside one of the buffers. Of buffers of 4, 6 and 2 bytes, 7 written leave 3 bytes of the
        # second and all of the third: view[7:] of the first is empty, then 3 of the second are done, 0 of the third.
        for view in batch:
            left, written = view[written:], max(written - len(view), 0)
            while len(left):
                left = left[os.write(file, left) :]
    return sum(map(len, views))


def _side_by_side(frames: Iterable[Location]) -> Iterator[Location]:
    """Join frames that follow one another in their segment: one call frees the groups of a step, and with them the
    pages that two small frames share."""
    found: Location | None = None
    for at in sorted(frames, key=lambda at: (at.segment, at.offset)):
        if found is not None and (found.segment, found.end) == (at.segment, at.offset):
            found = Location(at.segment, found.offset, found.size + at.size)
            continue
        if found is not None:
            yield found
        found = at
    if found is not None:
        yield found


def _punch(path: Path, at: Location) -> None:
    """Free a frame's pages inside a file. If the filesystem cannot, they are freed with the segment."""
    if _FALLOCATE is None:
        return
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        _FALLOCATE(file, _PUNCH_HOLE | _KEEP_SIZE, ctypes.c_int64(at.offset), ctypes.c_int64(at.size))
    finally:
        os.close(file)


@contextmanager
def _typed(path: Path) -> Iterator[None]:
    """Turn OSError into our errors, with the path and what to do."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        if error.errno in _NO_ROOM:
            remedy = 'nothing was kept; make room (a run with retain="all" frees nothing by itself)'
            raise DiskFull(f"{path}: {error.strerror}; {remedy}") from None
        remedy = REMEDIES.get(error.errno or 0, "look at the volume")
        raise StorageError(f"{error.filename or path}: {error.strerror}; {remedy}") from None


# ------------------------------------------------------------------ is the folder shared between hosts?

_SHARED = re.compile(
    r"nfs4?|cifs|smb3|smbfs|9p|afs|beegfs|(fuse\.)?(ceph|glusterfs)|fuse\.(juicefs|sshfs)|gpfs|lustre|ocfs2|gfs2|orangefs|"
    r"panfs|pvfs2|virtiofs|wekafs|efs"
)
"""Filesystem types, as the kernel names them, on which two hosts may have the same files open."""


def is_shared(folder: str | Path, mounts: str | None = None) -> bool:
    """Return whether other hosts may see this folder. `mounts` is the text of /proc/self/mountinfo.

    >>> mounts = "36 35 98:0 / / rw - ext4 /dev/sda rw\\n40 36 0:45 / /mnt/all rw,noatime shared:1 - nfs4 host:/ rw"
    >>> is_shared("/mnt/all/runs", mounts), is_shared("/mnt/other", mounts)
    (True, False)
    """
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text()
        except OSError:  # not Linux: assume that it is local
            return False
    path, best, kind = Path(folder).resolve(), -1, ""
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        point = Path(fields.split()[4].encode().decode("unicode_escape"))  # spaces are written as \\040
        # The deepest mount above the folder counts, and of two at the same place the later one, which hides the other.
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), rest.split()[0]
    return _SHARED.fullmatch(kind) is not None
