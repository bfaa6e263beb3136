"""Frames that are wanted no more: their space is given back once the log says so, and not before they are archived.

Where there is an archive, frames of trained and of evaluation groups wait for it. It says how far it has come by the
last step, and the last decision, of which it has everything.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from penstock.serve.decisions.log import GroupRow, State


@dataclass(frozen=True, slots=True)
class Archived:
    """How far an archive has come."""

    step: int = 0
    """It has all groups of the steps up to this one."""
    op: int = 0
    """It has all evaluation groups up to this decision."""


class GivenBack:
    """What the next transaction gives back, and what waits for the archive."""

    def __init__(self, archived: Archived | None = None, *, keeps_all: bool = False) -> None:
        """`archived`: how far the archive is; None: there is none, and nothing waits. `keeps_all`: nothing is freed."""
        self._archived, self._keeps_all = archived, keeps_all
        self.ops: list[int] = []
        """Groups to be given back with the next transaction."""
        self._locations: list[str] = []
        self._waiting: dict[int, tuple[GroupRow, int]] = {}
        """Group -> its row, and the last step that used it; longest waiting first."""
        self.waiting_bytes = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def all_ops(self) -> set[int]:
        return {*self.ops, *self._waiting}

    def add(self, row: GroupRow, *, step: int = 0) -> None:
        """A frame is not needed any longer. `step` is the last one that used it; 0: none did."""
        if self._keeps_all:
            return
        if row.location and self._is_awaited(row, step):
            self._waiting[row.op] = (row, step)
            self.waiting_bytes += row.size
        else:
            self._release(row)

    def is_behind(self, step: int) -> bool:
        """Whether a step is not archived yet, though it should be."""
        return self._archived is not None and step > self._archived.step

    def _is_awaited(self, row: GroupRow, step: int) -> bool:
        if row.state is State.EVALUATION:
            return self._archived is not None and row.op > self._archived.op
        return self.is_behind(step)

    def _release(self, row: GroupRow) -> None:
        self.ops.append(row.op)
        if row.location:
            self._locations.append(row.location)

    def follow(self, archived: Archived) -> None:
        """The archive has come so far."""
        self._archived = archived
        for op in [op for op, (row, step) in self._waiting.items() if not self._is_awaited(row, step)]:
            self._stop_waiting(op)

    def give_up(self, most_bytes: int) -> int:
        """The longest waiting wait no more, until the others take no more than so many bytes; how many that are."""
        before = len(self._waiting)
        while self.waiting_bytes > most_bytes:
            self._stop_waiting(next(iter(self._waiting)))
        return before - len(self._waiting)

    def _stop_waiting(self, op: int) -> None:
        row, _ = self._waiting.pop(op)
        self.waiting_bytes -= row.size
        self._release(row)

    def keep_differences(self, frames: Container[int]) -> None:
        """After a rebuild, forget again only what the log has not forgotten yet."""
        self.ops = [op for op in self.ops if op in frames]

    @property
    def locations(self) -> list[str]:
        """The frames that the next transaction frees."""
        return list(self._locations)

    def done(self) -> None:
        """The transaction went through."""
        self._locations, self.ops = [], []
