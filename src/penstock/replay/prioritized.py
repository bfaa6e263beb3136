"""Selection in proportion to priority ** exponent: `Prioritized`.

Drawing one by one without replacement is the same as giving every item an exponential clock of rate w and taking the n
clocks that ring first. Given the time t at which the next, (n + 1)-th, clock rings, each drawn item was included with
probability 1 - exp(-w t), and sum(f / inclusion) is exactly unbiased (Cohen and Kaplan 2007, rank conditioning). This
costs one random number per batch and needs no approximation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from penstock.config import check
from penstock.replay.selector import Draw, Index, Role, joined
from penstock.replay.sumtree import SumTree
from penstock.replay.uniform import SlotSet

Floats = NDArray[np.float64]
Slots = NDArray[np.int64]

_SMALLEST = 1e-280
"""A positive priority keeps at least this weight, whatever the exponent does to it."""

_MAX_PROPOSALS = 6.0
"""Proposals per draw up to which proposing beats the tree (measured at a million items, batches of 64 and 512)."""

_LOWER_EVERY = 1024
"""Draws between two full scans for the largest weight: half a microsecond per draw at a million items."""

_ROUNDS = 3
"""Rounds of drawing and dropping repeats before the drawn weights are set to zero for the rest."""


@dataclass(frozen=True, slots=True)
class Prioritized:
    """Draws each item in proportion to priority ** exponent: 0 is uniform, 1 proportional.

    Items of priority zero are never drawn while others are left. If a batch needs more, the rest of it is filled
    uniformly from them and counted. As a remover it draws in proportion to priority ** -exponent: the least valuable go
    first. `MinPriority()` removes without chance.

    >>> from penstock.replay import Table, Uniform
    >>> table = Table(capacity=2, sampler=Prioritized(0.6), remover=Uniform(), max_times_sampled=None)
    >>> _ = table.insert("never", "a", priority=0.0), table.insert("always", "b", priority=3.0)
    >>> set(table.sample(100, replace=True).keys)
    {'always'}
    """

    # Up to 2, priorities up to MAX_PRIORITY = 1e100 have weights that sum without overflow.
    exponent: Annotated[float, Meta(ge=0, le=2, description="power of the priority; 0 is uniform")] = 1.0

    def __post_init__(self) -> None:
        check(self, "Prioritized")

    def build(self, capacity: int, role: Role) -> Index:
        return _TreeIndex(capacity, _Liking(self.exponent) if role == "sample" else _Disliking(self.exponent))


class _Liking:
    """priority ** exponent, but always 0 for priority 0 (although 0 ** 0 is 1), and only then."""

    def __init__(self, exponent: float) -> None:
        self._exponent = exponent

    def one(self, priority: float) -> float:
        if priority <= 0.0:
            return 0.0
        weight = priority**self._exponent
        return weight if weight > _SMALLEST else _SMALLEST

    def many(self, priorities: Floats) -> Floats:
        weights: Floats = priorities**self._exponent
        np.maximum(weights, _SMALLEST, out=weights)
        if np.count_nonzero(priorities) < len(priorities):
            weights[priorities == 0.0] = 0.0
        return weights


class _Disliking:
    """priority ** -exponent. Priority zero outweighs everything, so it goes first."""

    def __init__(self, exponent: float) -> None:
        self._exponent = exponent

    def one(self, priority: float) -> float:
        weight: float = max(priority, 1e-100) ** -self._exponent
        return weight

    def many(self, priorities: Floats) -> Floats:
        weights: Floats = np.maximum(priorities, 1e-100) ** -self._exponent
        return weights


class _TreeIndex:
    def __init__(self, capacity: int, weigh: _Liking | _Disliking) -> None:
        self._weigh = weigh
        self._capacity = capacity
        self._num_draws = 0
        self._tree = SumTree(capacity)
        self._zeros = SlotSet(capacity)  # live slots of weight zero; a dead slot's leaf is zero as well
        self._first_seen = np.zeros(capacity, dtype=np.int64)

    def insert(self, slot: int, priority: float, version: int) -> None:  # noqa: ARG002
        weight = self._weigh.one(priority)
        self._tree.set(slot, weight)
        if weight == 0.0:
            self._zeros.add(slot)

    def remove(self, slots: Sequence[int]) -> None:
        self._tree.clear(slots)
        if self._zeros.size:
            for slot in slots:
                if slot in self._zeros:
                    self._zeros.discard(slot)

    def update(self, slots: Slots, priorities: Floats) -> None:
        weights = self._weigh.many(priorities)
        self._tree.set_many(slots, weights)
        if self._zeros.size or np.count_nonzero(weights) < len(weights):
            self._sort_out_zeros(slots)

    def _sort_out_zeros(self, slots: Slots) -> None:
        for slot, weight in zip(slots.tolist(), self._tree.weights[slots].tolist(), strict=True):
            if (slot in self._zeros) != (weight == 0.0):
                (self._zeros.add if weight == 0.0 else self._zeros.discard)(slot)

    def victim(self, rng: np.random.Generator) -> int:
        return int(self.draw(1, rng, replace=True).slots[0])

    def draw(self, count: int, rng: np.random.Generator, *, replace: bool) -> Draw:
        self._num_draws += 1
        if self._num_draws % _LOWER_EVERY == 0:
            self._tree.lower_ceiling()
        total = self._tree.total()
        if total == 0.0:
            return self._draw_zeros(count, rng, replace=replace)
        if replace:
            slots, weights = self._stream(count, total, rng)
            weights /= total
            return Draw(slots, weights, weights * count)
        slots, weights, time = self._distinct(count, total, rng)
        draw = Draw(slots, weights / total, _inclusion_before(time, weights))
        missing = count - len(slots)
        return draw if missing == 0 else joined([draw, self._draw_zeros(missing, rng, replace=False)])

    def _stream(self, count: int, total: float, rng: np.random.Generator) -> tuple[Slots, Floats]:
        """Return independent draws and their weights, all positive.

        Where weights are similar, slots are proposed uniformly and accepted with probability weight / ceiling: the same
        distribution, in a fraction of the time. Where few slots hold most of the weight, the tree finds them.
        """
        # The expected number of proposals per accepted draw. A full table of 1,000 equal weights 0.5: 0.5 * 1,000 / 500
        # = 1, every proposal hits. One weight of 100 among ones: about 91, so the tree is faster.
        proposals = self._tree.ceiling * self._capacity / total
        if proposals <= _MAX_PROPOSALS:
            return self._propose(count, proposals, rng)
        targets = rng.random(count)
        targets *= total
        slots = self._tree.find(targets)
        weights = self._tree.weights.take(slots)
        while np.count_nonzero(weights) < count:  # rounding hit a neighbour of weight zero: one draw in about 2**50
            missed = np.flatnonzero(weights == 0.0)
            slots[missed] = self._tree.find(rng.random(len(missed)) * total)
            weights = self._tree.weights.take(slots)
        return slots, weights

    def _propose(self, count: int, proposals: float, rng: np.random.Generator) -> tuple[Slots, Floats]:
        found: list[tuple[Slots, Floats]] = []
        missing = count
        while missing > 0:
            length = int(1.1 * missing * proposals) + 16
            uniforms = rng.random(2 * length)
            # As uniform as the 53 bits of a float allow, like a draw by the tree. rng.integers takes twice as long.
            tried = (uniforms[:length] * self._capacity).astype(np.int64)
            weights = self._tree.weights.take(tried)
            chances = uniforms[length:] * self._tree.ceiling
            kept = (chances < weights).nonzero()[0][:missing]
            found.append((tried.take(kept), weights.take(kept)))
            missing -= len(kept)
        if len(found) == 1:
            return found[0]
        return np.concatenate([slots for slots, _ in found]), np.concatenate([weights for _, weights in found])

    def _distinct(self, count: int, total: float, rng: np.random.Generator) -> tuple[Slots, Floats, float]:
        """Return up to `count` distinct draws, their weights, and the time at which the next item would have come.

        Drawing one by one without replacement equals an independent stream whose repeats are dropped. As a stream of
        rate `total`, its m-th element arrives at Gamma(m) / total: the clock described above.
        """
        # A few more than needed, to replace repeats: 530 draws for a batch of 512.
        length = count + (count >> 5) + 3
        slots, weights = self._stream(length, total, rng)
        for attempt in range(_ROUNDS):
            first = self._first_occurrences(slots)
            if len(first) > count:
                kept = first[:count]
                return slots.take(kept), weights.take(kept), rng.standard_gamma(first[count] + 1) / total
            if attempt < _ROUNDS - 1:
                more_slots, more_weights = self._stream(2 * (count - len(first)) + 8, total, rng)
                slots, weights = np.concatenate([slots, more_slots]), np.concatenate([weights, more_weights])
        time = rng.standard_gamma(len(slots)) / total
        return self._exhaust(slots.take(first), weights.take(first), count, time, rng)

    def _exhaust(
        self, slots: Slots, weights: Floats, count: int, time: float, rng: np.random.Generator
    ) -> tuple[Slots, Floats, float]:
        """Continue `_distinct` where few items hold most weight. Sets drawn weights to zero meanwhile."""
        zeroed = 0
        try:
            while True:
                self._tree.set_many(slots[zeroed:], np.zeros(len(slots) - zeroed))
                zeroed = len(slots)
                total = self._tree.total()
                if total == 0.0:
                    return slots, weights, np.inf
                missing = count - len(slots)
                more, more_weights = self._stream(missing + 1, total, rng)
                first = self._first_occurrences(more)
                enough = len(first) > missing
                time += rng.standard_gamma(first[missing] + 1 if enough else len(more)) / total
                kept = first[:missing]
                slots = np.concatenate([slots, more.take(kept)])
                weights = np.concatenate([weights, more_weights.take(kept)])
                if enough:
                    return slots, weights, time
        finally:
            self._tree.set_many(slots, weights)

    def _first_occurrences(self, slots: Slots) -> Slots:
        """Return the positions at which a slot appears for the first time, in order."""
        # Without a sort: np.unique takes three times as long.
        order = np.arange(len(slots))
        # Slots 7 4 7: assigned backwards, _first_seen[7] is first 2, then 0. Position 2 is not 0, so it is a repeat.
        self._first_seen[slots[::-1]] = order[::-1]
        return np.flatnonzero(self._first_seen.take(slots) == order)

    def _draw_zeros(self, count: int, rng: np.random.Generator, *, replace: bool) -> Draw:
        """Draw uniformly from the slots of weight zero, because no others are left."""
        size = self._zeros.size
        slots = self._zeros.draw(count, rng, replace=replace)
        return Draw(slots, np.full(count, 1.0 / size), np.full(count, count / size), num_filled=count)

    def state(self) -> dict[str, NDArray[Any]]:
        self._tree.total()
        slots = np.flatnonzero(self._tree.weights)
        return {
            "slots": slots,
            "weights": self._tree.weights[slots],
            "zeros": self._zeros.members().copy(),
            "ceiling": np.array([self._tree.ceiling]),
            "num_draws": np.array([self._num_draws], dtype=np.int64),
        }

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        self._tree.set_many(state["slots"].astype(np.int64), state["weights"])
        self._tree.ceiling = float(state["ceiling"][0])
        self._zeros.extend(state["zeros"])
        self._num_draws = int(state["num_draws"][0])


def _inclusion_before(time: float, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the probability that a clock of each rate rings before `time` (infinite: every clock has)."""
    if time == np.inf:
        return np.ones(len(weights))
    inclusion: NDArray[np.float64] = -np.expm1(weights * -time)
    return inclusion
