"""Curricula: which prompt comes next, from what became of the earlier ones.

A curriculum is a small state machine without I/O. `begin` gives it the prompts, `observe` an event of
`plane.feedback()`, and `next` returns a prompt. The same calls in the same order return the same prompts: random
numbers come from the seed and from how many prompts were drawn, so the state is plain data and a restart continues
exactly.

    Sequential           every prompt once per epoch, in a new order each epoch
    DifficultyPools      prompts are sorted into pools by their last mean reward, and pools are drawn by weight
    Thompson             prompts whose groups were informative (rewards differ) are drawn more often

After a rewind, steps that were observed before are trained again. Their events are ignored, so no group counts twice.

A plane uses the same classes to order its tasks (`plane/task_order.py`). There, prompts are numbers, and a draw is
split: `choose` changes nothing, `take` applies a draw that the log has, `untake` undoes the last one.
"""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, CorruptFile, InvalidInput

MAX_POOLS = 256
MAX_CANDIDATES = 4096
MAX_PARAMETERS = 64 << 10
"""Bytes of a curriculum's parameters, as they are sent and stored."""


class Seen(Protocol):
    """The fields of an event that a curriculum reads."""

    @property
    def outcome(self) -> str: ...
    @property
    def prompt(self) -> Hashable: ...
    @property
    def rewards(self) -> Sequence[float | None]: ...
    @property
    def step(self) -> int | None: ...


class Curriculum(Protocol):
    """Chooses prompts."""

    def begin(self, prompts: Sequence[Any], seed: int) -> None:
        """Start with these prompts: their names, or anything that can be a key. Raises InvalidInput if there are none,
        or if one is given twice."""

    def observe(self, event: Seen) -> None:
        """Learn from an event. Events of other prompts are ignored."""

    def next(self) -> Any:
        """Return the prompt to sample next."""

    def state(self) -> dict[str, Any]:
        """Return everything but the settings, as plain data."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, after `begin` with the same seed. New prompts count as not drawn yet. What is known
        about prompts that are gone is forgotten."""


class DrawingCurriculum(Curriculum, Protocol):
    """A curriculum that learns, as the plane uses it."""

    def choose(self) -> Any:
        """Return the prompt that `next` would return. Changes nothing."""

    def take(self, prompt: Any) -> None:
        """Apply the draw of a prompt."""

    def untake(self, prompt: Any) -> None:
        """Undo the last `take`, which was of this prompt."""

    def parameters(self) -> bytes:
        """Return the parameters as JSON, for `read_curriculum`."""


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
        # A group that was dropped is not trained later, so it counts once. Late rewards are filtered after the put.
        return event.outcome in ("filtered", "dropped")


def epoch_order(count: int, seed: int, epoch: int) -> npt.NDArray[np.intp]:
    """Return the order of `count` prompts in an epoch.

    RandomState and its permutations are frozen: every version of numpy gives the same order."""
    return np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32, epoch]).permutation(count)


class Sequential:
    """Every prompt once per epoch, in an order that the seed and the epoch give.

    >>> order = Sequential(shuffle=False)
    >>> order.begin(["a", "b"], seed=0)
    >>> [order.next() for _ in range(5)]
    ['a', 'b', 'a', 'b', 'a']
    """

    def __init__(self, *, shuffle: bool = True) -> None:
        self.shuffle = shuffle
        self._prompts: tuple[Any, ...] = ()
        self._order: list[Any] = []
        self._seed = self._drawn = 0

    def __repr__(self) -> str:
        return f"Sequential(shuffle={self.shuffle})"

    def begin(self, prompts: Sequence[Any], seed: int) -> None:
        self._prompts, self._seed, self._drawn = _checked(prompts, seed), seed, 0

    def observe(self, event: Seen) -> None:
        """Do nothing: the order does not depend on rewards."""

    def next(self) -> Any:
        epoch, place = divmod(self._drawn, len(self._prompts))
        if not place or not self._order:
            self._order = list(self._prompts)
            if self.shuffle:
                places = epoch_order(len(self._prompts), self._seed, epoch + 1).tolist()
                self._order = [self._prompts[i] for i in places]
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
    pools are left out. Within a pool prompts take turns, so none is forgotten. Groups that were filtered out or dropped
    count too: without them a prompt that is always solved would stay where it was.

    >>> order = DifficultyPools({0.5: 1.0, 1.0: 3.0})
    >>> order.begin(["a", "b"], seed=0)
    >>> sorted({order.next() for _ in range(2)})
    ['a', 'b']
    """

    def __init__(self, pools: Mapping[float, float], *, new: float = 1.0) -> None:
        bounds = sorted(pools)
        if not bounds or not all(map(math.isfinite, bounds)) or len(bounds) > MAX_POOLS:
            raise ConfigError(
                f"DifficultyPools: {str(dict(pools))[:200]}; give 1 to {MAX_POOLS} finite bounds of the mean reward, "
                "each with a weight"
            )
        self._bounds, self._weights = bounds, [*(float(pools[bound]) for bound in bounds), float(new)]
        for weight in self._weights:
            if not 0 < weight < math.inf:
                raise ConfigError(f"DifficultyPools: weight {weight}; must be a positive number: every prompt can come")
        self._pools: list[OrderedDict[Any, None]] = []
        self._pool_of: dict[Any, int] = {}
        self._rewinds = _Rewinds()
        self._seed = self._drawn = 0

    def __repr__(self) -> str:
        pools = dict(zip(self._bounds, self._weights, strict=False))
        return f"DifficultyPools({pools}, new={self._weights[-1]})"

    def parameters(self) -> bytes:
        pools = list(zip(self._bounds, self._weights, strict=False))
        return msgspec.json.encode({"pools": pools, "new": self._weights[-1]})

    def begin(self, prompts: Sequence[Any], seed: int) -> None:
        self._seed, self._drawn, self._rewinds = seed, 0, _Rewinds()
        given = _checked(prompts, seed)
        order = [given[i] for i in epoch_order(len(given), seed, 0).tolist()]
        self._pools = [OrderedDict() for _ in self._weights]
        self._pools[-1] = OrderedDict.fromkeys(order)
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

    def next(self) -> Any:
        prompt = self.choose()
        self.take(prompt)
        return prompt

    def choose(self) -> Any:
        filled = [i for i, pool in enumerate(self._pools) if pool]
        (chosen,) = _rng(self._seed, self._drawn).choices(filled, [self._weights[i] for i in filled])
        return next(iter(self._pools[chosen]))

    def take(self, prompt: Any) -> None:
        self._drawn += 1
        self._pools[self._pool_of[prompt]].move_to_end(prompt)

    def untake(self, prompt: Any) -> None:
        self._drawn -= 1
        self._pools[self._pool_of[prompt]].move_to_end(prompt, last=False)

    def state(self) -> dict[str, Any]:
        steps = [self._rewinds.last, self._rewinds.until]
        return {"drawn": self._drawn, "steps": steps, "pools": [list(pool) for pool in self._pools]}

    def restore(self, state: Mapping[str, Any]) -> None:
        pools = state["pools"]
        if len(pools) != len(self._weights):
            raise CorruptFile(
                f"DifficultyPools: the state has {len(pools)} pools, not {len(self._weights)}; begin without it"
            )
        self._drawn, (self._rewinds.last, self._rewinds.until) = _count(state, "drawn"), state["steps"]
        fresh = self._pool_of
        kept = [OrderedDict.fromkeys(prompt for prompt in pool if prompt in fresh) for pool in pools]
        self._pool_of = {prompt: i for i, pool in enumerate(kept) for prompt in pool}
        for prompt in self._pools[-1]:
            if prompt not in self._pool_of:
                kept[-1][prompt] = None
                self._pool_of[prompt] = len(kept) - 1
        self._pools = kept


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

    def __init__(self, *, arms: Mapping[Any, str] | None = None, decay: float = 0.98, candidates: int = 64) -> None:
        if not 0 < decay <= 1:
            raise ConfigError(f"Thompson: decay {decay}; must be above 0 and at most 1")
        if not 1 <= candidates <= MAX_CANDIDATES:
            raise ConfigError(
                f"Thompson: candidates {candidates}; must be from 1 to {MAX_CANDIDATES:,}: arms compared per draw"
            )
        self.arms, self._decay, self._candidates = arms, decay, candidates
        self._arm_of: dict[Any, Any] = {}
        self._names: list[Any] = []
        """Of the arms, in the order of their first prompt."""
        self._turns: dict[Any, OrderedDict[Any, None]] = {}
        """Arm -> its prompts, if `arms` names them."""
        self._seen: dict[Any, list[float]] = {}
        """Arm -> informative and other groups, decayed."""
        self._rewinds = _Rewinds()
        self._seed = self._drawn = 0

    def __repr__(self) -> str:
        arms = "" if self.arms is None else f"arms of {len(self.arms):,} prompts, "
        return f"Thompson({arms}decay={self._decay}, candidates={self._candidates})"

    def parameters(self) -> bytes:
        return msgspec.json.encode({"decay": self._decay, "candidates": self._candidates})

    def begin(self, prompts: Sequence[Any], seed: int) -> None:
        self._seed, self._drawn, self._rewinds = seed, 0, _Rewinds()
        self._turns, self._seen = {}, {}
        self._arm_of = {prompt: self.arm_of(prompt) for prompt in _checked(prompts, seed)}
        self._names = list(dict.fromkeys(self._arm_of.values()))
        for prompt, arm in self._arm_of.items() if self.arms is not None else ():
            self._turns.setdefault(arm, OrderedDict())[prompt] = None

    def arm_of(self, prompt: Any) -> Any:
        """Return the arm of a prompt. Raises InvalidInput if it has none."""
        if self.arms is None:
            return prompt
        if prompt not in self.arms:
            raise InvalidInput(f"Thompson: prompt {prompt!r} has no arm; name the arm of every prompt")
        return self.arms[prompt]

    def observe(self, event: Seen) -> None:
        scored = [reward for reward in event.rewards if reward is not None]
        if not self._rewinds.is_new(event) or not scored or event.prompt not in self._arm_of:
            return
        arm = self._arm_of[event.prompt]
        good, other = (self._decay * count for count in self._seen.get(arm, (0.0, 0.0)))
        is_informative = max(scored) > min(scored)
        self._seen[arm] = [good + is_informative, other + (not is_informative)]

    def next(self) -> Any:
        prompt = self.choose()
        self.take(prompt)
        return prompt

    def choose(self) -> Any:
        rng = _rng(self._seed, self._drawn)
        some = self._names if len(self._names) <= self._candidates else rng.sample(self._names, self._candidates)
        arm = max(some, key=lambda name: self._drawn_share(rng, name))
        return arm if self.arms is None else next(iter(self._turns[arm]))

    def take(self, prompt: Any) -> None:
        self._drawn += 1
        if self.arms is not None:
            self._turns[self._arm_of[prompt]].move_to_end(prompt)

    def untake(self, prompt: Any) -> None:
        self._drawn -= 1
        if self.arms is not None:
            self._turns[self._arm_of[prompt]].move_to_end(prompt, last=False)

    def _drawn_share(self, rng: random.Random, arm: Any) -> float:
        good, other = self._seen.get(arm, (0.0, 0.0))
        return rng.betavariate(1.0 + good, 1.0 + other)

    def state(self) -> dict[str, Any]:
        steps = [self._rewinds.last, self._rewinds.until]
        turns = {arm: list(prompts) for arm, prompts in self._turns.items()}
        return {"drawn": self._drawn, "steps": steps, "seen": dict(self._seen), "turns": turns}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._drawn, (self._rewinds.last, self._rewinds.until) = _count(state, "drawn"), state["steps"]
        known = set(self._names)
        self._seen = {arm: list(counts) for arm, counts in state["seen"].items() if arm in known}
        for arm, prompts in self._turns.items():
            before = [prompt for prompt in state["turns"].get(arm, ()) if prompt in prompts]
            self._turns[arm] = OrderedDict.fromkeys([*before, *prompts])


class _PoolsParameters(msgspec.Struct, forbid_unknown_fields=True):
    pools: list[tuple[float, float]]
    new: float


class _ThompsonParameters(msgspec.Struct, forbid_unknown_fields=True):
    decay: float
    candidates: int


# Made at import: msgspec crashes when two threads are the first to decode a type.
_READ_POOLS = msgspec.json.Decoder(_PoolsParameters)
_READ_THOMPSON = msgspec.json.Decoder(_ThompsonParameters)


def read_curriculum(name: str, parameters: bytes, arms: Mapping[int, str] | None) -> DrawingCurriculum:
    """Make a curriculum from its name and `parameters()`. Raises InvalidInput for what cannot be one.

    >>> read_curriculum("Thompson", b'{"decay":0.9,"candidates":8}', None)
    Thompson(decay=0.9, candidates=8)
    """
    if len(parameters) > MAX_PARAMETERS:
        raise InvalidInput(
            f"order {name[:40]!r}: {len(parameters):,} bytes of parameters; give at most {MAX_PARAMETERS:,}"
        )
    try:
        if name == "DifficultyPools":
            pools = _READ_POOLS.decode(parameters)
            return DifficultyPools(dict(pools.pools), new=pools.new)
        if name == "Thompson":
            found = _READ_THOMPSON.decode(parameters)
            return Thompson(arms=arms, decay=found.decay, candidates=found.candidates)
    except (msgspec.DecodeError, UnicodeDecodeError, ConfigError) as error:
        raise InvalidInput(f"order {name[:40]!r}: {error}") from None
    raise InvalidInput(f"order {name[:40]!r}: not known here; give Sequential, DifficultyPools or Thompson")


def _rng(seed: int, drawn: int) -> random.Random:
    return random.Random(f"{seed}.{drawn}")  # noqa: S311 - order, not secrets


def _checked(prompts: Sequence[Any], seed: int) -> tuple[Any, ...]:
    if not prompts:
        raise InvalidInput("curriculum: no prompts; give at least one")
    if seed < 0:
        raise InvalidInput(f"curriculum: seed {seed}; give 0 or more")
    if len(set(prompts)) != len(prompts):
        twice = Counter(prompts).most_common(1)[0][0]
        raise InvalidInput(f"curriculum: prompt {twice!r} is given twice; give each once")
    return tuple(prompts)


def _count(state: Mapping[str, Any], name: str) -> int:
    found = state[name]
    if not isinstance(found, int) or found < 0:
        raise CorruptFile(f"curriculum: {name} is {found!r:.40}; the state was altered: begin without it")
    return found
