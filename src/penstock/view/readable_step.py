"""What every step that can be looked at has, whether its ranks exported it or it is read from the plane's frames."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

from penstock.view.folders import Done
from penstock.view.record import Record, Skipped

ReadLine: TypeAlias = Callable[[], bytes]
"""Reads a record's line of strict JSON again."""


class Step(ABC):
    """A readable step."""

    __slots__ = ()

    @property
    @abstractmethod
    def number(self) -> int: ...

    @property
    @abstractmethod
    def run(self) -> str: ...

    @property
    @abstractmethod
    def path(self) -> Path: ...

    @property
    @abstractmethod
    def stamp(self) -> int:
        """Changes when the step is written again."""

    @abstractmethod
    def lines(self, skipped: Skipped) -> Iterator[tuple[ReadLine, Record]]:
        """Yield all records, each with a function that reads its line again."""

    def records(self, skipped: Skipped | None = None) -> Iterator[Record]:
        """Yield all records."""
        return (record for _, record in self.lines(skipped or Skipped()))

    def done(self) -> dict[int, Done]:
        """Return the ranks' markers, of the attempt that finished. Empty if no rank wrote the step."""
        return {}

    def files(self) -> dict[int, Path]:
        """Return the ranks' files. Empty if no rank wrote the step."""
        return {}

    def altered(self) -> list[str]:
        """List files that are not what their rank wrote, or are gone. Frames have checksums of their own."""
        return []
