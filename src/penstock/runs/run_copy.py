"""Copies a run to another folder, even while its plane works, and keeps the copy up to date in further rounds.

One round brings the copy to one consistent state of the source:

    1. copy the log, in one consistent state, to an SQLite file beside the copy's log
    2. copy every frame that this log needs and the copy lacks: read it, compare its digest, sync it
    3. if one of them was freed meanwhile, start again at 1; frames that were copied stay
    4. rename the new log over the old one, then update the witness and the marker
    5. delete frames that the new log does not need, by name

A process that is killed between any two of these leaves the old copy, the new one, or a first copy without a log, which
no plane opens. Locations stay the same. The copy is another run with an id of its own, because two planes with the same
run id must never share a storage or a client. Only a run that no plane has open may keep its id.
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
    is_run,
    own,
    read_witness,
    reading,
    reading_sqlite,
    release,
    sign_copy,
    typed_errors,
    url_of,
)
from penstock.runs.run_log import storage_of_run
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
"""How often one round starts again before it fails: frames are freed faster than they can be copied."""
_NEW_LOG = f"{LOG}.copying"


@dataclass(slots=True)
class Copied:
    """The result of one round."""

    run_id: str
    """Id of the copy."""
    commits: int = 0
    """Number of the source's transactions that the copy has."""
    groups: int = 0
    """Number of frames copied in this round."""
    num_bytes: int = 0
    freed: int = 0
    """Number of frames deleted in the copy, because the source no longer needs them."""
    damaged: dict[str, str] = field(default_factory=dict)
    """Groups whose frames are damaged in the source -> reason. The copy lacks these frames."""


@dataclass(frozen=True, slots=True)
class _Needed:
    """A frame that a log needs."""

    group: str
    digest: bytes
    at: Location


class RunCopy:
    """Copies one run. Holds the lock of the copy's folder, so that no plane opens it between two rounds."""

    def __init__(self, source: Path, target: Path, *, same_run: bool = False) -> None:
        """With `same_run` the copy keeps the run's id; raises Conflict while a plane has the source open."""
        self.source, self.target = source.resolve(), target.resolve()
        if self.target == self.source or self.source in self.target.parents or self.target in self.source.parents:
            raise InvalidInput(f"{target}: lies in the run that is copied, or around it; give a folder elsewhere")
        self._source_id = str(_meta(self.source).get("run_id", ""))
        self._have: set[str] = set()
        """Locations whose frames the copy has."""
        self._there: set[str] = set()
        """Locations and segments that the copy's storage may hold."""
        self._commits = 0
        """Number of the source's transactions that the copy has."""
        _check_target(self.target)
        with ExitStack() as undo:
            if same_run:
                undo.callback(release, _own_source(self.source))
            undo.callback(release, own(self.target, "plane or copy"))
            copied_id = self._look() or secrets.token_hex(16)
            self.run_id = self._source_id if same_run else copied_id
            self._frames, self._storage = storage_of_run(self.source), FolderStorage(self.target / "storage")
            self._undo = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._undo.close()

    def _look(self) -> str:
        """Read what an earlier copy left in the target. Returns its run id, or "" for a new copy."""
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
        """Return whether the source committed anything since the last round. Reads only a small file or one row."""
        if url_of(self.source):
            return int(_meta(self.source)["commits"]) != self._commits
        seen = read_witness(self.source)
        return seen is None or seen.commits != self._commits

    # -------------------------------------------------------------- one round

    def round(self) -> Copied:
        """Bring the copy up to date."""
        found = Copied(self.run_id)
        # A plane frees a frame only after its log forgot it. So if a frame is gone, a newer log does not need it, and
        # starting again with that log makes progress.
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
        """Copy the source's log beside the copy's own. Returns the frames it needs, by location."""
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
        """Copy the frames that the copy lacks. Returns False if some were freed meanwhile."""
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
            self._there.add(segment)  # before its first byte, so that it is deleted if the source frees it
            self._storage.restore(segment, frames(list(parts)))
            self._have.update(str(one.at) for one in copied)
            self._there.update(str(one.at) for one in copied)
            found.groups += len(copied)
            found.num_bytes += sum(one.at.size for one in copied)
        return not freed

    def _is_freed(self, one: _Needed) -> bool:
        """Return whether the source has freed a frame. The log forgets a location before its bytes are deleted."""
        with reading(self.source) as log:
            return log.location_of(one.group) != str(one.at)

    # -------------------------------------------------------------- switching the copy to the new state

    def _finish(self, needed: dict[str, _Needed], found: Copied) -> None:
        segments = {one.at.segment for one in needed.values()}
        dropped = sorted(name for name in self._there if _is_left(name, needed, segments))
        marker = self._sign(needed, dropped)
        # All frames of the new log are on disk by now. Renaming switches the copy to it in one step.
        (self.target / _NEW_LOG).replace(self.target / LOG)
        sync(self.target)
        witness = Witness(self.target)
        witness.write(self.run_id, self._commits)
        witness.close()
        if not self._storage.set_marker(marker.to_bytes(), self._storage.marker()):
            raise Conflict(f"{self._storage.url}: another process moved the marker; stop the plane that uses the copy")
        self._storage.delete(dropped)  # also segments that were empty, and what an earlier round may have deleted
        found.commits, found.freed = self._commits, len(self._have - needed.keys())
        self._have &= needed.keys()
        self._there = {*self._have, *segments}

    def _sign(self, needed: dict[str, _Needed], dropped: list[str]) -> Marker:
        """Turn the new log into the copy's own: its id, storage and origin, and what it still has to delete."""
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
    """Return a frame of the source, or the reason why it cannot be copied."""
    if isinstance(frame, Gone):
        return str(frame)
    if isinstance(frame, PenstockError):
        raise frame
    return frame if xxhash.xxh3_128_digest(frame) == one.digest else f"{one.at}: not as it was written"


def _is_left(name: str, needed: dict[str, _Needed], segments: set[str]) -> bool:
    """Return whether the new log needs neither this frame nor its segment. A deleted segment takes its frames along."""
    if is_segment_name(name):
        return name not in segments
    return name not in needed and parse_location(name).segment in segments


def _check_target(target: Path) -> None:
    """Raise InvalidInput for a folder that holds something else, before anything is written to it."""
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
        raise Conflict(f"{error}; without --same-run a run is copied while its plane works, as another run") from None


def _meta(folder: Path) -> dict[str, str]:
    if not is_run(folder):
        raise InvalidInput(f"{folder}: no {LOG} in it; give the folder of a run")
    with reading(folder) as log:
        return log.all_meta()


def _needed(log: LogReader) -> dict[str, _Needed]:
    """Return the frames that a log needs, by location."""
    rows = log.rows("SELECT location, id, digest FROM groups WHERE location != ''")
    return {location: _Needed(group, digest, parse_location(location)) for location, group, digest in rows}
