"""Frames that nothing needs any longer, until log and storage have forgotten them."""

from __future__ import annotations

from collections.abc import Container

from penstock.log import GroupRow


class Freeing:
    """Frames that nothing needs any longer: the next transaction makes the log forget them, then storage deletes
    them."""

    def __init__(self, *, keeps_all: bool = False) -> None:
        """`keeps_all`: free nothing (`retain="all"`)."""
        self._keeps_all = keeps_all
        self.ops: list[int] = []
        """Groups whose frame and metadata the log is about to forget."""
        self._locations: list[str] = []

    def add(self, row: GroupRow) -> None:
        """Free the frame of a group."""
        if self._keeps_all:
            return
        self.ops.append(row.op)
        if row.location:
            self._locations.append(row.location)

    def supersede(self, location: str) -> None:
        """Free a frame whose group has another one. Call it inside the transaction that says so."""
        self._locations.append(location)

    def keep(self, location: str) -> None:
        """Undo `supersede`, after the transaction failed."""
        if location in self._locations:
            self._locations.remove(location)

    def keep_differences(self, frames: Container[int]) -> None:
        """After a rebuild, keep only groups that the log has not forgotten yet."""
        self.ops = [op for op in self.ops if op in frames]

    @property
    def locations(self) -> list[str]:
        """Frames that the next transaction frees."""
        return list(self._locations)

    def done(self) -> None:
        """Note that the transaction was committed."""
        self._locations, self.ops = [], []
