"""The right to delete in a storage: its run, its newest epoch, and a log that is not older than the storage.

The marker says which run the frames belong to, which epoch of its plane came last, and up to which transaction of
its log frames were deleted. It moves forward *before* every batch of deletions. So a log that lags behind the marker
is missing transactions, and a plane that cannot move the marker deletes nothing:

    epoch 3, commits 900   the log ends at 850: restored from a copy. Refused.
    epoch 4, commits 0     the log says epoch 3: the copy of an earlier life. Refused.
    another run id         the log is empty, or of another run. Refused.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from penstock.errors import Conflict, CorruptFile, Fenced
from penstock.storage.interface import Storage


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    run_id: str
    epoch: int
    commits: int
    """How many transactions its log had when something was last deleted."""
    run: str = ""
    """The run's name, for people."""

    def to_bytes(self) -> bytes:
        return msgspec.json.encode(self)


# Made at import: msgspec crashes when two threads are the first to decode a type.
_READ = msgspec.json.Decoder(Marker)


def read_marker(storage: Storage) -> Marker | None:
    """The marker of a storage; None when there is none."""
    return _decoded(storage, storage.marker())


def _decoded(storage: Storage, data: bytes | None) -> Marker | None:
    if data is None:
        return None
    try:
        return _READ.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptFile(
            f"{storage.url}/marker: {error}; restore it from a copy of the storage, or make a new "
            "one with `penstock storage recover`"
        ) from None


def check_log(storage: Storage, *, run_id: str, epoch: int, commits: int, held: int, is_new: bool) -> None:
    """Raise Conflict unless a log may go on with this storage as `epoch`. Changes nothing.

    `commits` is the number of the log's transactions, `held` the number of frames it needs; `is_new`: the log has just
    been made.
    """
    found = read_marker(storage)
    if found is None:
        there = storage.segments()
        if there:
            raise Conflict(
                f"{storage.url}: holds {len(there)} segments and no marker, so nobody can say whose they are; "
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
    if found.epoch >= epoch or found.commits > commits:
        raise Conflict(
            f"{storage.url}: was last used in epoch {found.epoch} up to transaction {found.commits}, and this log "
            f"ends before (epoch {epoch - 1}, transaction {commits}): it was restored from a copy, or another plane "
            "uses this storage; put the newest log back, or add what it lacks with `penstock storage recover`; "
            "nothing was deleted"
        )


class Custody:
    """A plane's hold on its storage."""

    def __init__(self, storage: Storage, *, run_id: str, run: str, epoch: int, commits: int) -> None:
        """Takes the storage over from earlier epochs; call `check_log` first. Raises Fenced if a later one has it."""
        self._storage = storage
        self._mine = Marker(run_id=run_id, epoch=epoch, commits=commits, run=run)
        self._move(commits)

    @property
    def marker(self) -> Marker:
        return self._mine

    def delete(self, names: Iterable[str], commits: int) -> None:
        """Delete what transactions up to `commits` freed. May take as long as storage does."""
        self._move(commits)
        self._storage.delete(names)

    def _move(self, commits: int) -> None:
        """Move the marker forward; raises Fenced where another plane took the storage."""
        old, mine = self._storage.marker(), self._mine
        found = _decoded(self._storage, old)
        if found is not None and (found.run_id != mine.run_id or found.epoch > mine.epoch):
            raise Fenced(
                f"{self._storage.url}: taken over by epoch {found.epoch} of run {found.run_id[:12]}; this plane is "
                f"epoch {mine.epoch} of run {mine.run_id[:12]} and deletes nothing"
            )
        new = msgspec.structs.replace(mine, commits=max(commits, mine.commits))
        if found == new:
            return
        if not self._storage.set_marker(new.to_bytes(), old):
            raise Fenced(f"{self._storage.url}: another plane moved the marker; this one deletes nothing")
        self._mine = new
