"""Index a step's records: one small row per sample, the position of its line, its token ids, a search, and trees.

Building it reads the step once. The viewer lists, filters and sorts the rows, and serves a line unchanged when a sample
is opened.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import UnknownKey
from penstock.view.record import OF_SAMPLE, ReadLine, Record, Skipped, Step
from penstock.view.tallies import NOTHING, StepTokens, Summary, disagreement, reward_of, trains

MAX_NODES = 4096
"""Branches of a group's tree that are shown."""
_IDS = re.compile(r"\d{1,10}(?:[\s,]+\d{1,10})*")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepIndex:
    """A step's samples."""

    rows: list[dict[str, Any]]
    lines: list[ReadLine]
    """Functions that read each sample's line again."""
    summary: dict[str, Any]
    tokens: StepTokens
    """Trained tokens."""
    ids: list[NDArray[np.int64]]
    """All token ids of each sample."""
    skipped: Skipped
    rule: dict[str, Any] | None = None
    """How the tokens of the first record with a rule were masked."""

    @staticmethod
    def of(step: Step) -> StepIndex:
        rows: list[dict[str, Any]] = []
        lines: list[ReadLine] = []
        ids: list[NDArray[np.int64]] = []
        total, tokens, skipped, rule = NOTHING, StepTokens(), Skipped(), None
        for line, record in step.lines(skipped):
            total = total.plus(Summary.of(record))
            tokens.add(record)
            rows.append({"index": len(rows), **describe(record)})
            ids.append(record.columns["token_ids"])
            lines.append(line)
            rule = rule or record.fields.get("rule")
        return StepIndex(
            rows=rows,
            lines=lines,
            summary=total.as_dict(),
            tokens=tokens,
            ids=ids,
            skipped=skipped,
            rule=rule,
        )

    def line(self, index: int) -> bytes:
        """Return a record as one line of strict JSON."""
        if not 0 <= index < len(self.lines):
            raise UnknownKey(f"sample {index}: the step has {len(self.lines)}, counted from 0")
        return self.lines[index]()


def describe(record: Record) -> dict[str, Any]:
    """Return a sample's row: the values shown in the list and used for filtering and sorting."""
    columns, fields, mask = record.columns, record.fields, record.columns["loss_mask"]
    masked = columns.get("is_masked")
    return {
        **{name: fields.get(name) for name in (*OF_SAMPLE, "rank", "micro_step", "staleness") if name != "rollout"},
        **{name: (fields.get("rollout") or {}).get(name) for name in ("truncated", "stop_condition", "seconds")},
        "tokens": record.num_tokens,
        "loss_tokens": int(np.count_nonzero(mask)),
        "reward": reward_of(record),
        "advantage": _mean(columns.get("advantages"), mask),
        "trains": trains(record),
        "masked": None if masked is None else int(np.count_nonzero(masked)),
        "max_kl": _most(columns.get("mismatch_kl"), mask),
        "mean_kl": _mean(columns.get("mismatch_kl"), mask),
        "mean_ratio": _mean(columns.get("importance_ratio"), mask),
        "max_ratio": _most(columns.get("importance_ratio"), mask),
        "max_entropy": _most(columns.get("entropy"), mask),
        "mean_entropy": _mean(columns.get("entropy"), mask),
        "disagreement": disagreement(record),
        "images": len(fields.get("images") or ()),
    }


def _finite(values: Any, mask: Any) -> Any:
    chosen = np.zeros(0) if values is None else values[mask]
    return chosen[np.isfinite(chosen)]


def _most(values: Any, mask: Any) -> float | None:
    finite = _finite(values, mask)
    return float(finite.max()) if len(finite) else None


def _mean(values: Any, mask: Any) -> float | None:
    finite = _finite(values, mask)
    return float(finite.mean(dtype=np.float64)) if len(finite) else None


def find(query: str, ids: Sequence[NDArray[np.int64]], texts: Mapping[int, str]) -> list[tuple[int, int]]:
    """Find (sample, token) of the first match in each sample. The query is text or a sequence of token ids.

    >>> find("6 2", [np.array([1, 6, 2]), np.array([6, 6])], {})
    [(0, 1)]
    """
    wanted = query.strip()
    found: dict[int, int] = {}
    if _IDS.fullmatch(wanted):
        numbers = np.array([int(part) for part in re.split(r"[\s,]+", wanted)])
        found |= {i: at for i, own in enumerate(ids) if (at := _find_ids(own, numbers)) >= 0}
    if wanted and texts:
        needle = query.casefold() if wanted != query else wanted.casefold()
        for i, own in enumerate(ids):
            if i not in found and (at := _find_text(own, needle, texts)) >= 0:
                found[i] = at
    return sorted(found.items())


def _find_ids(own: NDArray[np.int64], wanted: NDArray[np.int64]) -> int:
    last = len(own) - len(wanted) + 1
    if last < 1:
        return -1
    same = np.ones(last, np.bool_)
    for offset, number in enumerate(wanted):
        same &= own[offset : offset + last] == number
    at = np.flatnonzero(same)
    return int(at[0]) if len(at) else -1


def _find_text(own: NDArray[np.int64], needle: str, texts: Mapping[int, str]) -> int:
    """Return the token in which the text begins, -1 if it does not occur."""
    pieces = [texts.get(i, "").casefold() for i in own.tolist()]
    at = "".join(pieces).find(needle)
    if at < 0:
        return -1
    # Pieces of lengths [2, 0, 3] end at [2, 2, 5]: character 2 belongs to token 2, past the empty piece.
    ends = np.cumsum([len(piece) for piece in pieces])
    return int(np.searchsorted(ends, at, side="right"))


# ------------------------------------------------------------------ the tree of a group


@dataclass(frozen=True, slots=True)
class Branch:
    """Tokens that a set of rollouts of a group shares, after those of the parent."""

    parent: int
    """Index of the branch it follows; -1 for the first."""
    start: int
    """Position of its first token in each of its members."""
    end: int
    members: tuple[int, ...]
    """Indexes of the rollouts that contain it."""


def branches(sequences: Sequence[NDArray[np.int64]]) -> list[Branch]:
    """Build the tree of token sequences, parents before children, members in the given order.

    >>> a, b, c = (np.array(ids) for ids in ([1, 2, 3], [1, 2, 4, 5], [1, 2, 4, 6]))
    >>> [(one.parent, one.start, one.end, one.members) for one in branches([a, b, c])]
    [(-1, 0, 2, (0, 1, 2)), (0, 2, 3, (0,)), (0, 2, 3, (1, 2)), (2, 3, 4, (1,)), (2, 3, 4, (2,))]
    """
    found: list[Branch] = []
    waiting = [(-1, 0, tuple(range(len(sequences))))]
    while waiting and len(found) < MAX_NODES:
        parent, start, members = waiting.pop(0)
        end = start + _common([sequences[m][start:] for m in members])
        if end > start or len(members) == 1:
            found.append(Branch(parent, start, end, members))
            parent = len(found) - 1
        if len(members) > 1:
            waiting = [(parent, end, own) for own in _split(sequences, members, end)] + waiting
    return found


def _common(rests: list[NDArray[np.int64]]) -> int:
    """Return the length of the common prefix."""
    length = min(len(rest) for rest in rests)
    differs = np.zeros(length, np.bool_)
    for rest in rests[1:]:
        differs |= rest[:length] != rests[0][:length]
    at = np.flatnonzero(differs)
    return int(at[0]) if len(at) else length


def _split(sequences: Sequence[NDArray[np.int64]], members: tuple[int, ...], at: int) -> list[tuple[int, ...]]:
    """Group members by their next token. Each that has ended is a part of its own, so that the loop makes progress."""
    parts: dict[tuple[str, int], list[int]] = {}
    for member in members:
        rest = sequences[member]
        key = ("next", int(rest[at])) if at < len(rest) else ("ended", member)
        parts.setdefault(key, []).append(member)
    return [tuple(own) for own in parts.values()]
