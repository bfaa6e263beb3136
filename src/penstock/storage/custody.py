"""The right to delete in a storage: only for its own run, in the newest epoch, with a log not older than the storage.

The marker records which run the frames belong to, the last epoch of its plane, and up to which transaction of its log
frames were deleted. It moves forward *before* every batch of deletions. So a log that is behind the marker has lost
transactions, and a plane that cannot move the marker deletes nothing:

    epoch 3, commits 900   the log ends at 850: restored from a copy. Refused.
    epoch 4, commits 0     the log says epoch 3: a copy from before the last start. Refused.
    another run id         the log is empty, or of another run. Refused.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from penstock.errors import Conflict, CorruptFile, Fenced
from penstock.storage.interface import Storage, Writable

_MOVES = 10
"""Attempts to move the marker. An earlier plane moves it once or twice before it notices that it was replaced."""


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    run_id: str
    epoch: int
    commits: int
    """Number of transactions in its log when something was last deleted."""
    run: str = ""
    """The run's name, for messages."""

    def to_bytes(self) -> bytes:
        return msgspec.json.encode(self)


# Made at import: msgspec crashes when two threads are the first to decode a type.
_READ = msgspec.json.Decoder(Marker)


def read_marker(storage: Writable) -> Marker | None:
    """Read the marker of a storage. Returns None if there is none."""
    return _decoded(storage, storage.marker())


def _decoded(storage: Writable, data: bytes | None) -> Marker | None:
    if data is None:
        return None
    try:
        return _READ.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptFile(
            f"{storage.url}/marker: {error}; restore it from a copy of the storage, or make a new "
            "one with `penstock storage recover`"
        ) from None


def check_log(storage: Storage, *, run_id: str, epoch: int, commits: int, held: int, is_new: bool) -> None:
    """Raise Conflict unless a log may use this storage in `epoch`. Changes nothing.

    `commits` is the log's number of transactions, `held` the number of frames it needs. `is_new` means that the log was
    just created.
    """
    found = read_marker(storage)
    if found is None:
        there = storage.segments()
        if there:
            raise Conflict(
                f"{storage.url}: holds {len(there)} segments and no marker, so it is unknown whose they are; "
                "restore the marker with its storage, make a new one with `penstock storage recover`, or use an empty "
                "folder; nothing was deleted"
            )
        if held:
            raise Conflict(
                f"{storage.url}: empty, and the log needs {held:,} frames there; mount the storage or put it back"
            )
        return
    whose = f"run {found.run!r} ({found.run_id[:12]})" if found.run else f"run {found.run_id[:12]}"
    if found.run_id != run_id and is_new:
        raise Conflict(
            f"{storage.url}: holds frames of {whose}, and the log is empty; put that run's log back, rebuild it with "
            "`penstock storage recover`, or use another storage; nothing was deleted"
        )
    if found.run_id != run_id:
        raise Conflict(
            f"{storage.url}: belongs to {whose}, and this log is of run {run_id[:12]}; use the storage of this run; "
            "nothing was deleted"
        )
    # `>=` for the epoch, which must be new; `>` for commits, since a log may be exactly where the marker is.
    if found.epoch >= epoch or found.commits > commits:
        raise Conflict(
            f"{storage.url}: was last used in epoch {found.epoch} up to transaction {found.commits}, and this log "
            f"ends before (epoch {epoch - 1}, transaction {commits}): it was restored from a copy, or another plane "
            "uses this storage; put the newest log back, or add what it lacks with `penstock storage recover`; "
            "nothing was deleted"
        )


class Custody:
    """A plane's right to delete in its storage."""

    def __init__(self, storage: Storage, *, run_id: str, run: str, epoch: int, commits: int) -> None:
        """Take the storage over from earlier epochs. Call `check_log` first. Raises Fenced if a later epoch has it."""
        self._storage = storage
        self._mine = Marker(run_id=run_id, epoch=epoch, commits=commits, run=run)
        self._move(commits)

    @property
    def marker(self) -> Marker:
        return self._mine

    def delete(self, names: Iterable[str], commits: int) -> None:
        """Delete what transactions up to `commits` freed. Slow: waits for the storage."""
        self._move(commits)
        self._storage.delete(names)

    def _move(self, commits: int) -> None:
        """Move the marker forward. Raises Fenced if another plane has taken the storage."""
        for _ in range(_MOVES):
            if self._moved(commits):
                return
        raise Fenced(f"{self._storage.url}: another plane keeps moving the marker; this one deletes nothing")

    def _moved(self, commits: int) -> bool:
        """Try to move the marker. Returns False if another plane was faster. That may be an earlier plane which begins
        a deletion before it notices that it was replaced, so one failure is no reason to give up."""
        old, mine = self._storage.marker(), self._mine
        found = _decoded(self._storage, old)
        if found is not None and (found.run_id != mine.run_id or found.epoch > mine.epoch):
            raise Fenced(
                f"{self._storage.url}: taken over by epoch {found.epoch} of run {found.run_id[:12]}; this plane is "
                f"epoch {mine.epoch} of run {mine.run_id[:12]} and deletes nothing"
            )
        new = msgspec.structs.replace(mine, commits=max(commits, mine.commits))
        if found == new:  # nothing was committed since: the marker covers this batch already
            return True
        # Compare and swap: between our read and this write another plane may have started.
        if not self._storage.set_marker(new.to_bytes(), old):
            return False
        self._mine = new
        return True
