"""Which samples of which runs go into the next plan: fair shares by tokens, kept in deficit counters.

Several runs share one trainer. Each run offers whole steps; each draw takes about `budget` tokens. The run that is owed
most goes next, sample by sample: every sample is charged to its run, and what a draw took in total is credited to all
runs that had work, in proportion to their weights. So over time every busy run gets its share of tokens to within a
sample or two, however long its samples are, and room that a long sample leaves is used by the short ones of others. A
run without work is owed nothing.

A draw never holds two steps of one run; a step of a run may span several draws. Bad data costs the run that sent it:
the run is evicted whole, with the reason, and the others go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from penstock.errors import ConfigError
from penstock.pack.shares import Shares

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
    steps: deque[tuple[int, deque[tuple[K, int]]]] = field(default_factory=deque)
    """Steps not yet drawn completely, each with its samples (key, tokens)."""
    last_step: int = -1

    @property
    def current(self) -> deque[tuple[K, int]]:
        """What is left of the step it is at."""
        return self.steps[0][1]


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
        self._shares = Shares()
        self.evicted: dict[str, str] = {}
        """Runs that take no part any more, with the reason."""

    def weigh(self, run: str, weight: float) -> None:
        """Give a run more or less than the weight of 1 that every run has."""
        self._shares.weigh(run, weight)

    def offer(self, run: str, step: int, samples: Sequence[tuple[K, int]]) -> None:
        """Add one whole step of a run. Bad data evicts the run; nothing of the step is kept then."""
        if run in self.evicted:
            return
        state = self._runs.setdefault(run, _Run())
        reason = _fault(step, state.last_step, samples)
        if reason:
            self.evict(run, reason)
            return
        state.steps.append((step, deque(samples)))
        state.last_step = step

    def evict(self, run: str, reason: str) -> tuple[K, ...]:
        """Take a run out, with all it has waiting; its samples are returned, so that they can be counted."""
        state = self._runs.pop(run, None)
        self._shares.forget(run)
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
        busy = {run: state for run, state in sorted(self._runs.items()) if state.steps}
        taken: dict[str, list[tuple[K, int]]] = {run: [] for run in busy}
        left = budget
        while left > 0:
            # The first sample may exceed the budget: one longer than any budget must go some time.
            able = [
                run for run, state in busy.items() if state.current and (state.current[0][1] <= left or left == budget)
            ]
            if not able:
                break
            run = self._shares.most_owed(able)
            sample = busy[run].current.popleft()
            taken[run].append(sample)
            self._shares.charge(run, sample[1])
            left -= sample[1]
        self._shares.settle(busy)
        return [self._piece(run, samples) for run, samples in taken.items() if samples]

    def _piece(self, run: str, samples: Sequence[tuple[K, int]]) -> Piece[K]:
        state = self._runs[run]
        step, queue = state.steps[0]
        if not queue:
            state.steps.popleft()
        if not state.steps:
            self._shares.forget(run)
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
