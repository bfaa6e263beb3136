"""Which records of a step are kept: all, every n-th, the first n, or the n worst by mismatch KL.

A rule is a frozen object. `start` returns its state for one step of one rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from penstock.errors import ConfigError
from penstock.view.record import Record


class Choice:
    """The state of a rule during one step. This one keeps the first of every `k` records, at most `limit` in all."""

    def __init__(self, k: int = 1, limit: int | None = None) -> None:
        self._k, self._limit, self._seen = k, limit, 0

    def offer(self, record: Record) -> bool:  # noqa: ARG002 - other rules look at it
        """Return whether to write the record now."""
        index, self._seen = self._seen, self._seen + 1
        return index % self._k == 0 and (self._limit is None or index // self._k < self._limit)

    def finish(self) -> Iterator[Record]:
        """Return the records to write at the end of the step."""
        return iter(())


class Keep(Protocol):
    """A rule for keeping records."""

    def start(self) -> Choice: ...


@dataclass(frozen=True, slots=True)
class Everything:
    """Keep every record."""

    def start(self) -> Choice:
        return Choice()


@dataclass(frozen=True, slots=True)
class _Counted:
    n: int

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ConfigError(f"{type(self).__name__}({self.n}): must be at least 1")


class EveryKth(_Counted):
    """Keep the first record of a step and every n-th after it."""

    def start(self) -> Choice:
        return Choice(k=self.n)


class First(_Counted):
    """Keep the first n records of a step."""

    def start(self) -> Choice:
        return Choice(limit=self.n)


class Worst(_Counted):
    """Keep the n records with the largest mismatch KL on a trained token, the earlier ones on a tie.

    They are held in memory until the step ends, so n bounds the memory.
    """

    def start(self) -> Choice:
        return _Worst(self.n)


class _Worst(Choice):
    def __init__(self, n: int) -> None:
        super().__init__()
        self._n = n
        self._heap: list[tuple[float, int, Record]] = []

    def offer(self, record: Record) -> bool:
        # The number breaks ties, so two records are never compared.
        entry = (record.worst_kl, -self._seen, record)
        self._seen += 1
        if len(self._heap) < self._n:
            heapq.heappush(self._heap, entry)
        else:
            heapq.heappushpop(self._heap, entry)
        return False

    def finish(self) -> Iterator[Record]:
        return (record for _, _, record in sorted(self._heap, key=lambda entry: -entry[1]))
