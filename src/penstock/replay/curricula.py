"""Curricula: which prompt comes next, from what became of the earlier ones.

A curriculum is a small state machine without I/O. `begin` gives it the prompts, `observe` an event of
`plane.feedback()`, and `next` returns a prompt. The same calls in the same order return the same prompts: random
numbers come from the seed and from how many prompts were drawn, so the state is plain data and a restart continues
exactly.

    Sequential           every prompt once per epoch, in a new order each epoch
    DifficultyPools      prompts are sorted into pools by their last mean reward, and pools are drawn by weight
    Thompson             prompts whose groups were informative (rewards differ) are drawn more often

After a rewind, steps are trained again that were observed before. Their events are ignored, so that no group counts
twice.
"""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from penstock.errors import ConfigError, CorruptFile, InvalidInput


class Seen(Protocol):
    """What a curriculum reads of an event."""

    @property
    def outcome(self) -> str: ...
    @property
    def prompt(self) -> str: ...
    @property
    def rewards(self) -> Sequence[float | None]: ...
    @property
    def step(self) -> int | None: ...


class Curriculum(Protocol):
    """Chooses prompts."""

    def begin(self, names: Sequence[str], seed: int) -> None:
        """Start with these prompts. Raises InvalidInput if there is none, or one twice."""

    def observe(self, event: Seen) -> None:
        """Learn from an event. Events of other prompts are ignored."""

    def next(self) -> str | None:
        """Return the prompt to sample next, or None at the end."""

    def state(self) -> dict[str, Any]:
        """Return everything but the names and the settings, as plain data."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, after `begin` with the same names and seed."""


class _Rewinds:
    """Tells which events were observed before."""

    def __init__(self) -> None:
        self.last = self.until = 0
        """The last step observed, and the last one that was observed before a rewind."""

    def is_new(self, event: Seen) -> bool:
        """Return whether an event tells something new about its prompt."""
        step = event.step or 0
        if event.outcome == "rewound":
            self.until = max(self.until, self.last)
        elif event.outcome == "trained":
            self.last = max(self.last, step)
            return step > self.until
        return event.outcome == "filtered"


class Sequential:
    """Every prompt once per epoch, in an order that the seed and the epoch give. `epochs` None: without end.

    >>> order = Sequential(epochs=2, shuffle=False)
    >>> order.begin(["a", "b"], seed=0)
    >>> [order.next() for _ in range(5)]
    ['a', 'b', 'a', 'b', None]
    """

    def __init__(self, *, epochs: int | None = None, shuffle: bool = True) -> None:
        if epochs is not None and epochs < 1:
            raise ConfigError(f"Sequential: epochs {epochs}; must be 1 or more, or None for no end")
        self._epochs, self._shuffle = epochs, shuffle
        self._names: tuple[str, ...] = ()
        self._order: list[str] = []
        self._seed = self._drawn = 0

    def begin(self, names: Sequence[str], seed: int) -> None:
        self._names, self._seed, self._drawn = _checked(names), seed, 0

    def observe(self, event: Seen) -> None:
        """Ignored: the order does not depend on rewards."""

    def next(self) -> str | None:
        epoch, place = divmod(self._drawn, len(self._names))
        if self._epochs is not None and epoch >= self._epochs:
            return None
        if not place or not self._order:
            self._order = list(self._names)
            if self._shuffle:
                random.Random(f"{self._seed}.{epoch}").shuffle(self._order)  # noqa: S311 - order, not secrets
        self._drawn += 1
        return self._order[place]

    def state(self) -> dict[str, Any]:
        return {"drawn": self._drawn}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._drawn, self._order = _count(state, "drawn"), []


class DifficultyPools:
    """Sorts prompts into pools by the mean reward of their last group, and draws pools by weight.

    `pools` maps the highest mean reward of a pool to its weight: `{0.2: 1.0, 0.8: 2.0, 1.0: 0.2}` has hard prompts (up
    to 0.2), good ones (up to 0.8), which come twice as often, and solved ones, which come now and then. A reward above
    the last bound is in the last pool. Prompts without a reward yet are in a pool of their own, of weight `new`. Empty
    pools are left out. Within a pool prompts take turns, so none is forgotten. Groups that were filtered out count too:
    without them a prompt that is always solved would stay where it was.

    >>> order = DifficultyPools({0.5: 1.0, 1.0: 3.0})
    >>> order.begin(["a", "b"], seed=0)
    >>> sorted({order.next() for _ in range(2)})
    ['a', 'b']
    """

    def __init__(self, pools: Mapping[float, float], *, new: float = 1.0) -> None:
        bounds = sorted(pools)
        if not bounds or not all(map(math.isfinite, bounds)):
            raise ConfigError(
                f"DifficultyPools: {dict(pools)}; give finite bounds of the mean reward, each with a weight"
            )
        self._bounds, self._weights = bounds, [*(float(pools[bound]) for bound in bounds), float(new)]
        for weight in self._weights:
            if not 0 < weight < math.inf:
                raise ConfigError(f"DifficultyPools: weight {weight}; must be a positive number: every prompt can come")
        self._pools: list[OrderedDict[str, None]] = []
        self._pool_of: dict[str, int] = {}
        self._rewinds = _Rewinds()
        self._seed = self._drawn = 0

    def begin(self, names: Sequence[str], seed: int) -> None:
        self._seed, self._drawn, self._rewinds = seed, 0, _Rewinds()
        order = list(_checked(names))
        random.Random(f"{seed}").shuffle(order)  # noqa: S311 - order, not secrets
        self._pools = [OrderedDict() for _ in self._weights]
        self._pools[-1].update(dict.fromkeys(order))
        self._pool_of = dict.fromkeys(order, len(self._weights) - 1)

    def observe(self, event: Seen) -> None:
        scored = [reward for reward in event.rewards if reward is not None]
        if not self._rewinds.is_new(event) or not scored or event.prompt not in self._pool_of:
            return
        mean = sum(scored) / len(scored)
        last = len(self._bounds) - 1
        pool = next((i for i, bound in enumerate(self._bounds) if mean <= bound), last)
        before = self._pool_of[event.prompt]
        if pool != before:
            del self._pools[before][event.prompt]
            self._pools[pool][event.prompt] = None
            self._pool_of[event.prompt] = pool

    def next(self) -> str | None:
        filled = [i for i, pool in enumerate(self._pools) if pool]
        rng = random.Random(f"{self._seed}.{self._drawn}")  # noqa: S311 - order, not secrets
        (chosen,) = rng.choices(filled, [self._weights[i] for i in filled])
        self._drawn += 1
        pool = self._pools[chosen]
        name = next(iter(pool))
        pool.move_to_end(name)
        return name

    def state(self) -> dict[str, Any]:
        steps = [self._rewinds.last, self._rewinds.until]
        return {"drawn": self._drawn, "steps": steps, "pools": [list(pool) for pool in self._pools]}

    def restore(self, state: Mapping[str, Any]) -> None:
        pools = [OrderedDict.fromkeys(pool) for pool in state["pools"]]
        where = {name: i for i, pool in enumerate(pools) for name in pool}
        if len(pools) != len(self._weights) or where.keys() != self._pool_of.keys():
            raise CorruptFile("DifficultyPools: the state is of other prompts or other pools; begin without it")
        self._drawn, (self._rewinds.last, self._rewinds.until) = _count(state, "drawn"), state["steps"]
        self._pools, self._pool_of = pools, where


class Thompson:
    """Draws prompts whose groups are informative: their rewards differ, so there is something to learn from.

    Each arm has a Beta posterior of the share of informative groups. `next` draws a number from the posterior of some
    arms and takes the arm with the largest: arms that are good, or little known, come often, and every arm can come.
    An arm is a prompt, or with `arms` (prompt -> name) all prompts of that name, which then take turns. `decay` is how
    much an arm's earlier groups still count when the next one is observed: prompts become easier.

    >>> order = Thompson(arms={"gsm/1": "gsm", "gsm/2": "gsm", "aime/1": "aime"})
    >>> order.begin(["gsm/1", "gsm/2", "aime/1"], seed=0)
    >>> order.next() in ("gsm/1", "gsm/2", "aime/1")
    True
    """

    def __init__(self, *, arms: Mapping[str, str] | None = None, decay: float = 0.98, candidates: int = 64) -> None:
        if not 0 < decay <= 1:
            raise ConfigError(f"Thompson: decay {decay}; must be above 0 and at most 1")
        if candidates < 1:
            raise ConfigError(f"Thompson: candidates {candidates}; must be 1 or more: arms that are compared per draw")
        self._arm_of, self._decay, self._candidates = arms, decay, candidates
        self._prompts: dict[str, OrderedDict[str, None]] = {}
        self._names: list[str] = []
        """Of the arms, in the order of their first prompt."""
        self._seen: dict[str, list[float]] = {}
        """Arm -> informative and other groups, decayed."""
        self._rewinds = _Rewinds()
        self._seed = self._drawn = 0

    def begin(self, names: Sequence[str], seed: int) -> None:
        self._seed, self._drawn, self._rewinds = seed, 0, _Rewinds()
        self._prompts, self._seen = {}, {}
        for name in _checked(names):
            self._prompts.setdefault(self._arm(name), OrderedDict())[name] = None
        self._names = list(self._prompts)

    def _arm(self, prompt: str) -> str:
        if self._arm_of is None:
            return prompt
        if prompt not in self._arm_of:
            raise InvalidInput(f"Thompson: prompt {prompt!r} has no arm; name the arm of every prompt")
        return self._arm_of[prompt]

    def observe(self, event: Seen) -> None:
        scored = [reward for reward in event.rewards if reward is not None]
        if not self._rewinds.is_new(event) or not scored or (self._arm_of and event.prompt not in self._arm_of):
            return
        arm = self._arm(event.prompt)
        if event.prompt in self._prompts.get(arm, ()):
            good, other = (self._decay * count for count in self._seen.get(arm, (0.0, 0.0)))
            is_informative = max(scored) > min(scored)
            self._seen[arm] = [good + is_informative, other + (not is_informative)]

    def next(self) -> str | None:
        rng = random.Random(f"{self._seed}.{self._drawn}")  # noqa: S311 - order, not secrets
        some = self._names if len(self._names) <= self._candidates else rng.sample(self._names, self._candidates)
        arm = max(some, key=lambda name: self._drawn_share(rng, name))
        self._drawn += 1
        prompts = self._prompts[arm]
        name = next(iter(prompts))
        prompts.move_to_end(name)
        return name

    def _drawn_share(self, rng: random.Random, arm: str) -> float:
        good, other = self._seen.get(arm, (0.0, 0.0))
        return rng.betavariate(1.0 + good, 1.0 + other)

    def state(self) -> dict[str, Any]:
        steps = [self._rewinds.last, self._rewinds.until]
        turns = {arm: list(prompts) for arm, prompts in self._prompts.items() if len(prompts) > 1}
        return {"drawn": self._drawn, "steps": steps, "seen": dict(self._seen), "turns": turns}

    def restore(self, state: Mapping[str, Any]) -> None:
        for arm, turns in state["turns"].items():
            if self._prompts.get(arm, {}).keys() != set(turns):
                raise CorruptFile(f"Thompson: the state has other prompts for arm {arm!r}; begin without it")
        self._drawn, (self._rewinds.last, self._rewinds.until) = _count(state, "drawn"), state["steps"]
        self._seen = {arm: list(counts) for arm, counts in state["seen"].items() if arm in self._prompts}
        self._prompts |= {arm: OrderedDict.fromkeys(turns) for arm, turns in state["turns"].items()}


def _checked(names: Sequence[str]) -> tuple[str, ...]:
    if not names:
        raise InvalidInput("curriculum: no prompts; give at least one")
    if len(set(names)) != len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise InvalidInput(f"curriculum: prompt {twice!r} is given twice; give each once")
    return tuple(names)


def _count(state: Mapping[str, Any], name: str) -> int:
    found = state[name]
    if not isinstance(found, int) or found < 0:
        raise CorruptFile(f"curriculum: {name} is {found!r:.40}; the state was altered: begin without it")
    return found
