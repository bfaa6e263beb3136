"""Selection by policy version, newest first: `Freshest`."""

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
