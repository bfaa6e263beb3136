"""Frames that nothing needs any longer: the log forgets them first, then storage deletes them."""

from __future__ import annotations

from collections.abc import Container

from penstock.log import GroupRow


class Freeing:
    """What the next transaction makes the log forget."""

    def __init__(self, *, keeps_all: bool = False) -> None:
        """`keeps_all`: nothing is ever freed (`retain="all"`)."""
        self._keeps_all = keeps_all
        self.ops: list[int] = []
        """Groups whose frame and metadata the next transaction forgets."""
        self._locations: list[str] = []

    def add(self, row: GroupRow) -> None:
        """Nothing needs this frame any longer."""
        if self._keeps_all:
            return
        self.ops.append(row.op)
        if row.location:
            self._locations.append(row.location)

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
