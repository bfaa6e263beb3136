"""Fold steps that each repeat their full prompt into turns that each hold only what they add.

The rule is the longest prefix. A step continues the longest branch whose complete sequence (prompt and completion of
its last step) is a prefix of the new prompt. Only a branch's current end counts, not its history. A step that continues
none opens a branch: what its prompt shares with anything stored is shared, the rest is its own.

    step 0   prompt A         completion b        turns  A b
    step 1   prompt A b C     completion d        turns  A b C d         continues: adds C as context, then d
    step 2   prompt A b'      completion e        turns  A b C d | e     opens: keeps A and the start of b

The usual step continues the branch of the step before it: one comparison of two arrays, and Python work that does not
depend on the length of the history. Images are part of the prefix, because the placeholder tokens of two images are
equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import Array, ImageSpan, Values, check_spans
from penstock.capture.prefix_tree import ROOT, Keys, PrefixIndex, prefix_hashes
from penstock.capture.server_columns import Routing
from penstock.capture.trajectory import Trajectory
from penstock.capture.turn import Turn
from penstock.errors import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One model call as producers record it: the complete prompt, and the completion."""

    where: str
    """The name of this step in errors."""
    prompt_ids: NDArray[np.uint32]
    completion_ids: NDArray[np.uint32]
    mask: Values | None = None
    """[completion] which tokens were sampled; None = all."""
    logprobs: Values | None = None
    """[completion] or one per sampled token."""
    columns: Mapping[str, Values] = field(default_factory=dict)
    """Other columns of the completion."""
    types: NDArray[np.uint8] | None = None
    """[prompt + completion] mm_token_type_ids."""
    routing: Routing | None = None
    images: tuple[ImageSpan, ...] = ()
    """All images of the prompt; offsets in the prompt."""


@dataclass(slots=True, kw_only=True)
class _Draft:
    """A turn being built. The step that continues it may still complete its routing."""

    given: dict[str, Any]
    """Arguments of the turn. Slices are copied, so that no prompt is held longer than its step."""
    start: int
    """Where the turn starts and stops in its step's prompt + completion."""
    stop: int
    parent: int
    keep: int
    routed: Array | None = None
    open: bool = False
    """The routing of the last token is not known yet, because no forward pass followed it."""

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(slots=True, kw_only=True)
class _Branch:
    leaf: int
    """The turn it ends with."""
    number: int


def fold(steps: Iterable[Step], **fields: Any) -> Trajectory:
    """Return the trajectory of some steps. `fields` are those of the trajectory."""
    folding = _Folding()
    for step in steps:
        folding.add(step)
    _check_logprobs(folding.drafts)
    return Trajectory(
        turns=[Turn(**draft.given, routed_experts=draft.routed) for draft in folding.drafts],
        parents=[draft.parent for draft in folding.drafts],
        keeps=[draft.keep for draft in folding.drafts],
        **{"routing_gaps": folding.routing_gaps, **fields},
    )


def _check_logprobs(drafts: list[_Draft]) -> None:
    """Check that all completions have log-probabilities or none: here as well, where the error can name the step."""
    sampled = [draft for draft in drafts if draft.given.get("sampled") and len(draft)]
    missing = [draft for draft in sampled if draft.given["logprobs"] is None]
    if missing and len(missing) < len(sampled):
        where = missing[0].given["where"]
        raise InvalidInput(
            f"{where}.logprobs: missing for {len(missing[0])} tokens, while other steps have them; record all or none"
        )


class _Folding:
    def __init__(self) -> None:
        self.drafts: list[_Draft] = []
        self.routing_gaps = 0
        self._index = PrefixIndex()
        self._branches: list[_Branch] = []
        self._ends = np.zeros(8, np.intp)  # the segment each branch ends at
        self._last_keys: Keys = np.zeros(0, np.uint64)  # the complete sequence of the branch last extended
        self._last: _Branch | None = None
        self._tags: dict[tuple[object, ...], int] = {}

    def add(self, step: Step) -> None:
        keys = self._keys(step)
        num_prompt = len(step.prompt_ids)
        # Three cases. The prompt continues a branch: add what follows its end. It continues none, but starts like
        # something stored: open a branch there. It shares nothing: open a branch at the root.
        branch = self._continued(keys[:num_prompt])
        if branch is None:
            segment = self._index.longest(keys[:num_prompt])
            parent, keep = self._index.place(segment)
            branch = self._open()
        else:
            segment = int(self._ends[branch.number])
            parent, keep = branch.leaf, len(self.drafts[branch.leaf])
        start = self._index.end(segment)
        first = len(self.drafts)
        if start < num_prompt:
            given = _context(step, start)
            self.drafts.append(_Draft(given=given, start=start, stop=num_prompt, parent=parent, keep=keep))
            segment = self._index.insert(segment, first, keys[start:num_prompt].copy())
            parent, keep = first, num_prompt - start
        given = _completion(step)
        self.drafts.append(_Draft(given=given, start=num_prompt, stop=len(keys), parent=parent, keep=keep))
        branch.leaf = len(self.drafts) - 1
        # Copies: a slice would keep the keys of the complete prompt alive, and memory would grow quadratically with
        # turns.
        self._ends[branch.number] = self._index.insert(segment, branch.leaf, keys[num_prompt:].copy())
        self._last, self._last_keys = branch, keys
        if step.routing is not None:
            self._route(step.routing, first, start)

    def _open(self) -> _Branch:
        branch = _Branch(leaf=-1, number=len(self._branches))
        self._branches.append(branch)
        if branch.number == len(self._ends):
            self._ends = np.concatenate([self._ends, np.zeros_like(self._ends)])
        self._ends[branch.number] = ROOT
        return branch

    def _continued(self, prompt: Keys) -> _Branch | None:
        """Return the longest branch whose complete sequence is a prefix of the prompt; the first of equals."""
        active = self._ends[: len(self._branches)]
        lengths = self._index.ends_of(active)
        if self._last is not None and len(self._last_keys) <= len(prompt):
            length = len(self._last_keys)
            # The last branch wins without a search only if no other branch is as long: a longer one might fit as well.
            rivals = np.count_nonzero((lengths >= length) & (lengths <= len(prompt)))
            if rivals == 1 and np.array_equal(self._last_keys, prompt[:length]):
                return self._last
        segment = self._index.deepest(prompt, prefix_hashes(prompt), active)
        if segment is None:
            return None
        return self._branches[int(np.flatnonzero(active == segment)[0])]

    def _keys(self, step: Step) -> Keys:
        """Return what two prefixes must share to be equal: the tokens, and the image of each placeholder."""
        count = len(step.prompt_ids)
        keys = np.empty(count + len(step.completion_ids), np.uint64)
        keys[:count] = step.prompt_ids
        keys[count:] = step.completion_ids
        check_spans(step.images, count, None if step.types is None else step.types[:count], step.where)
        for span in step.images:
            identity = (span.hash, span.grid, span.merge)
            tag = self._tags.setdefault(identity, len(self._tags) + 1)
            # Token ids have 32 bits, so the upper half of a key is free for the number of the image.
            keys[span.offset : span.end] |= np.uint64(tag << 32)
        return keys

    def _route(self, routing: Routing, first: int, start: int) -> None:
        """Give the new turns their rows, and the token before them the row that no forward pass had given it."""
        last = self._last_token(self.drafts[first].parent, self.drafts[first].keep)
        boundary = last is not None and last.open
        total = self.drafts[-1].stop
        # The rows must begin at the first new token, or one earlier if the token before it still lacks its row, and may
        # lack only the very last position.
        if routing.start > start - boundary or routing.stop < total - 1:
            self.routing_gaps += 1
            return  # a gap: the turns stay without routing, and so does every sample that holds them
        if boundary and routing.stop >= start:
            assert last is not None and last.routed is not None
            last.routed = np.concatenate([last.routed[:-1], routing.rows(start - 1, start)])
            last.open = False
        for draft in self.drafts[first:]:
            draft.routed = routing.rows(draft.start, draft.stop)
            draft.open = len(draft) > 0 and draft.stop == routing.stop + 1

    def _last_token(self, turn: int, keep: int) -> _Draft | None:
        """Return the turn whose last token precedes this place, if the place is at the end of a turn."""
        while turn >= 0 and keep == len(self.drafts[turn]):
            draft = self.drafts[turn]
            if len(draft):
                return draft
            turn, keep = draft.parent, draft.keep
        return None


def _context(step: Step, start: int) -> dict[str, Any]:
    count = len(step.prompt_ids)
    return {
        "token_ids": step.prompt_ids[start:].copy(),
        "images": [span.shifted(-start) for span in step.images if span.offset >= start],
        "mm_token_type_ids": None if step.types is None else step.types[start:count].copy(),
        "where": step.where,
    }


def _completion(step: Step) -> dict[str, Any]:
    return {
        "token_ids": step.completion_ids,
        "sampled": True,
        "mask": step.mask,
        "logprobs": step.logprobs,
        "role": "assistant",
        "mm_token_type_ids": None if step.types is None else step.types[len(step.prompt_ids) :].copy(),
        "where": step.where,
        **step.columns,
    }
