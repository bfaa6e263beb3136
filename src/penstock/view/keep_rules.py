"""Which records of a step are kept: all, every k-th, the first n, or the n worst by mismatch KL.

A rule is a frozen object. `start` returns its state for one step of one rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from penstock.errors import ConfigError
from penstock.view.record import Record


class Choice(Protocol):
    """The state of a rule during one step."""

    def offer(self, record: Record) -> bool:
        """Return whether to write the record now."""

    def finish(self) -> Iterator[Record]:
        """Return the records to write at the end of the step."""


class Keep(Protocol):
    """A rule for keeping records."""

    def start(self) -> Choice: ...


@dataclass(frozen=True, slots=True)
class Everything:
    """Keep every record."""

    def start(self) -> Choice:
        return _Nth(1, None)


@dataclass(frozen=True, slots=True)
class EveryKth:
    """Keep the first record of a step and every k-th after it."""

    k: int

    def __post_init__(self) -> None:
        _check("k", self.k)

    def start(self) -> Choice:
        return _Nth(self.k, None)


@dataclass(frozen=True, slots=True)
class First:
    """Keep the first n records of a step."""

    n: int

    def __post_init__(self) -> None:
        _check("n", self.n)

    def start(self) -> Choice:
        return _Nth(1, self.n)


@dataclass(frozen=True, slots=True)
class Worst:
    """Keep the n records with the largest mismatch KL on a trained token, the earlier ones on a tie.

    They are held in memory until the step ends, so n bounds the memory.
    """

    n: int

    def __post_init__(self) -> None:
        _check("n", self.n)

    def start(self) -> Choice:
        return _Worst(self.n)


def _check(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name}: {value}; must be at least 1")


class _Nth:
    def __init__(self, k: int, limit: int | None) -> None:
        self._k, self._limit, self._seen = k, limit, 0

    def offer(self, record: Record) -> bool:  # noqa: ARG002 - the protocol's
        index, self._seen = self._seen, self._seen + 1
        return index % self._k == 0 and (self._limit is None or index // self._k < self._limit)

    def finish(self) -> Iterator[Record]:
        return iter(())


class _Worst:
    def __init__(self, n: int) -> None:
        self._n, self._seen = n, 0
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
