"""Find the first difference between two exported runs: step, sample, token and column.

Steps are compared in order, samples by id (by position without one), tokens in order. At the first token that differs,
columns are compared in table order, inputs before results. A difference in results with equal inputs comes from the
trainer; one in ids or sampler log-probabilities comes from the data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.arrays import Array, Ragged
from penstock.errors import InvalidInput
from penstock.view.reader import Export
from penstock.view.record import OF_SAMPLE, TABLE, ExportColumn, Record, Step

_FIELDS = ("staleness", *(name for name in OF_SAMPLE if name not in ("sample_id", "run_id")))
"""Compared if all tokens are equal. Without the id, which pairs samples, and the run, whose name may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first difference, and how much was the same before it."""

    what: str
    """same, steps, samples, length, field, or token."""
    sentence: str
    """The difference in a sentence."""
    steps_compared: int
    samples_compared: int
    tokens_compared: int
    step: int | None = None
    sample_id: str | None = None
    token: int | None = None
    column: str | None = None
    values: tuple[Any, Any] | None = None
    """The two values, None for null."""
    rank: int | None = None


@dataclass(slots=True)
class _Count:
    steps: int = 0
    samples: int = 0
    tokens: int = 0

    def difference(self, what: str, sentence: str, **more: Any) -> Difference:
        return Difference(
            what=what,
            sentence=sentence,
            steps_compared=self.steps,
            samples_compared=self.samples,
            tokens_compared=self.tokens,
            **more,
        )


def compare(a: Export, b: Export, *, run: str | None = None, step: int | None = None) -> Difference:
    """Find the first difference between two exports, over all finished steps or in step `step`."""
    count = _Count()
    steps = [{one.number: one for one in export.steps(run)} for export in (a, b)]
    numbers = sorted(set(steps[0]) | set(steps[1])) if step is None else [step]
    if not set(steps[0]) & set(steps[1]) & set(numbers):
        raise InvalidInput(
            f"{a.folder} and {b.folder}: no finished step in both; they have "
            f"{_listed(list(steps[0]))} and {_listed(list(steps[1]))}"
        )
    for number in numbers:
        if number not in steps[0] or number not in steps[1]:
            missing = "A" if number not in steps[0] else "B"
            sentence = f"The runs are the same up to step {number}, which {missing} has not finished."
            return count.difference("steps", sentence, step=number)
        found = _compare_steps(steps[0][number], steps[1][number], count)
        if found is not None:
            return found
        count.steps += 1
    return count.difference(
        "same",
        f"No difference in {count.steps:,} steps, {count.samples:,} samples and {count.tokens:,} tokens.",
    )


def _compare_steps(a: Step, b: Step, count: _Count) -> Difference | None:
    left, right = _by_name(a), _by_name(b)
    if left and right and not left.keys() & right.keys():
        sentence = (
            f"The runs first differ at step {a.number}: no sample of A ({next(iter(left))}, ...) has the id of one of "
            f"B ({next(iter(right))}, ...). Runs can be compared when their groups are given the same ids."
        )
        return count.difference("samples", sentence, step=a.number)
    shared = len(left.keys() & right.keys())
    for name in left:
        if name not in right:
            return _only(a.number, name, "A", shared, count)
    for name in right:
        if name not in left:
            return _only(a.number, name, "B", shared, count)
    for name, record in left.items():
        found = _compare_records(a.number, name, record, right[name], count)
        if found is not None:
            return found
        count.samples += 1
        count.tokens += record.num_tokens
    return None


def _by_name(step: Step) -> dict[str, Record]:
    """Return records by sample id. A sample trained twice in a step gets a second name."""
    found: dict[str, Record] = {}
    for record in step.records():
        name, again = record.label, 1
        while (name if again == 1 else f"{name} (use {again})") in found:
            again += 1
        found[name if again == 1 else f"{name} (use {again})"] = record
    return found


def _only(step: int, name: str, side: str, shared: int, count: _Count) -> Difference:
    both = f"{shared} samples of that step are in both" if shared != 1 else "1 sample of that step is in both"
    sentence = f"The runs first differ at step {step}: only {side} trained sample {name}; {both}."
    return count.difference("samples", sentence, step=step, sample_id=name)


def _compare_records(step: int, name: str, a: Record, b: Record, count: _Count) -> Difference | None:
    where = {"step": step, "sample_id": name, "rank": a.fields.get("rank")}
    token = _first_token(a, b)
    if token is not None:
        index, column, values = token
        shown = " against ".join("none" if value is None else str(value) for value in values)
        sentence = f"The runs first differ at step {step}, sample {name}, token {index}, in {column}: {shown}."
        return count.difference("token", sentence, token=index, column=column, values=values, **where)
    if a.num_tokens != b.num_tokens:
        sentence = f"The runs first differ at step {step}, sample {name}: {a.num_tokens} against {b.num_tokens} tokens."
        return count.difference("length", sentence, token=min(a.num_tokens, b.num_tokens) - 1, **where)
    for field in _FIELDS:
        pair = (a.fields.get(field), b.fields.get(field))
        if pair[0] != pair[1]:
            sentence = f"The runs first differ at step {step}, sample {name}, in {field}: {pair[0]} against {pair[1]}."
            return count.difference("field", sentence, column=field, values=pair, **where)
    return None


def _first_token(a: Record, b: Record) -> tuple[int, str, tuple[Any, Any]] | None:
    """Return the first token that differs in any column, and the first such column, over the common length."""
    length = min(a.num_tokens, b.num_tokens)
    best: tuple[int, str] | None = None
    own = a.own | b.own
    for column in (*TABLE, *(own[name] for name in sorted(own))):
        if column.ragged:
            differs = _differing_lists(*(_lists(record, column, length) for record in (a, b)))
        else:
            differs = _differing(_values(a, column.name, length), _values(b, column.name, length))
        if len(differs) and (best is None or differs[0] < best[0]):
            best = (int(differs[0]), column.name)
    if best is None:
        return None
    index, name = best
    return index, name, (_cell(a, name, index), _cell(b, name, index))


def _differing(left: Array, right: Array) -> Array:
    """Return the tokens that differ. Null equals null."""
    if left.shape != right.shape and 1 not in (left.shape[1], right.shape[1]):
        return np.arange(len(left))
    return np.flatnonzero(((left != right) & ~(np.isnan(left) & np.isnan(right))).any(1))


def _differing_lists(left: Ragged, right: Ragged) -> Array:
    """Return the tokens whose lists differ."""
    alike = left.lengths == right.lengths
    own, other = left.only(alike).values, right.only(alike).values
    token = np.repeat(np.arange(len(left)), np.where(alike, left.lengths, 0))
    return np.union1d(np.flatnonzero(~alike), token[(own != other) & ~(np.isnan(own) & np.isnan(other))])


def _lists(record: Record, column: ExportColumn, length: int) -> Ragged:
    """Return one list per token, empty if the record lacks the column."""
    lists: Ragged | None = record.columns.get(column.name)
    return Ragged.empty(length, column.dtypes[0]) if lists is None else lists[:length]


def _values(record: Record, name: str, length: int) -> Array:
    """Return [length, values per token], one null per token if the record lacks the column."""
    values: Array | None = record.columns.get(name)
    if values is None:
        return np.full((length, 1), np.nan)
    return values[:length].reshape(length, math.prod(values.shape[1:])).astype(np.float64)


def _cell(record: Record, name: str, index: int) -> Any:
    values = record.columns.get(name)
    if values is None:
        return None
    if isinstance(values, Ragged) or values.ndim > 1:
        return values[index].tolist()
    if values.dtype.kind == "f" and not np.isfinite(values[index]):
        return None
    # The shortest float32 text, as in the export: 0.1, not 0.10000000149 as float64 would print it.
    return float(str(values[index])) if values.dtype.kind == "f" else values[index].item()


def _listed(numbers: Sequence[int]) -> str:
    return f"steps {numbers[0]} to {numbers[-1]}" if numbers else "none"
