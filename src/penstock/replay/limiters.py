"""Limiters hold back inserts or samples so that generation and training keep pace.

A limiter is a frozen rule over three numbers that the table counts: items inserted, items sampled, items held. It has
no state, so nothing has to be saved or can get out of step. When the table is built, `check` rejects settings under
which both sides would end up waiting for each other. `Paced` holds back neither: it bounds how many prompts are handed
out (`lease_room`).

`SamplesPerInsert` compares the balance `inserted * ratio - sampled` with two bounds around `ratio * min_size`. With
ratio 2, min_size 4 and error_buffer 4 the bounds are 8 - 4 = 4 and 8 + 4 = 12:

    inserted 4, sampled 0    balance 8     an insert (10) and a sample of 4 (4) may proceed
    inserted 6, sampled 0    balance 12    inserts wait (14 > 12) until something is sampled
    inserted 6, sampled 8    balance 4     samples wait (3 < 4) until something is inserted
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Protocol, runtime_checkable

from msgspec import Meta

from penstock.config import check
from penstock.errors import ConfigError

_ROUNDING = 1e-6
"""Slack in comparisons with the bounds, so that a ratio such as 0.1 cannot block both sides by rounding."""


@runtime_checkable
class Limiter(Protocol):
    """When an insert or a sample may proceed."""

    @property
    def min_size(self) -> int:
        """Items that must be held before anything is sampled."""

    @property
    def max_batch(self) -> int | None:
        """The largest batch that this rule can ever allow; None: any."""

    def check(self, *, capacity: int, max_times_sampled: int | None, evicts: bool) -> None:
        """Raise ConfigError for a table in which this rule would block both sides.

        `evicts`: a full table makes room by itself (it has a remover).
        """

    def may_insert(self, inserted: int, sampled: int, held: int) -> bool:
        """Return whether one more item may be inserted."""

    def may_sample(self, count: int, inserted: int, sampled: int, held: int) -> bool:
        """Return whether `count` items may be sampled in one batch."""

    def lease_room(self, *, version: int, groups_per_step: float, accepted: int, running: int) -> int | None:
        """Return how many more prompts may be handed out now; None: any number.

        `version`: weight updates since the run began. `groups_per_step`: groups that a step takes, on average.
        `accepted`: groups that were put and are trained, or may be. `running`: prompts handed out and not put yet.
        """


class _Rule:
    """Holds nothing back. A limiter overrides what it limits."""

    __slots__ = ()

    @property
    def max_batch(self) -> int | None:
        return None

    def may_insert(self, inserted: int, sampled: int, held: int) -> bool:  # noqa: ARG002
        return True

    def may_sample(self, count: int, inserted: int, sampled: int, held: int) -> bool:  # noqa: ARG002
        return held >= 1

    def lease_room(self, *, version: int, groups_per_step: float, accepted: int, running: int) -> int | None:  # noqa: ARG002
        return None


@dataclass(frozen=True, slots=True)
class MinSize(_Rule):
    """Sampling waits until `min_size` items are held. Inserts never wait for sampling."""

    min_size: Annotated[int, Meta(ge=1, description="items that must be held before anything is sampled")] = 1

    def __post_init__(self) -> None:
        check(self, "MinSize")

    def check(self, *, capacity: int, max_times_sampled: int | None, evicts: bool) -> None:  # noqa: ARG002
        _check_min_size(self, capacity)

    def may_sample(self, count: int, inserted: int, sampled: int, held: int) -> bool:  # noqa: ARG002
        return held >= self.min_size


@dataclass(frozen=True, slots=True)
class Queue(_Rule):
    """At most `size` items wait. A further insert waits until one has left."""

    size: Annotated[int, Meta(ge=1, description="items that may wait")]

    def __post_init__(self) -> None:
        check(self, "Queue")

    @property
    def min_size(self) -> int:
        return 1

    @property
    def max_batch(self) -> int | None:
        return self.size

    def check(self, *, capacity: int, max_times_sampled: int | None, evicts: bool) -> None:  # noqa: ARG002
        if not 1 <= self.size <= capacity:
            raise ConfigError(f"Queue: size {self.size} with capacity {capacity}; give 1 to capacity")
        if max_times_sampled is None:
            raise ConfigError(
                f"Queue({self.size}): max_times_sampled is None, so items never leave and inserts would wait "
                "for ever; give the number of uses"
            )

    def may_insert(self, inserted: int, sampled: int, held: int) -> bool:  # noqa: ARG002
        return held < self.size


@dataclass(frozen=True, slots=True)
class SamplesPerInsert(_Rule):
    """Each item is sampled `ratio` times on average; the side that runs ahead waits.

    The balance is `inserted * ratio - sampled`. It may deviate from `ratio * min_size` by `error_buffer` in both
    directions: above, inserts wait; below, samples wait. While fewer than `min_size` items are held inserts always
    pass, because nothing else could end the wait.

    >>> rule = SamplesPerInsert(ratio=2.0, min_size=4, error_buffer=4.0, batch_size=4)
    >>> rule.may_insert(inserted=6, sampled=0, held=6)   # 7 * 2 - 0 = 14, over 8 + 4
    False
    """

    ratio: Annotated[float, Meta(gt=0, description="samples per insert to aim at")]
    min_size: Annotated[int, Meta(ge=1, description="items that must be held before anything is sampled")]
    error_buffer: Annotated[float, Meta(gt=0, description="how far the balance may stray, in samples")]
    batch_size: Annotated[
        int, Meta(ge=1, description="the largest batch that will be asked for; a batch is taken in one piece or not")
    ] = 1

    def __post_init__(self) -> None:
        check(self, "SamplesPerInsert")
        # A batch and one insert must fit between the bounds, or there is a balance at which neither may proceed:
        # with ratio 1, min_size 4, buffer 1 and batch 4 the bounds are 3 and 5, and at balance 5 both would wait.
        needed = max(1.0, self.ratio, (self.batch_size + self.ratio) / 2)
        if self.error_buffer < needed:
            raise ConfigError(
                f"SamplesPerInsert: error_buffer {self.error_buffer} with ratio {self.ratio} and batch_size "
                f"{self.batch_size}; give at least {needed}, or both sides would wait for each other"
            )

    @property
    def max_batch(self) -> int | None:
        return self.batch_size

    def check(self, *, capacity: int, max_times_sampled: int | None, evicts: bool) -> None:
        _check_min_size(self, capacity)
        if self.batch_size > capacity:
            raise ConfigError(
                f"SamplesPerInsert: batch_size {self.batch_size} with capacity {capacity}; such a "
                "batch can never be filled"
            )
        if self.min_size < self.batch_size:
            raise ConfigError(
                f"SamplesPerInsert: min_size {self.min_size} below batch_size {self.batch_size}; a table that "
                "holds fewer items than a batch must still let inserts pass"
            )
        self._check_uses(capacity, max_times_sampled, evicts)

    def _check_uses(self, capacity: int, uses: int | None, evicts: bool) -> None:
        if uses is None:
            return
        if self.ratio > uses:
            raise ConfigError(
                f"SamplesPerInsert: ratio {self.ratio} above max_times_sampled {uses}; items leave before "
                "they are sampled that often"
            )
        if evicts:
            return
        if self.ratio < uses:
            raise ConfigError(
                f"SamplesPerInsert: ratio {self.ratio} below max_times_sampled {uses} without a remover; the "
                "table would fill and stop; give a remover or make the two equal"
            )
        # A full table has at least one use left per item, so the balance is at least the capacity.
        lower = self.ratio * self.min_size - self.error_buffer
        if capacity - self.batch_size < lower:
            raise ConfigError(
                f"SamplesPerInsert: a full table of {capacity} may still be held back (lower bound "
                f"{lower}, batch_size {self.batch_size}) and has no remover; give a larger error_buffer or "
                "capacity"
            )

    def may_insert(self, inserted: int, sampled: int, held: int) -> bool:
        if held < self.min_size:
            return True
        upper = self.ratio * self.min_size + self.error_buffer
        return (inserted + 1) * self.ratio - sampled <= upper + _ROUNDING

    def may_sample(self, count: int, inserted: int, sampled: int, held: int) -> bool:
        if held < self.min_size:
            return False
        lower = self.ratio * self.min_size - self.error_buffer
        return inserted * self.ratio - sampled - count >= lower - _ROUNDING


MAX_ROOM = 1 << 53
"""Bound on `Paced.lease_room`: more prompts than any run hands out, and exact as a float."""


@dataclass(frozen=True, slots=True)
class Paced(_Rule):
    """Prompts are handed out only while what they generate can still be trained within `max_staleness`.

    Puts and samples never wait for it: it counts prompts handed out as tasks. After `v` weight updates, what begins now
    must be trained by step `v + max_staleness + 1`. So the groups of that many steps may have begun in total:

    >>> Paced(max_staleness=1).lease_room(version=3, groups_per_step=8, accepted=30, running=6)   # (1 + 3 + 1) * 8 - 36
    4
    """

    max_staleness: Annotated[
        int, Meta(ge=0, le=1 << 20, description="weight updates that may happen until a group is trained")
    ]

    def __post_init__(self) -> None:
        check(self, "Paced")

    @property
    def min_size(self) -> int:
        return 1

    def check(self, *, capacity: int, max_times_sampled: int | None, evicts: bool) -> None:  # noqa: ARG002
        if max_times_sampled != 1:
            raise ConfigError(
                f"Paced: max_times_sampled {max_times_sampled}; it counts every group as trained once; give 1, or "
                "another limiter (SamplesPerInsert paces replay)"
            )

    def lease_room(self, *, version: int, groups_per_step: float, accepted: int, running: int) -> int | None:
        usable = (self.max_staleness + version + 1) * groups_per_step
        return max(0, int(min(usable, MAX_ROOM)) - accepted - running)


def passes_inserts(limiter: Limiter) -> bool:
    """Return whether a limiter lets every insert pass. Then it need not be asked."""
    return getattr(type(limiter), "may_insert", None) is _Rule.may_insert


def _check_min_size(limiter: MinSize | SamplesPerInsert, capacity: int) -> None:
    if not 1 <= limiter.min_size <= capacity:
        raise ConfigError(
            f"{type(limiter).__name__}: min_size {limiter.min_size} with capacity {capacity}; give 1 to "
            "capacity, or nothing is ever sampled"
        )
