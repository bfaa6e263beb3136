"""Copies a run to another folder, also while its plane is at work, and again and again beside it.

One round brings the copy to one consistent state of the source:

    1. the log, in one consistent state, as an SQLite file beside the copy's log
    2. every frame that this log needs and the copy lacks, read, compared with its digest, and synced
    3. if one of them was freed meanwhile: from the beginning, with what was copied already
    4. the new log takes the old one's place; then the witness and the marker follow it
    5. frames that the new log does not need are deleted, by name

A process that is killed between any two of these leaves the old copy, the new one, or a first copy without a log, which
no plane opens. Locations stay as they are. The copy is another run, with an id of its own: two planes that both believe
to be one run must never share a storage or a client. Only a run that no plane has open may keep its id.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Self

import xxhash

from penstock.atomic import sync
from penstock.errors import Conflict, InvalidInput, PenstockError, StorageError
from penstock.frames import Buffer
from penstock.log import (
    LOG,
    LogReader,
    Witness,
    copy_log,
    fork,
    is_run,
    own,
    read_witness,
    reading,
    reading_sqlite,
    sign_copy,
    typed_errors,
    url_of,
)
from penstock.runs.read_log import storage_of_run
from penstock.storage import (
    FolderStorage,
    Gone,
    Location,
    Marker,
    is_segment_name,
    parse_location,
    read_each,
    read_marker,
)

_ROUNDS = 20
"""Logs that are read for one copy before it is given up: frames are freed faster than they can be copied."""
_NEW_LOG = f"{LOG}.copying"


@dataclass(slots=True)
class Copied:
    """What one round did."""

    run_id: str
    """Of the copy."""
    commits: int = 0
    """Transactions of the source that the copy has."""
    groups: int = 0
    """Frames that were copied in this round."""
    num_bytes: int = 0
    freed: int = 0
    """Frames and segments that were deleted in the copy, because the source does not need them any longer."""
    damaged: dict[str, str] = field(default_factory=dict)
    """Groups whose frames are damaged in the source, with the reason; the copy lacks these frames."""


@dataclass(frozen=True, slots=True)
class _Needed:
    """A frame that a log needs."""

    group: str
    digest: bytes
    at: Location


class RunCopy:
    """A run's folder and its copy. Holds the copy's lock, so that no plane opens it between two rounds."""

    def __init__(self, source: Path, target: Path, *, same_run: bool = False) -> None:
        """`same_run`: the copy keeps the run's id; raises Conflict while a plane has the source open."""
        self.source, self.target = source.resolve(), target.resolve()
        if self.target == self.source or self.source in self.target.parents or self.target in self.source.parents:
            raise InvalidInput(f"{target}: lies in the run that is copied, or around it; give a folder elsewhere")
        self._source_id = str(_meta(self.source).get("run_id", ""))
        self._have: set[str] = set()
        """Locations whose frames the copy has."""
        self._there: set[str] = set()
        """Locations and segments that the copy's storage may hold."""
        self._commits = 0
        """Of the source, as far as the copy has them."""
        _check_target(self.target)
        with ExitStack() as undo:
            if same_run:
                undo.callback(fork.close, _own_source(self.source))
            undo.callback(fork.close, own(self.target, "plane or copy"))
            copied_id = self._look() or secrets.token_hex(16)
            self.run_id = self._source_id if same_run else copied_id
            self._frames, self._storage = storage_of_run(self.source), FolderStorage(self.target / "storage")
            self._undo = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._undo.close()

    def _look(self) -> str:
        """What an earlier copy left in the target; returns its run id, empty for a new copy."""
        if not is_run(self.target):
            _check_target(self.target)
            return ""
        found = _meta(self.target)
        if found.get("copied_from") != self._source_id:
            raise InvalidInput(f"{self.target}: holds a run that is not a copy of {self.source}; give a new folder")
        if found["copied_commits"] != found["commits"]:
            raise Conflict(f"{self.target}: a plane was opened on this copy since; give a new folder")
        self._commits = int(found["commits"])
        with reading(self.target) as log:
            self._have = set(_needed(log)) - set(json.loads(found["copy_lacks"]))
            self._there = {*self._have, *log.frees(), *(row.name for row in log.segments())}
        return found["run_id"]

    def is_behind(self) -> bool:
        """Whether the source committed something since the last round. Reads a small file or one row only."""
        if url_of(self.source):
            return int(_meta(self.source)["commits"]) != self._commits
        seen = read_witness(self.source)
        return seen is None or seen.commits != self._commits

    # -------------------------------------------------------------- one round

    def round(self) -> Copied:
        """Bring the copy up to date."""
        found = Copied(self.run_id)
        for _ in range(_ROUNDS):
            needed = self._copy_log()
            if self._copy_frames(needed, found):
                self._finish(needed, found)
                return found
        raise StorageError(
            f"{self.source}: frames are freed faster than they can be copied; copy it while no trainer is at work, or "
            "raise retain_steps"
        )

    def _copy_log(self) -> dict[str, _Needed]:
        """The source's log, beside that of the copy; returns the frames it needs."""
        path = self.target / _NEW_LOG
        path.unlink(missing_ok=True)
        with typed_errors(f"copy of {self.source} to {self.target}"):
            copy_log(self.source, path)
        with reading_sqlite(path) as log:
            meta = log.all_meta()
            if meta.get("run_id") != self._source_id:
                raise Conflict(f"{self.source}: became another run while it was copied; nothing was changed")
            if int(meta["commits"]) < self._commits:
                raise Conflict(
                    f"{self.source}: ends at transaction {meta['commits']}, and its copy {self.target} has "
                    f"{self._commits}: the source was restored from an older state; nothing was changed"
                )
            return _needed(log)

    def _copy_frames(self, needed: dict[str, _Needed], found: Copied) -> bool:
        """Copy the frames that the copy lacks. False: some were freed meanwhile."""
        found.damaged, freed = {}, 0
        todo = sorted((needed[name] for name in needed.keys() - self._have), key=lambda one: str(one.at))

        def frames(of: list[_Needed]) -> Iterator[tuple[Location, Buffer]]:
            nonlocal freed
            read = read_each(self._frames, [str(one.at) for one in of])
            for one, frame in zip(of, map(_as_it_was, of, read), strict=True):
                if not isinstance(frame, str):
                    yield one.at, frame
                    copied.append(one)
                elif self._is_freed(one):
                    freed += 1
                else:
                    found.damaged[one.group] = frame

        for segment, parts in groupby(todo, key=lambda one: one.at.segment):
            copied: list[_Needed] = []
            self._there.add(segment)  # before its first byte: it must not stay if the source frees it
            self._storage.restore(segment, frames(list(parts)))
            self._have.update(str(one.at) for one in copied)
            self._there.update(str(one.at) for one in copied)
            found.groups += len(copied)
            found.num_bytes += sum(one.at.size for one in copied)
        return not freed

    def _is_freed(self, one: _Needed) -> bool:
        """Whether the source has freed a frame. The log forgets a location before its bytes are deleted."""
        with reading(self.source) as log:
            return log.location_of(one.group) != str(one.at)

    # -------------------------------------------------------------- the copy becomes what was copied

    def _finish(self, needed: dict[str, _Needed], found: Copied) -> None:
        segments = {one.at.segment for one in needed.values()}
        dropped = sorted(name for name in self._there if _is_left(name, needed, segments))
        marker = self._sign(needed, dropped)
        (self.target / _NEW_LOG).replace(self.target / LOG)
        sync(self.target)
        witness = Witness(self.target)
        witness.write(self.run_id, self._commits)
        witness.close()
        if not self._storage.set_marker(marker.to_bytes(), self._storage.marker()):
            raise Conflict(f"{self._storage.url}: another process moved the marker; is a plane at work on the copy?")
        self._storage.delete(dropped)
        self._have &= needed.keys()
        self._there = {*self._have, *segments}
        found.commits, found.freed = self._commits, len(dropped)

    def _sign(self, needed: dict[str, _Needed], dropped: list[str]) -> Marker:
        """Make the new log that of the copy: its id, its storage, where it comes from, what it has yet to delete."""
        lacks = json.dumps(sorted(needed.keys() - self._have))
        meta = sign_copy(
            self.target / _NEW_LOG,
            run_id=self.run_id,
            copied_from=self._source_id,
            lacks=lacks,
            dropped=dropped,
            segments=[name for name in dropped if is_segment_name(name)],
        )
        self._commits = meta["commits"]
        source = read_marker(self._frames)
        run = "" if source is None else source.run
        return Marker(run_id=self.run_id, epoch=meta["epoch"], commits=self._commits, run=run)


def _as_it_was(one: _Needed, frame: Buffer | PenstockError) -> Buffer | str:
    """A frame of the source, or why it cannot be copied."""
    if isinstance(frame, Gone):
        return str(frame)
    if isinstance(frame, PenstockError):
        raise frame
    return frame if xxhash.xxh3_128_digest(frame) == one.digest else f"{one.at}: not as it was written"


def _is_left(name: str, needed: dict[str, _Needed], segments: set[str]) -> bool:
    """Whether the copy's storage holds this and the new log does not need it. Frames go with their segment."""
    if is_segment_name(name):
        return name not in segments
    return name not in needed and parse_location(name).segment in segments


def _check_target(target: Path) -> None:
    """Refuse a folder that holds something else, before anything is written to it."""
    if is_run(target) or not target.exists():
        return
    there = sorted(path.name for path in target.iterdir() if path.name != "lock") if target.is_dir() else ["no folder"]
    if there:
        raise InvalidInput(
            f"{target}: holds {', '.join(there[:4])} and no {LOG}; give a new folder, or delete this one if it is a "
            "copy that was not finished"
        )


def _own_source(folder: Path) -> int:
    try:
        return own(folder)
    except Conflict as error:
        raise Conflict(f"{error}; without --same-run a run is copied beside its plane, as another run") from None


def _meta(folder: Path) -> dict[str, str]:
    if not is_run(folder):
        raise InvalidInput(f"{folder}: no {LOG} in it; give the folder of a run")
    with reading(folder) as log:
        return log.all_meta()


def _needed(log: LogReader) -> dict[str, _Needed]:
    """The frames that a log needs, by location."""
    rows = log.rows("SELECT location, id, digest FROM groups WHERE location != ''")
    return {location: _Needed(group, digest, parse_location(location)) for location, group, digest in rows}
