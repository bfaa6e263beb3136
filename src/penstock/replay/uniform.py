"""Selection with equal chances: `Uniform` from all items, `Freshest` from those of the newest policy versions."""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from penstock.config import check
from penstock.replay.selector import Draw, Index, Role, joined


@dataclass(frozen=True, slots=True)
class Uniform:
    """Draws every item with the same probability, for sampling and for removal."""

    def build(self, capacity: int, role: Role) -> Index:  # noqa: ARG002
        return _UniformIndex(capacity)


class SlotSet:
    """A set of slots stored without gaps, so that a uniform draw is one lookup.

    The last slot takes the place of one that leaves: removing 3 from [5, 3, 8, 6] gives [5, 6, 8]. So the layout
    depends on history and must be saved with the state.
    """

    def __init__(self, capacity: int) -> None:
        self.size = 0
        self._slots = array("q", bytes(8 * capacity))
        self._view = np.frombuffer(self._slots, dtype=np.int64)
        self._place = [-1] * capacity

    def __contains__(self, slot: int) -> bool:
        return self._place[slot] >= 0

    def add(self, slot: int) -> None:
        self._slots[self.size] = slot
        self._place[slot] = self.size
        self.size += 1

    def discard(self, slot: int) -> None:
        self.size -= 1
        last = self._slots[self.size]
        place = self._place[slot]
        self._slots[place] = last
        self._place[last] = place
        self._place[slot] = -1

    def members(self) -> NDArray[np.int64]:
        """Return a view. Copy it before the set changes."""
        return self._view[: self.size]

    def extend(self, slots: NDArray[np.int64]) -> None:
        """Fill an empty set in the given layout."""
        for slot in slots.tolist():
            self.add(slot)

    def draw(self, count: int, rng: np.random.Generator, *, replace: bool) -> NDArray[np.int64]:
        if replace:
            return self._view.take(rng.integers(0, self.size, count))
        return self._view.take(rng.choice(self.size, count, replace=False))


class _UniformIndex:
    def __init__(self, capacity: int) -> None:
        self._live = SlotSet(capacity)

    def insert(self, slot: int, priority: float, version: int) -> None:  # noqa: ARG002
        self._live.add(slot)

    def remove(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._live.discard(slot)

    def update(self, slots: NDArray[np.int64], priorities: NDArray[np.float64]) -> None:
        pass

    def draw(self, count: int, rng: np.random.Generator, *, replace: bool) -> Draw:
        slots = self._live.draw(count, rng, replace=replace)
        size = self._live.size
        return Draw(slots, np.full(count, 1.0 / size), np.full(count, count / size))

    def victim(self, rng: np.random.Generator) -> int:
        return int(self._live.members()[rng.integers(0, self._live.size)])

    def state(self) -> dict[str, NDArray[Any]]:
        return {"live": self._live.members().copy()}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        self._live.extend(state["live"])


@dataclass(frozen=True, slots=True)
class Freshest:
    """Draws uniformly from the items of the newest policy versions.

    The window holds the newest version in the table and `window` versions before it. A batch larger than the window
    takes all of it and continues with older versions, newest first; those items are counted as filled. As a remover it
    removes an item of the oldest version.

    >>> from penstock.replay import Table
    >>> table = Table(capacity=4, sampler=Freshest())
    >>> for version in (1, 3, 2):
    ...     _ = table.insert(version, f"from version {version}", policy_version=version)
    >>> table.sample(2).keys.tolist()
    [3, 2]
    """

    window: Annotated[int, Meta(ge=0, description="how many versions behind the newest are as good as the newest")] = 0

    def __post_init__(self) -> None:
        check(self, "Freshest")

    def build(self, capacity: int, role: Role) -> Index:  # noqa: ARG002
        return _VersionIndex(capacity, self.window)


class _VersionIndex:
    """One bucket of slots per version, each without gaps, so that drawing from a version is a lookup."""

    def __init__(self, capacity: int, window: int) -> None:
        self._window = window
        self._versions: list[int] = []  # ascending; those with a bucket
        self._buckets: dict[int, list[int]] = {}
        self._version_of = array("q", bytes(8 * capacity))
        self._place = array("q", bytes(8 * capacity))

    def insert(self, slot: int, priority: float, version: int) -> None:  # noqa: ARG002
        bucket = self._buckets.get(version)
        if bucket is None:
            bucket = self._buckets[version] = []
            insort(self._versions, version)
        self._version_of[slot] = version
        self._place[slot] = len(bucket)
        bucket.append(slot)

    def remove(self, slots: Sequence[int]) -> None:
        for slot in slots:
            version = self._version_of[slot]
            bucket = self._buckets[version]
            last, place = bucket.pop(), self._place[slot]
            if last != slot:
                bucket[place] = last
                self._place[last] = place
            if not bucket:
                del self._buckets[version]
                self._versions.remove(version)

    def update(self, slots: NDArray[np.int64], priorities: NDArray[np.float64]) -> None:
        pass

    def draw(self, count: int, rng: np.random.Generator, *, replace: bool) -> Draw:
        newest = self._versions[-1]
        inside = [v for v in reversed(self._versions[-self._window - 1 :]) if v >= newest - self._window]
        size = sum(len(self._buckets[version]) for version in inside)
        num_inside = count if replace else min(count, size)
        parts = [self._draw_from(inside, size, num_inside, rng, replace=replace)]
        missing = count - num_inside
        for version in reversed(self._versions[: len(self._versions) - len(inside)]):
            if missing == 0:
                break
            size = len(self._buckets[version])
            taken = min(missing, size)
            parts.append(self._draw_from([version], size, taken, rng, replace=False))
            missing -= taken
        return joined(parts)._replace(num_filled=count - num_inside)

    def _draw_from(
        self, versions: Sequence[int], size: int, count: int, rng: np.random.Generator, *, replace: bool
    ) -> Draw:
        """Draw uniformly from the buckets of `versions` laid end to end, `size` slots in total."""
        places = rng.integers(0, size, count) if replace else rng.choice(size, count, replace=False)
        slots = np.empty(count, dtype=np.int64)
        start = 0
        for version in versions:
            bucket = self._buckets[version]
            here = np.flatnonzero((places >= start) & (places < start + len(bucket)))
            slots[here] = [bucket[place] for place in (places[here] - start).tolist()]
            start += len(bucket)
        return Draw(slots, np.full(count, 1.0 / size), np.full(count, count / size))

    def victim(self, rng: np.random.Generator) -> int:
        bucket = self._buckets[self._versions[0]]
        return bucket[int(rng.integers(0, len(bucket)))]

    def state(self) -> dict[str, NDArray[Any]]:
        buckets = [self._buckets[version] for version in self._versions]
        return {
            "versions": np.array(self._versions, dtype=np.int64),
            "sizes": np.array([len(bucket) for bucket in buckets], dtype=np.int64),
            "slots": np.array([slot for bucket in buckets for slot in bucket], dtype=np.int64),
        }

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        slots = iter(state["slots"].tolist())
        for version, size in zip(state["versions"].tolist(), state["sizes"].tolist(), strict=True):
            for _ in range(size):
                self.insert(next(slots), 0.0, version)
