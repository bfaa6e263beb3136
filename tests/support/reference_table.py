"""A replay table as a plain list, short enough to check by eye: `penstock.replay.Table` must agree with it.

The model makes no choices. It gets what the table chose (which keys were sampled, which were evicted), checks that this
was allowed, and does the same to its list. Where a selector leaves nothing to chance, exactly one choice is allowed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.replay import (
    Fifo,
    Freshest,
    Key,
    Lifo,
    MaxPriority,
    MinPriority,
    MinSize,
    Prioritized,
    Queue,
    Reason,
    SamplesPerInsert,
    Settings,
    Uniform,
)


@dataclass(slots=True, kw_only=True)
class Held:
    key: Key
    item: object
    priority: float
    version: int
    num_bytes: int
    num_tokens: int
    arrival: int
    times: int = 0


class ReferenceTable:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.held: list[Held] = []  # in order of arrival
        self.version = 0
        self.inserted = 0
        self.sampled = 0
        self.refused_stale = 0
        self.evicted: Counter[Reason] = Counter()
        self.evicted_unsampled = 0
        self._in_this_pass: set[int] = set()  # arrivals the Fifo sampler has returned since it last started over

    def find(self, key: Key) -> Held | None:
        return next((held for held in self.held if held.key == key), None)

    # -- what may happen ---------------------------------------------------------------------------------------

    def is_stale(self, version: int) -> bool:
        limit = self.settings.max_staleness
        return limit is not None and self.version - version > limit

    def may_insert(self, key: Key, num_bytes: int, num_tokens: int) -> bool:
        others = [held for held in self.held if held.key != key]
        if not self._limiter_lets_insert(len(others)):
            return False
        return self.settings.remover is not None or self._fit(others, num_bytes, num_tokens)

    def _fit(self, others: Sequence[Held], num_bytes: int, num_tokens: int) -> bool:
        settings = self.settings
        most_bytes = float("inf") if settings.capacity_bytes is None else settings.capacity_bytes
        most_tokens = float("inf") if settings.capacity_tokens is None else settings.capacity_tokens
        return (
            len(others) + 1 <= settings.capacity
            and sum(held.num_bytes for held in others) + num_bytes <= most_bytes
            and sum(held.num_tokens for held in others) + num_tokens <= most_tokens
        )

    def _limiter_lets_insert(self, num_held: int) -> bool:
        match self.settings.limiter:
            case MinSize():
                return True
            case Queue(size=size):
                return num_held < size
            case SamplesPerInsert(ratio=ratio, min_size=least, error_buffer=buffer):
                balance = (self.inserted + 1) * ratio - self.sampled
                return num_held < least or balance <= least * ratio + buffer + 1e-6
            case other:
                raise AssertionError(f"the model knows no {other!r}")

    def may_sample(self, count: int, *, replace: bool) -> bool:
        if len(self.held) < (1 if replace else count):
            return False
        match self.settings.limiter:
            case MinSize(min_size=least):
                return len(self.held) >= least
            case Queue():
                return True
            case SamplesPerInsert(ratio=ratio, min_size=least, error_buffer=buffer):
                balance = self.inserted * ratio - self.sampled - count
                return len(self.held) >= least and balance >= least * ratio - buffer - 1e-6
            case other:
                raise AssertionError(f"the model knows no {other!r}")

    # -- what happened -----------------------------------------------------------------------------------------

    def insert(self, new: Held, victims: Sequence[Key]) -> None:
        """Check and repeat an insert of `new` that evicted `victims`, in this order."""
        old = self.find(new.key)
        if old is not None:
            self._drop(old, "replaced")
        for key in victims:
            assert not self._fit(self.held, new.num_bytes, new.num_tokens), f"{key!r} need not have gone"
            victim = self.find(key)
            assert victim in self._allowed_victims(), f"{key!r} was not the one to go"
            self._drop(victim, "overflow")
        assert self._fit(self.held, new.num_bytes, new.num_tokens), "over capacity"
        self.inserted += 1
        new.arrival = self.inserted
        self.held.append(new)

    def sample(self, keys: Sequence[Key], *, replace: bool) -> None:
        """Check and repeat a sampling of `keys`, in this order."""
        chosen = [self.find(key) for key in keys]
        found = [held for held in chosen if held is not None]
        assert len(found) == len(keys), "sampled what is not held"
        assert replace or len(set(keys)) == len(keys), "sampled twice"
        assert not any(self.is_stale(held.version) for held in found), "sampled a stale item"
        self._check_choice(found, replace=replace)
        self.sampled += len(found)
        for held in found:
            held.times += 1
        limit = self.settings.max_times_sampled
        for held in found:
            if limit is not None and held.times >= limit:
                self._drop(held, "sampled_out")

    def advance(self, version: int) -> None:
        self.version = version
        for held in [held for held in self.held if self.is_stale(held.version)]:
            self._drop(held, "stale")

    def remove(self, keys: Sequence[Key], reason: Reason) -> None:
        for held in [held for held in self.held if held.key in set(keys)]:
            self._drop(held, reason)

    def _drop(self, held: Held | None, reason: Reason) -> None:
        assert held is not None
        self.held.remove(held)
        self.evicted[reason] += 1
        self.evicted_unsampled += held.times == 0

    # -- what was allowed --------------------------------------------------------------------------------------

    def _allowed_victims(self) -> list[Held]:
        held = self.held
        match self.settings.remover:
            case Fifo():
                return held[:1]
            case Lifo():
                return held[-1:]
            case Uniform():
                return held
            case Prioritized(exponent=exponent):
                worthless = [one for one in held if one.priority == 0.0]
                return worthless if worthless and exponent > 0.1 else held
            case MinPriority():
                return [min(held, key=lambda one: (one.priority, one.arrival))]
            case MaxPriority():
                return [min(held, key=lambda one: (-one.priority, one.arrival))]
            case Freshest():
                oldest = min(one.version for one in held)
                return [one for one in held if one.version == oldest]
            case other:
                raise AssertionError(f"the model knows no {other!r}")

    def _check_choice(self, found: Sequence[Held], *, replace: bool) -> None:
        match self.settings.sampler:
            case Uniform():
                pass
            case Prioritized():
                self._check_preferred(found, [one for one in self.held if one.priority > 0.0], replace=replace)
            case Freshest(window=window):
                newest = max(one.version for one in self.held)
                inside = [one for one in self.held if one.version >= newest - window]
                self._check_preferred(found, inside, replace=replace)
                rest = [one.version for one in found if one not in inside]
                outside = sorted((one.version for one in self.held if one not in inside), reverse=True)
                assert rest == outside[: len(rest)], "older versions before newer ones"
            case _:
                assert list(found) == self._only_choice(len(found)), "not in order"

    def _check_preferred(self, found: Sequence[Held], preferred: Sequence[Held], *, replace: bool) -> None:
        """Check that others were drawn only after all preferred ones, or if there are none."""
        num_preferred = sum(one in preferred for one in found)
        if replace:
            assert num_preferred == (len(found) if preferred else 0)
        else:
            assert num_preferred == min(len(found), len(preferred))

    def _only_choice(self, count: int) -> list[Held]:
        match self.settings.sampler:
            case Fifo():
                return [self._next_in_pass() for _ in range(count)]
            case Lifo():
                order = self.held[::-1]
            case MinPriority():
                order = sorted(self.held, key=lambda one: (one.priority, one.arrival))
            case MaxPriority():
                order = sorted(self.held, key=lambda one: (-one.priority, one.arrival))
            case other:
                raise AssertionError(f"the model knows no {other!r}")
        return [order[i % len(order)] for i in range(count)]

    def _next_in_pass(self) -> Held:
        if all(one.arrival in self._in_this_pass for one in self.held):
            self._in_this_pass.clear()
        one = next(one for one in self.held if one.arrival not in self._in_this_pass)
        self._in_this_pass.add(one.arrival)
        return one
