"""Why a rollout branched: what each new branch did to the tokens that were there before.

A rollout of n branches branched n - 1 times. The cause is read from the tokens: those that first followed the branching
point, and those that follow it on the new branch.

    retokenized       sampled tokens came back as different ones, and the rest of the message unchanged
    stripped          sampled tokens are gone, what came after them is still there: thinking left out of the history
    rewritten         sampled tokens were replaced by something else: a summary, an edit
    context changed   tokens that were not sampled differ: another tool result, another system prompt
    resampled         the same prompt was answered once more
    unrelated         nothing is shared: another agent, another conversation

A retokenized message is trained where it was sampled and is context on the new branch, so nothing is trained wrongly.
But every turn after it is stored and computed again with its full history. Many of these mean that a harness sends text
to the server where it could send token ids.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from penstock.capture import Trajectory
from penstock.convert.branches import openers_of

RETOKENIZED = "retokenized"
WINDOW = 16
"""Most tokens that a retokenized stretch has on either side before both agree again."""
AGREE = 8
"""Tokens in a row that must be equal for two sequences to agree again; fewer where one of them ends."""

Ids = NDArray[np.uint32]


def branch_causes(trajectory: Trajectory) -> Counter[str]:
    """Count how often the rollout branched, by cause.

    >>> from penstock.capture import from_steps
    >>> reply = {"completion_logprobs": [-0.5, -0.5, -0.5], "completion_ids": [7, 8, 9]}
    >>> again = {"prompt_ids": [1, 2, 78, 9, 3], "completion_ids": [4], "completion_logprobs": [-0.5]}
    >>> dict(branch_causes(from_steps([{"prompt_ids": [1, 2], **reply}, again])))  # 7 8 came back as 78
    {'retokenized': 1}
    """
    openers, onward = openers_of(trajectory)
    return Counter(_cause(trajectory, opener, onward) for opener in openers[1:])


def _cause(trajectory: Trajectory, opener: int, onward: dict[int, int]) -> str:
    parents, keeps = trajectory.parents, trajectory.keeps
    assert parents is not None and keeps is not None
    parent, keep = parents[opener], keeps[opener] or 0
    if parent < 0:
        return "unrelated"
    new, answers = _follow(trajectory, opener, 0, onward)
    old, sampled = _follow(trajectory, parent, keep, onward)
    if answers[:1].any() or not len(new) or not len(old):
        return "resampled"
    if not sampled[0]:
        return "context changed"
    message = len(old) if sampled.all() else int(np.argmin(sampled))
    new = new if not answers.any() else new[: int(np.argmax(answers))]
    if _is_stripped(old, new, message):
        return "stripped"
    return RETOKENIZED if _is_retokenized(old, new, message) else "rewritten"


def _follow(trajectory: Trajectory, turn: int, start: int, onward: dict[int, int]) -> tuple[Ids, NDArray[np.bool_]]:
    """Return the tokens of a branch from a place on, as many as matter here, and which of them were sampled."""
    ids, sampled = [trajectory.turns[turn].token_ids[start:]], [trajectory.turns[turn].sampled_mask[start:]]
    while turn in onward and sum(np.count_nonzero(~part) for part in sampled) < WINDOW + AGREE:
        turn = onward[turn]
        ids.append(trajectory.turns[turn].token_ids)
        sampled.append(trajectory.turns[turn].sampled_mask)
    return np.concatenate(ids), np.concatenate(sampled)


def _is_retokenized(old: Ids, new: Ids, message: int) -> bool:
    """Return whether both agree again after 1 to WINDOW tokens of each."""
    return any(
        _agree(old[i : i + AGREE], new[j : j + AGREE])
        for i in range(1, min(WINDOW, message) + 1)
        for j in range(1, min(WINDOW, len(new)) + 1)
    )


def _is_stripped(old: Ids, new: Ids, message: int) -> bool:
    """Return whether the new tokens continue somewhere further in the message, or right after it."""
    starts = np.flatnonzero(old[1 : message + 1] == new[0]) + 1
    return any(_agree(old[i : i + AGREE], new[:AGREE]) for i in starts.tolist())


def _agree(old: Ids, new: Ids) -> bool:
    """Return whether two sequences are equal as far as both go; False if one is empty."""
    count = min(len(old), len(new))
    return count > 0 and bool((old[:count] == new[:count]).all())
