"""A trajectory: the turns of one rollout as a tree of deltas, each token stored once.

Usually the tree is a chain, and `turns` describes it completely. When a harness rewrites its history (compaction,
stripped thinking, a step back, a second agent), a turn continues an earlier one than its predecessor:

    turns    0 system+user   1 reply   2 tool   3 reply   4 summary   5 reply
    parents  -1              0         1        2         1           4         4 goes back to 1 ...
    keeps     0              all       all      all       7           all       ... and keeps 7 of its tokens

A path from a root to the end of a turn that nothing continues is one sequence the model saw.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.arrays import (
    ImageSpan,
    Ragged,
    Values,
    check_info,
    check_metrics,
    check_seconds,
    check_text,
    check_version,
)
from penstock.capture.turn import Turn
from penstock.errors import InvalidInput, shown


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """The turns of one rollout and its outcome.

    >>> t = Trajectory(turns=[Turn([5, 6, 7]), Turn([8, 9], logprobs=[-0.5, -0.25])], reward=1.0, env="math")
    >>> t.num_turns, t.num_tokens, t.num_input_tokens, t.num_output_tokens
    (1, 5, 3, 2)
    """

    turns: Sequence[Turn]
    """At least one; a tuple once built."""
    parents: Sequence[int] | None = None
    """[turns] the turn each one continues, -1 for none; by default the previous one. A tuple once built."""
    keeps: Sequence[int | None] | None = None
    """[turns] how many of its parent's tokens each turn continues from; None = all. A tuple of numbers once built."""
    reward: float | None = None
    """None = not scored."""
    id: str = ""
    """Names the rollout in errors, and its samples unless a group names them."""
    env: str = ""
    run: str = ""
    mode: str = "rl"
    """rl, opd or sft."""
    agent: str = ""
    """The acting agent, in episodes with several agents."""
    policy_version: int | None = None
    """Version that sampled the rollout, None = not known; turns may be more precise with `weight_versions`."""
    error: str | None = None
    """Why the rollout failed. Its tokens are stored and train nothing. Samples carry the first 500 characters."""
    truncated: bool = False
    """Ended by a limit rather than by the model."""
    stop_condition: str = ""
    """Why it ended, as the environment names it."""
    seconds: float | None = None
    """How long the rollout took; None = not known."""
    routing_gaps: int = 0
    """Model calls whose routed experts were reported with rows missing, and therefore left out."""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """Numbers about the rollout, at most 4,096 bytes as JSON. One that is not finite is stored as None."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Any JSON values that the caller wants to find again, at most 4,096 bytes."""

    def __post_init__(self) -> None:
        put = object.__setattr__
        where = self.where
        if not isinstance(self.id, str):
            raise InvalidInput(f"trajectory.id: {shown(self.id)}; must be a string")
        if isinstance(self.turns, Turn) or not isinstance(self.turns, Iterable):
            raise InvalidInput(f"{where}.turns: {shown(self.turns)}; give a list of penstock.Turn objects")
        put(self, "turns", tuple(self.turns))
        names = ("env", "run", "mode", "agent", "stop_condition")
        check_text({name: getattr(self, name) for name in names}, where)
        _check_turns(self.turns, where)
        parents = (
            tuple(range(-1, len(self.turns) - 1)) if self.parents is None else _places("parents", self.parents, where)
        )
        keeps = (None,) * len(self.turns) if self.keeps is None else _places("keeps", self.keeps, where)
        put(self, "parents", parents)
        put(self, "keeps", _checked_keeps(self.turns, parents, keeps, where))
        if not isinstance(self.error, str | None):
            raise InvalidInput(f"{where}.error: {self.error!r:.60}; must be a string, or None")
        if not isinstance(self.truncated, bool | np.bool_):
            raise InvalidInput(f"{where}.truncated: {self.truncated!r:.60}; must be True or False")
        put(self, "truncated", bool(self.truncated))
        put(self, "reward", _checked_reward(self.reward, where))
        put(self, "metrics", check_metrics(self.metrics, f"{where}.metrics"))
        put(self, "info", check_info(self.info, f"{where}.info"))
        put(self, "seconds", check_seconds(self.seconds, f"{where}.seconds"))
        put(self, "policy_version", check_version(self.policy_version, f"{where}.policy_version"))

    @property
    def where(self) -> str:
        """The name of this trajectory in errors."""
        return f"trajectory {self.id!r}" if self.id else "trajectory"

    @property
    def num_turns(self) -> int:
        """Model calls: turns that were sampled."""
        return sum(turn.sampled for turn in self.turns)

    @property
    def num_tokens(self) -> int:
        """Tokens stored: each one once, however many turns saw it."""
        return sum(turn.num_tokens for turn in self.turns)

    @property
    def num_output_tokens(self) -> int:
        """Tokens the model sampled: the completion length."""
        return sum(turn.num_sampled for turn in self.turns)

    @property
    def num_input_tokens(self) -> int:
        """Tokens the model did not sample."""
        return self.num_tokens - self.num_output_tokens

    @property
    def num_env_tokens(self) -> int:
        """Input tokens after the model's first turn: tool results, replies, rewritten history."""
        first = next((i for i, turn in enumerate(self.turns) if turn.sampled), len(self.turns))
        return sum(turn.num_tokens - turn.num_sampled for turn in self.turns[first + 1 :])

    def __repr__(self) -> str:
        counts = f"{len(self.turns)} turns, {self.num_tokens} tokens, {self.num_output_tokens} sampled"
        return f"Trajectory({counts}, reward={self.reward}, id={self.id!r}, env={self.env!r})"


def _check_turns(turns: Sequence[Turn], where: str) -> None:
    for i, turn in enumerate(turns):
        if not isinstance(turn, Turn):
            raise InvalidInput(f"{where} turns[{i}]: a {type(turn).__name__}; give penstock.Turn objects")
    if not any(turn.num_tokens for turn in turns):
        raise InvalidInput(f"{where}.turns: {len(turns)} turns without a token; a trajectory has at least one token")
    _check_agreement(turns, "logprobs", [turn.logprobs is not None for turn in turns], where)
    for name in ("teacher_logprobs", "teacher_topk_logprobs"):
        _check_agreement(turns, name, [name in turn.columns for turn in turns], where)
    shapes = {turn.columns["routed_experts"].shape[1:]: i for i, turn in enumerate(turns) if _routes(turn)}
    if len(shapes) > 1:
        last = max(shapes.values())
        raise InvalidInput(
            f"{where} turns[{last}].routed_experts: [layers, top_k] is one of {sorted(shapes)}; one model has one shape"
        )


def _routes(turn: Turn) -> bool:
    return "routed_experts" in turn.columns and turn.num_tokens > 0


def _check_agreement(turns: Sequence[Turn], name: str, given: list[bool], where: str) -> None:
    """Check that all sampled turns have a column or none. A missing log-probability would read as probability 1."""
    sampled = [i for i, turn in enumerate(turns) if turn.num_sampled]
    with_it = [i for i in sampled if given[i]]
    if with_it and len(with_it) != len(sampled):
        missing = next(i for i in sampled if not given[i])
        raise InvalidInput(
            f"{where} turns[{missing}].{name}: missing for {turns[missing].num_sampled} sampled tokens, while "
            f"turns[{with_it[0]}] has them; record them for every sampled turn or for none"
        )


def _places(name: str, given: Sequence[Any], where: str) -> tuple[Any, ...]:
    """Return numbers of turns or tokens as ints, also those that numpy counted. None stays."""
    if not isinstance(given, Iterable):
        raise InvalidInput(f"{where}.{name}: {shown(given)}; give one number per turn")
    return tuple(int(one) if isinstance(one, np.integer) else one for one in given)


def _checked_keeps(turns: Sequence[Turn], parents: Sequence[Any], keeps: Sequence[Any], where: str) -> tuple[int, ...]:
    for name, given in (("parents", parents), ("keeps", keeps)):
        if len(given) != len(turns):
            raise InvalidInput(f"{where}.{name}: {len(given)} values for {len(turns)} turns; give one per turn")
    checked: list[int] = []
    for i, (parent, keep) in enumerate(zip(parents, keeps, strict=True)):
        if not isinstance(parent, int) or not -1 <= parent < i:
            raise InvalidInput(f"{where} turns[{i}].parent: {parent!r}; must be an earlier turn, or -1 for none")
        # A turn must keep at least one token of its parent, if the parent has any. Keeping none would make it a root.
        size = 0 if parent < 0 else turns[parent].num_tokens
        if keep is not None and not (isinstance(keep, int) and min(1, size) <= keep <= size):
            raise InvalidInput(f"{where} turns[{i}].keep: {keep!r}; its parent turns[{parent}] has {size} tokens")
        checked.append(size if keep is None else keep)
        if parent >= 0 and any(span.offset < checked[i] < span.end for span in turns[parent].images):
            raise InvalidInput(
                f"{where} turns[{i}].keep: {keep} cuts an image of turns[{parent}] in two; branch before or behind it"
            )
    return tuple(checked)


def _checked_reward(reward: float | None, where: str) -> float | None:
    if reward is None:
        return None
    try:
        value = float(reward)
    except (TypeError, ValueError):
        raise InvalidInput(f"{where}.reward: {reward!r}; must be a number, or None") from None
    except OverflowError:  # an int that no float holds
        value = math.inf
    if not math.isfinite(value):
        raise InvalidInput(f"{where}.reward: {value}; must be finite, or None when the rollout was not scored")
    return value


# ------------------------------------------------------------------ from plain arrays


def from_arrays(
    token_ids: Values,
    mask: Values,
    *,
    logprobs: Values | None = None,
    columns: Mapping[str, Values] | None = None,
    images: Sequence[ImageSpan] = (),
    **fields: Any,
) -> Trajectory:
    """Return the trajectory of one flat sequence: a turn per run of sampled tokens. `fields` are `Trajectory`'s.

    `logprobs` has one value per token or one per sampled token. `columns` holds other per-token columns, or one number
    for all tokens. `sampling_mask` among them is a list of ids per token, or per sampled token.

    >>> t = from_arrays([1, 2, 3, 4], [0, 1, 1, 0], logprobs=[0, -0.5, -0.25, 0], reward=1.0)
    >>> [(turn.token_ids.tolist(), turn.sampled) for turn in t.turns]
    [([1], False), ([2, 3], True), ([4], False)]
    """
    where = f"trajectory {fields['id']!r}" if fields.get("id") else "trajectory"
    # Build one turn over all tokens first: it checks all lengths and values before anything is cut.
    others: dict[str, Any] = dict(columns or {})
    full = Turn(token_ids, sampled=True, mask=mask, logprobs=logprobs, images=images, where=where, **others)
    marks = full.sampled_mask
    if full.num_tokens == 0:
        raise InvalidInput(f"{where}.token_ids: empty; a trajectory has at least one token")
    # A turn ends where the mask changes: marks 0 1 1 0 have edges 0 1 3 4.
    edges = [0, *(np.flatnonzero(np.diff(marks)) + 1).tolist(), full.num_tokens]
    sampled_before = np.concatenate([[0], np.cumsum(marks)])
    turns = [
        _cut(full, start, stop, bool(marks[start]), int(sampled_before[start]), where)
        for start, stop in pairwise(edges)
    ]
    return Trajectory(turns=turns, **fields)


def _cut(full: Turn, start: int, stop: int, sampled: bool, before: int, where: str) -> Turn:
    logprobs = full.logprobs[before : before + stop - start] if sampled and full.logprobs is not None else None
    columns: dict[str, Any] = {
        name: cells[start:stop] if isinstance(cells, Ragged) or cells.ndim else cells
        for name, cells in full.columns.items()
    }
    return Turn(
        full.token_ids[start:stop],
        sampled=sampled,
        logprobs=logprobs,
        images=[span.shifted(-start) for span in full.images if start <= span.offset < stop],
        where=f"{where} tokens {start}..{stop}",
        **columns,
    )
