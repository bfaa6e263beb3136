"""Which samples of which runs go into the next plan: deficit round robin by tokens.

Several runs share one trainer. Each run offers whole steps; each draw takes about `budget` tokens, shared between the
runs that have work in proportion to their weights. What a run could not use of its share because its next sample was
too long is kept for the next draw (its deficit); a run without work keeps nothing. So over time every busy run gets
its share of tokens, however long its samples are, and a run with one short sample does not wait behind a large one.

A draw never holds two steps of one run; a step of a run may span several draws. Bad data costs the run that sent
it: the run is evicted whole, with the reason, and the others go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from penstock.errors import ConfigError

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece(Generic[K]):
    """What one run contributes to a draw."""

    run: str
    step: int
    keys: tuple[K, ...]
    """The samples, in the order they were offered."""
    tokens: int
    completes: bool
    """True when these are the last samples of that step of the run."""


@dataclass(slots=True)
class _Run(Generic[K]):
    weight: float
    steps: deque[tuple[int, deque[tuple[K, int]]]] = field(default_factory=deque)
    """Steps not yet drawn completely, each with its samples (key, tokens)."""
    last_step: int = -1
    deficit: float = 0.0


class Schedule(Generic[K]):
    """Fair shares of the trainer between runs.

    >>> schedule: Schedule[str] = Schedule()
    >>> schedule.offer("a", 0, [("a1", 60), ("a2", 60), ("a3", 60)])
    >>> schedule.offer("b", 7, [("b1", 50)])
    >>> [(piece.run, piece.keys, piece.completes) for piece in schedule.draw(budget=120)]
    [('a', ('a1',), False), ('b', ('b1',), True)]
    >>> [(piece.run, piece.keys, piece.completes) for piece in schedule.draw(budget=120)]
    [('a', ('a2', 'a3'), True)]
    """

    def __init__(self) -> None:
        self._runs: dict[str, _Run[K]] = {}
        self._weights: dict[str, float] = {}
        self._turn = 0
        self.evicted: dict[str, str] = {}
        """Runs that take no part any more, with the reason."""

    def weigh(self, run: str, weight: float) -> None:
        """Give a run more or less than the weight of 1 that every run has."""
        if not 0 < weight < float("inf"):
            raise ConfigError(f"weight of run {run!r}: {weight}; must be a positive number")
        self._weights[run] = weight
        if run in self._runs:
            self._runs[run].weight = weight

    def offer(self, run: str, step: int, samples: Sequence[tuple[K, int]]) -> None:
        """Add one whole step of a run. Bad data evicts the run; nothing of the step is kept then."""
        if run in self.evicted:
            return
        state = self._runs.setdefault(run, _Run(weight=self._weights.get(run, 1.0)))
        reason = _fault(step, state.last_step, samples)
        if reason:
            self.evict(run, reason)
            return
        state.steps.append((step, deque(samples)))
        state.last_step = step

    def evict(self, run: str, reason: str) -> tuple[K, ...]:
        """Take a run out, with all it has waiting; its samples are returned, so that they can be counted."""
        state = self._runs.pop(run, None)
        self.evicted[run] = reason
        return tuple(key for _, queue in (state.steps if state else ()) for key, _ in queue)

    def readmit(self, run: str) -> None:
        """Let an evicted run begin anew."""
        self.evicted.pop(run, None)

    @property
    def waiting_tokens(self) -> dict[str, int]:
        """Tokens each run has waiting, over all its steps."""
        return {run: sum(n for _, queue in s.steps for _, n in queue) for run, s in self._runs.items()}

    def draw(self, budget: int) -> list[Piece[K]]:
        """Samples for the next plan: at most `budget` tokens, unless a single sample is longer than that."""
        if budget < 1:
            raise ConfigError(f"budget: {budget}; must be a positive number of tokens")
        names = sorted(run for run, state in self._runs.items() if state.steps)
        if not names:
            return []
        first = self._turn % len(names)
        self._turn += 1
        order = names[first:] + names[:first]
        taken: dict[str, list[tuple[K, int]]] = {run: [] for run in order}
        self._take_shares(order, taken, budget)
        if not any(taken.values()):
            # Every first sample is longer than its run's share so far: the run that is owed most goes first.
            run = max(order, key=lambda name: self._runs[name].deficit)
            taken[run].append(self._pop(run))
        return [self._piece(run, taken[run]) for run in order if taken[run]]

    def _take_shares(self, order: Sequence[str], taken: dict[str, list[tuple[K, int]]], budget: int) -> None:
        """Rounds of shares, each of what the one before left over, until nobody can use the rest."""
        busy, left, spent = list(order), budget, -1
        while busy and left > 0 and spent != 0:
            spent = 0
            weights = sum(self._runs[run].weight for run in busy)
            for run in busy:
                state = self._runs[run]
                share = left * state.weight / weights
                # Credit beyond the next sample and one share would let a run that waited crowd out the others.
                state.deficit = min(state.deficit + share, state.steps[0][1][0][1] + share)
                spent += self._take(run, taken, left - spent, is_first=not any(taken.values()))
            left -= spent
            for run in busy:
                if not self._runs[run].steps[0][1]:
                    self._runs[run].deficit = 0.0
            busy = [run for run in busy if self._runs[run].steps[0][1]]

    def _take(self, run: str, taken: dict[str, list[tuple[K, int]]], left: int, *, is_first: bool) -> int:
        """Take samples of the run's current step while its deficit and the budget allow; the tokens taken."""
        state, tokens = self._runs[run], 0
        while state.steps[0][1]:
            need = state.steps[0][1][0][1]
            # The first sample of a draw may exceed the budget: one longer than any budget must go some time.
            if need > state.deficit or (tokens + need > left and not (is_first and tokens == 0)):
                break
            taken[run].append(self._pop(run))
            tokens += need
        return tokens

    def _pop(self, run: str) -> tuple[K, int]:
        state = self._runs[run]
        sample = state.steps[0][1].popleft()
        state.deficit = max(state.deficit - sample[1], 0.0)
        return sample

    def _piece(self, run: str, samples: Sequence[tuple[K, int]]) -> Piece[K]:
        steps = self._runs[run].steps
        step, queue = steps[0]
        if not queue:
            steps.popleft()
        return Piece(
            run=run,
            step=step,
            keys=tuple(key for key, _ in samples),
            tokens=sum(tokens for _, tokens in samples),
            completes=not queue,
        )


def _fault(step: int, last_step: int, samples: Sequence[tuple[object, int]]) -> str:
    """Why a step cannot be taken; empty when it can."""
    if not samples:
        return f"step {step} has no samples"
    bad = next(((key, tokens) for key, tokens in samples if tokens < 1), None)
    if bad is not None:
        return f"step {step}: sample {bad[0]!r} has {bad[1]} tokens"
    if step <= last_step:
        return f"step {step} came after step {last_step}"
    return ""
