"""Why rollouts fork: each cause from steps as a harness would send them, counted in the group and at the producer."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.capture import Trajectory, Turn, from_steps
from penstock.convert import branch_causes, make_group

PROMPT, SAID, TOOL = [1, 2, 3], list(range(100, 120)), [5, 6]


def step(prompt: list[int], completion: list[int], **more: Any) -> dict[str, Any]:
    return {
        "prompt_ids": prompt,
        "completion_ids": completion,
        "completion_logprobs": [-0.5] * len(completion),
        **more,
    }


def causes(*prompts: list[int]) -> dict[str, int]:
    """Of a first answer, and of one more step with each of these prompts."""
    steps = [step(PROMPT, SAID), *(step(prompt, [200 + i]) for i, prompt in enumerate(prompts))]
    return dict(branch_causes(from_steps(steps)))


def test_a_conversation_that_goes_on_does_not_fork() -> None:
    assert causes(PROMPT + SAID + TOOL, PROMPT + SAID + TOOL + [200] + TOOL) == {}


@settings(max_examples=200)
@given(st.integers(0, 19), st.integers(1, 16), st.lists(st.integers(300, 400), min_size=1, max_size=16), st.booleans())
def test_tokens_that_come_back_as_others_are_retokenized(at: int, gone: int, others: list[int], went_on: bool) -> None:
    """Wherever in the message; at its very end only what was stored behind it can tell."""
    gone = min(gone, len(SAID) - at)
    changed = PROMPT + SAID[:at] + others + SAID[at + gone :] + TOOL
    before = [PROMPT + SAID + TOOL] if went_on else []
    expected = "retokenized" if at + gone < len(SAID) or went_on else "rewritten"
    assert causes(*before, changed) == {expected: 1}


@pytest.mark.parametrize(
    ("prompts", "cause"),
    [
        ([PROMPT + SAID[12:] + TOOL], "stripped"),
        ([PROMPT + SAID[:4] + SAID[19:] + TOOL], "stripped"),
        ([PROMPT + SAID + TOOL, PROMPT + TOOL], "stripped"),
        ([[*PROMPT, 7, 8, 9, *TOOL]], "rewritten"),
        ([PROMPT + list(range(300, 340)) + SAID[10:]], "rewritten"),
        ([PROMPT], "resampled"),
        ([[1, 2, 4]], "context changed"),
        ([[1, 2]], "resampled"),
        ([[9, 9]], "unrelated"),
    ],
)
def test_each_cause_is_told_from_its_tokens(prompts: list[list[int]], cause: str) -> None:
    assert causes(*prompts) == {cause: 1}


def test_a_group_counts_the_forks_of_all_its_rollouts() -> None:
    plain_one = from_steps([step(PROMPT, SAID)], reward=0.0)
    forked = from_steps([step(PROMPT, SAID), step([*PROMPT, 300, *SAID[2:], *TOOL], [4]), step([9], [4])], reward=1.0)
    group = make_group([plain_one, forked, forked], id="p")
    assert group.branches == {"retokenized": 2, "unrelated": 2}
    assert len(group) == 1 + 3 + 3


def test_graphs_given_as_they_are_have_causes_too() -> None:
    said = Turn([3, 4], logprobs=[-1.0, -1.0])
    twice = Trajectory(turns=[Turn([1, 2]), said, said], parents=[-1, 0, 0])
    assert dict(branch_causes(twice)) == {"resampled": 1}
    empty = Trajectory(turns=[Turn([1, 2]), Turn([], sampled=True), said], parents=[-1, 0, 0])
    assert dict(branch_causes(empty)) == {"resampled": 1}


def test_many_forks_of_a_long_history_cost_what_their_tokens_cost() -> None:
    """A fork looks at its own message, not at all that came after it."""
    steps, history = [], PROMPT
    for i in range(400):
        steps.append(step(history, [1000 + i, 2000 + i, 7]))
        history = [*history, 3000 + i, 7, *range(50)]
    assert dict(branch_causes(from_steps(steps))) == {"retokenized": 399}


# ------------------------------------------------------------------ routing with missing rows


def rows(start: int, stop: int) -> Any:
    return {"data": bytes(2 * (stop - start)), "shape": [stop - start, 1, 2], "start": start}


def test_routing_with_missing_rows_is_counted() -> None:
    whole = from_steps([step([1, 2], [3], routed_experts=np.zeros((2, 1, 2), np.uint8))], reward=1.0)
    gap = from_steps([step([1, 2], [3], routed_experts=rows(1, 2))], reward=0.0)
    part = Trajectory(turns=[Turn([1]), Turn([2], logprobs=[-1.0], routed_experts=np.zeros((1, 1, 2), np.uint8))])
    assert (whole.routing_gaps, gap.routing_gaps) == (0, 1)
    assert make_group([whole, whole], id="p").unrouted == 0
    assert make_group([whole, gap, gap], id="p").unrouted == 2
    assert make_group([part], id="p", advantage=None).unrouted == 1


def test_a_producer_is_told_of_retokenized_forks_and_lost_routing(caplog: pytest.LogCaptureFixture) -> None:
    forked = [step(PROMPT, SAID), step([*PROMPT, 300, *SAID[2:], *TOOL], [4])]
    gap = from_steps([step([1, 2], [3], routed_experts=rows(1, 2))], reward=0.0)
    with (
        ps.open("memory:", ranks=1, seq_len=64, groups_per_step=1) as plane,
        caplog.at_level(logging.WARNING, "penstock.producer"),
    ):
        for i in range(5):
            with plane.group("17", id=f"17#{i}") as group:
                group.add(from_steps(forked, reward=1.0))
                group.add(gap)
        with plane.group("17", id="17#0") as group:  # known already: counted once
            group.add(from_steps(forked, reward=1.0))
            group.add(gap)
        assert plane.counts.branches == {"retokenized": 5} and plane.counts.unrouted == 5
        assert repr(plane.counts) == "PutCounts(branches=Counter({'retokenized': 5}), unrouted=5)"
    said = [record.getMessage() for record in caplog.records]
    assert [text for text in said if "came back as other tokens, 4 times so far" in text]
    assert len([text for text in said if "rows were missing" in text]) == 3
