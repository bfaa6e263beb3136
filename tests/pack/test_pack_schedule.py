"""Fair shares between runs, against what a share means."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.errors import ConfigError
from penstock.pack.schedule import Piece, Schedule


def offer(schedule: Schedule[str], run: str, step: int, *tokens: int) -> None:
    schedule.offer(run, step, [(f"{run}/{step}/{i}", n) for i, n in enumerate(tokens)])


def test_a_run_with_short_samples_does_not_wait_behind_one_with_long_ones() -> None:
    schedule: Schedule[str] = Schedule()
    offer(schedule, "long", 0, *[900] * 20)
    offer(schedule, "short", 0, *[10] * 20)
    first, second = ({piece.run: piece.tokens for piece in schedule.draw(1000)} for _ in range(2))
    assert first == {"long": 900, "short": 100} and second["short"] == 100


def test_a_step_may_span_draws_and_two_steps_of_a_run_never_share_one() -> None:
    schedule: Schedule[str] = Schedule()
    offer(schedule, "a", 0, 60, 60, 60)
    offer(schedule, "a", 1, 10)
    draws = [schedule.draw(130) for _ in range(3)]
    assert [(p.step, len(p.keys), p.completes) for d in draws for p in d] == [(0, 2, False), (0, 1, True), (1, 1, True)]
    assert schedule.draw(130) == []


def test_weights_share_tokens_in_proportion() -> None:
    schedule: Schedule[str] = Schedule()
    schedule.weigh("a", 3.0)
    for run in ("a", "b"):
        offer(schedule, run, 0, *[10] * 4000)
    served = {"a": 0, "b": 0}
    for _ in range(20):
        for piece in schedule.draw(400):
            served[piece.run] += piece.tokens
    assert served["a"] == pytest.approx(3 * served["b"], rel=0.02)


@pytest.mark.parametrize("seed", range(20))
def test_busy_runs_get_equal_tokens_to_within_a_few_samples(seed: int) -> None:
    rng = np.random.default_rng(seed)
    schedule: Schedule[str] = Schedule()
    runs = [f"r{r}" for r in range(rng.integers(2, 6))]
    for run in runs:
        longest = int(rng.choice([5, 60, 300]))
        offer(schedule, run, 0, *rng.integers(1, longest + 1, 20_000 // longest).tolist())
    served = dict.fromkeys(runs, 0)
    budget = int(rng.integers(400, 1000))
    while min(schedule.waiting_tokens.values()) >= budget:
        for piece in schedule.draw(budget):
            served[piece.run] += piece.tokens
    assert sum(served.values()) > 10 * budget
    assert max(served.values()) - min(served.values()) <= 2 * 300


def test_a_sample_longer_than_the_budget_goes_alone_and_is_not_starved() -> None:
    schedule: Schedule[str] = Schedule()
    offer(schedule, "giant", 0, 5000)
    offer(schedule, "busy", 0, *[50] * 2000)
    draws = [[piece.run for piece in schedule.draw(100)] for _ in range(150)]
    assert ["giant"] in draws
    alone: Schedule[str] = Schedule()
    offer(alone, "giant", 0, 5000)
    assert [piece.tokens for piece in alone.draw(100)] == [5000]


def test_a_run_without_work_is_owed_nothing_and_owes_nothing() -> None:
    schedule: Schedule[str] = Schedule()
    offer(schedule, "a", 0, 5000)
    offer(schedule, "b", 0, *[100] * 100)
    assert [piece.run for piece in schedule.draw(100)] == ["a"]
    offer(schedule, "a", 1, 100)
    # b is owed its half of the 5,000; what a took beyond its own half was forgotten when it had no work.
    waited = [[piece.run for piece in schedule.draw(100)] for _ in range(30)]
    assert waited.index(["a"]) == 25


@pytest.mark.parametrize(
    ("step", "samples", "reason"),
    [
        (4, [], "step 4 has no samples"),
        (4, [("fine", 3), ("bad", 0)], "step 4: sample 'bad' has 0 tokens"),
        (2, [("x", 1)], "step 2 came after step 3"),
        (3, [("x", 1)], "step 3 came after step 3"),
    ],
)
def test_bad_data_evicts_its_run_whole_and_the_others_go_on(
    step: int, samples: list[tuple[str, int]], reason: str
) -> None:
    schedule: Schedule[str] = Schedule()
    offer(schedule, "bad", 3, 10, 10)
    offer(schedule, "good", 0, 10)
    schedule.offer("bad", step, samples)
    assert schedule.evicted == {"bad": reason}
    assert [piece.run for piece in schedule.draw(100)] == ["good"]
    offer(schedule, "bad", 9, 10)
    assert schedule.draw(100) == []
    schedule.readmit("bad")
    offer(schedule, "bad", 0, 10)
    assert [piece.run for piece in schedule.draw(100)] == ["bad"]


def test_eviction_returns_what_was_waiting() -> None:
    schedule: Schedule[str] = Schedule()
    offer(schedule, "a", 0, 10, 10, 10)
    schedule.draw(10)
    assert schedule.evict("a", "logprobs missing") == ("a/0/1", "a/0/2")


def test_senseless_weights_and_budgets_are_refused() -> None:
    schedule: Schedule[str] = Schedule()
    with pytest.raises(ConfigError, match="weight of run 'a': 0"):
        schedule.weigh("a", 0.0)
    with pytest.raises(ConfigError, match="budget: 0"):
        schedule.draw(0)


class ScheduleMachine(RuleBasedStateMachine):
    """Random offers and draws against lists: nothing lost, nothing doubled, nothing out of order."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule: Schedule[str] = Schedule()
        self.waiting: dict[str, list[tuple[int, str, int]]] = {}
        self.steps: dict[str, int] = {}

    @rule(run=st.sampled_from("abc"), tokens=st.lists(st.integers(1, 120), min_size=1, max_size=6))
    def offer(self, run: str, tokens: list[int]) -> None:
        step = self.steps[run] = self.steps.get(run, -1) + 1
        offer(self.schedule, run, step, *tokens)
        self.waiting.setdefault(run, []).extend((step, f"{run}/{step}/{i}", n) for i, n in enumerate(tokens))

    @rule(budget=st.integers(1, 300))
    def draw(self, budget: int) -> None:
        pieces = self.schedule.draw(budget)
        assert bool(pieces) == any(self.waiting.values())
        assert len({piece.run for piece in pieces}) == len(pieces)
        count = sum(len(piece.keys) for piece in pieces)
        assert sum(piece.tokens for piece in pieces) <= budget or count == 1
        for piece in pieces:
            self._take(piece)

    def _take(self, piece: Piece[str]) -> None:
        head = self.waiting[piece.run][: len(piece.keys)]
        assert [(step, key) for step, key, _ in head] == [(piece.step, key) for key in piece.keys]
        assert piece.tokens == sum(n for _, _, n in head)
        del self.waiting[piece.run][: len(piece.keys)]
        rest = self.waiting[piece.run]
        assert piece.completes == (not rest or rest[0][0] != piece.step)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(sorted(self.waiting)))
        assert list(self.schedule.evict(run, "asked")) == [key for _, key, _ in self.waiting.pop(run)]
        self.schedule.readmit(run)
        self.steps.pop(run)

    @invariant()
    def tokens_agree(self) -> None:
        expected = {run: sum(n for _, _, n in queue) for run, queue in self.waiting.items()}
        assert {run: n for run, n in self.schedule.waiting_tokens.items() if n} == {
            r: n for r, n in expected.items() if n
        }


TestScheduleMachine = ScheduleMachine.TestCase
TestScheduleMachine.settings = settings(max_examples=60, stateful_step_count=30)
