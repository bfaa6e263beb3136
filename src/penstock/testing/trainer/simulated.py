"""A simulated trainer: the gradient of a step as a right trainer would compute it, and as a wrong one would.

    rows       a micro-batch becomes arrays. A bug may change any of them, or where a sample begins
    passes     every sample goes through the reference alone: log-probabilities, and gradients on demand
    losses     d loss / d log-probability of every token, in numpy and float64
    weights    every trained token counts 1 / trained tokens of the step, or what a bug makes of that

A `Hypothesis` is a bug in this form. Several can be applied at once.
"""

# ruff: noqa: ARG001   (functions of one kind have one signature, whether or not they need all of it)
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.packing import MicroBatch, PackedStep
from penstock.testing.trainer.reference import Reference, Sequence1, Vector

Columns: TypeAlias = Mapping[str, NDArray[Any]]
Per: TypeAlias = Literal["token", "sample"]
Mask: TypeAlias = NDArray[np.bool_]


class Fix:
    """What to do about a bug, where several findings say the same."""

    MASK = "train exactly the tokens whose loss_mask is True; loss_mask[t] is about token t, which logits t - 1 predict"
    ADVANTAGES = "multiply the loss of token t with advantages[t] as it is given"
    TEMPERATURES = "divide the logits that predict token t by temperatures[t] before the softmax"
    SHIFT = "the logits of token t - 1 predict token t: shift once"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A micro-batch as arrays."""

    columns: dict[str, NDArray[Any]]
    """[T] each; floats in float64."""
    bounds: tuple[tuple[int, int], ...]
    """Where each sequence begins and ends for the model. Padding is the last one."""
    samples: tuple[tuple[int, int], ...]
    """Where each sample begins and ends for the loss, without padding."""
    shift: int = 1
    across: bool = False
    """Whether the first token of a sample is predicted by the last one of the sample before."""
    dummy: bool = False

    @property
    def mask(self) -> NDArray[np.bool_]:
        return self.columns["loss_mask"]

    @property
    def size(self) -> int:
        return len(self.columns["token_ids"])

    def with_columns(self, **columns: NDArray[Any]) -> Row:
        return replace(self, columns={**self.columns, **columns})

    @staticmethod
    def of(batch: MicroBatch) -> Row:
        columns = {}
        for name, cells in batch.columns.items():
            if not isinstance(cells, np.ndarray) or cells.ndim != 1:
                continue
            kind = np.float64 if cells.dtype.kind == "f" else np.int64 if cells.dtype.kind in "iu" else cells.dtype
            columns[name] = cells.astype(kind)
        columns.setdefault("temperatures", np.ones(len(columns["token_ids"])))
        ends = np.cumsum(batch.sequence_lengths).tolist()
        bounds = tuple(zip([0, *ends[:-1]], ends, strict=True))
        samples = () if batch.is_dummy else bounds[: batch.sample_count]
        return Row(columns=columns, bounds=bounds, samples=samples, dummy=batch.is_dummy)


def spans_of(mask: Mask) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def spread(values: Vector, row: Row, pick: Callable[[Vector], float]) -> Vector:
    out = values.copy()
    for a, b in row.samples:
        out[a:b] = pick(values[a:b])
    return out


Rows: TypeAlias = tuple[tuple["Row", ...], ...]
"""By rank and micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a row is in its step."""

    step: PackedStep
    rank: int
    index: int
    row: Row
    rows: Rows
    per: Per

    @property
    def world(self) -> int:
        return len(self.rows)

    @property
    def own(self) -> tuple[Row, ...]:
        """The rows of this rank."""
        return self.rows[self.rank]

    @property
    def right(self) -> Vector:
        """[T] The right weight of every token."""
        if self.per == "token":
            return np.full(self.row.size, self.step.denominators.per_loss_token)
        weights = np.zeros(self.row.size)
        for a, b in self.row.samples:
            weights[a:b] = 1.0 / max(int(self.row.mask[a:b].sum()), 1) / max(self.step.denominators.samples, 1)
        return weights


Push: TypeAlias = Callable[[Columns, Vector, Vector], tuple[Vector, Vector | None]]
"""columns, log-probabilities and entropies of one sample -> d loss / d of both, before any division; None for zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """One bug, as a change of the simulated trainer."""

    name: str
    fix: str
    row: Callable[[Row], Row] | None = None
    rows: Callable[[Rows], Rows] | None = None
    """Changes all rows of a step at once."""
    push: Callable[[Columns, Vector, Vector], Vector] | None = None
    """columns, log-probabilities, right coefficients -> wrong coefficients of one sample."""
    weights: Callable[[Place], Vector | float] | None = None
    """The weight of every token in place of the right one."""
    recount: bool = False
    """Whether tokens are counted after `row` changed the mask."""
    entropy: float = 0.0
    """Weight of the entropy that is added to the loss."""
    by_row: bool = False
    """Whether `push` gets a row at a time, not a sample."""
    after: Callable[[Vector], Vector] | None = None
    """Changes the gradient of the step."""
    after_rank: Callable[[Vector], Vector] | None = None
    """Changes the gradient of each rank, before they are averaged."""
    after_batch: Callable[[Vector], Vector] | None = None
    """Changes the gradient of each micro-batch, before it is added."""
    order: int = 0
    """Between hypotheses that explain equally well the lowest comes first."""


@dataclass(slots=True, kw_only=True)
class Simulator:
    """Predicts gradients of steps."""

    reference: Reference
    push: Push
    per: Per
    _rows: dict[int, tuple[PackedStep, Rows]] = field(default_factory=dict)

    def gradient(self, step: PackedStep, bugs: Sequence[Hypothesis] = ()) -> Vector:
        """Return the gradient of a step, by a trainer with these bugs."""
        right = self.rows(step)
        rows = _changed(right, bugs)
        recount = any(bug.recount for bug in bugs)
        ranks = np.zeros((len(rows), self.reference.flat.size))
        for rank, index, row in _enumerated(rows):
            if not row.mask.any():
                continue
            place = Place(step=step, rank=rank, index=index, row=right[rank][index], rows=right, per=self.per)
            weights = self._weights(place, bugs) * (_recounted(place, rows) if recount else 1.0)
            own = self._pulled(row, weights, bugs)
            for bug in bugs:
                own = bug.after_batch(own * len(rows)) / len(rows) if bug.after_batch else own
            ranks[rank] += own
        for bug in bugs:
            if bug.after_rank is not None:  # a rank has its part times the number of ranks, until they are averaged
                ranks = np.stack([bug.after_rank(own * len(rows)) / len(rows) for own in ranks])
        total: Vector = ranks.sum(axis=0)
        for bug in bugs:
            total = bug.after(total) if bug.after else total
        return total

    def coefficients_of(self, row: Row) -> Vector:
        """Return the right coefficients of a row's tokens, with their weight in a step of this row alone."""
        logprobs, entropies = self._passes(row, list(_sequences(row)))
        count = max(int(row.mask.sum()), 1)
        return self._coefficients(row, logprobs, entropies, ())[0] / count

    def loss_of(self, step: PackedStep, loss: Any) -> float:
        """Return the right loss of a step of one sample, by the loss function itself."""
        import torch

        (row,) = self.rows(step)[0]
        a, b = row.samples[0]
        passes = [torch.from_numpy(values[a:b].copy()) for values in self._passes(row, list(_sequences(row)))]
        terms = loss(_tensors({name: values[a:b] for name, values in row.columns.items()}), *passes)
        return float(getattr(terms, "loss", terms).sum()) / max(int(row.mask.sum()), 1)

    def unit(self, row: Row, token: int) -> Vector:
        """Return the gradient of one token's log-probability."""
        for a, b, sequence in _sequences(row):
            if a <= token < b:
                return self.reference.pull(sequence, np.eye(b - a)[token - a])
        raise IndexError(token)

    def share(self, step: PackedStep, sample: str) -> Vector:
        """Return one sample's part of the right gradient of a step."""
        total = np.zeros(self.reference.flat.size)
        rows = self.rows(step)
        for rank, index, row in _enumerated(rows):
            place = Place(step=step, rank=rank, index=index, row=row, rows=rows, per=self.per)
            for (a, b), segment in zip(row.samples, step.ranks[rank][index].segments, strict=True):
                if segment.id == sample:
                    own = (np.arange(row.size) >= a) & (np.arange(row.size) < b)
                    only = row.with_columns(loss_mask=row.mask & own)
                    total += self._pulled(only, place.right, ()) if only.mask.any() else 0.0
        return total

    def rows(self, step: PackedStep) -> Rows:
        if id(step) not in self._rows:
            self._rows[id(step)] = (step, tuple(tuple(Row.of(batch) for batch in rank) for rank in step.ranks))
        return self._rows[id(step)][1]

    def _weights(self, place: Place, bugs: Sequence[Hypothesis]) -> Vector:
        weights = place.right
        for bug in bugs:
            if bug.weights is not None:
                wrong = np.broadcast_to(bug.weights(place), weights.shape)
                weights = weights * np.divide(wrong, place.right, out=np.zeros_like(weights), where=place.right != 0)
        return weights

    def _pulled(self, row: Row, weights: Vector, bugs: Sequence[Hypothesis]) -> Vector:
        sequences = list(_sequences(row))
        logprobs, entropies = self._passes(row, sequences)
        pushed, rest = self._coefficients(row, logprobs, entropies, bugs)
        total = np.zeros(self.reference.flat.size)
        done = 0
        for a, b, sequence in sequences:
            start = max(a, done)
            own = np.zeros(b - a)
            own[start - a :] = (pushed * weights)[start:b]
            total += self.reference.pull(sequence, own)
            if np.any(rest[start:b]):
                own[start - a :] = (rest * weights)[start:b]
                total += self.reference.pull_entropy(sequence, own)
            done = b
        return total

    def _passes(self, row: Row, sequences: Sequence[tuple[int, int, Sequence1]]) -> tuple[Vector, Vector]:
        logprobs, entropies = np.zeros(row.size), np.zeros(row.size)
        for a, b, sequence in sequences:
            if row.mask[a:b].any():
                start = a + row.shift if row.across and a else a
                logprobs[start:b] = self.reference.logprobs(sequence)[start - a :]
                entropies[start:b] = self.reference.entropies(sequence)[start - a :]
        return logprobs, entropies

    def _coefficients(
        self, row: Row, logprobs: Vector, entropies: Vector, bugs: Sequence[Hypothesis]
    ) -> tuple[Vector, Vector]:
        out, rest = np.zeros(row.size), np.zeros(row.size)
        parts = (*row.samples, (row.samples[-1][1], row.size)) if row.samples else ()
        for a, b in ((0, row.size),) if any(bug.by_row for bug in bugs) else parts or ((0, row.size),):
            columns = {name: values[a:b] for name, values in row.columns.items()}
            mask = columns["loss_mask"]
            if not mask.any():
                continue
            with np.errstate(over="ignore", invalid="ignore"):
                pushed, of_entropy = self.push(columns, logprobs[a:b], entropies[a:b])
                for bug in bugs:
                    pushed = bug.push(columns, logprobs[a:b], pushed) if bug.push else pushed
            out[a:b] = np.where(mask, pushed, 0.0)
            rest[a:b] = np.where(mask, 0.0 if of_entropy is None else of_entropy, 0.0)
            rest[a:b] += np.where(mask, sum(bug.entropy for bug in bugs), 0.0)
        return out, rest


def _changed(rows: Rows, bugs: Sequence[Hypothesis]) -> Rows:
    for bug in bugs:
        rows = bug.rows(rows) if bug.rows else rows
        if bug.row is not None:
            rows = tuple(tuple(bug.row(row) for row in rank) for rank in rows)
    return rows


def _enumerated(rows: Sequence[Sequence[Row]]) -> Iterator[tuple[int, int, Row]]:
    return ((rank, index, row) for rank, own in enumerate(rows) for index, row in enumerate(own))


def _recounted(place: Place, rows: Sequence[Sequence[Row]]) -> float:
    counted = sum(int(row.mask.sum()) for own in rows for row in own)
    return place.step.loss_tokens / max(counted, 1) if place.per == "token" else 1.0


def _sequences(row: Row) -> Iterator[tuple[int, int, Sequence1]]:
    """Yield the sequences of a row as the model sees them, (start, stop) with the target that may follow."""
    for a, b in row.bounds:
        stop = min(b + row.shift, row.size) if row.across else b
        yield (
            a,
            stop,
            Sequence1(
                token_ids=row.columns["token_ids"][a:stop],
                positions=row.columns["position_ids"][a:stop],
                temperatures=row.columns["temperatures"][a:stop],
                shift=row.shift,
            ),
        )


# ------------------------------------------------------------------ losses


def push_of(loss: Any) -> Push:
    """Return the coefficients of a loss: by a formula of our own for the known ones, else by its derivative."""
    formulas = {"Grpo": _ppo, "Dppo": _dppo, "Ipo": _ipo, "Sft": _sft}
    formula = formulas.get(type(loss).__name__) if type(loss).__module__ == "penstock.train.loss" else None
    return formula(loss) if formula else _derived(loss)


def _ppo(loss: Any) -> Push:
    def push(columns: Columns, logprobs: Vector, entropies: Vector) -> tuple[Vector, None]:
        ratio, advantages = np.exp(logprobs - columns["logprobs"]), columns["advantages"]
        clipped = ((advantages > 0) & (ratio > 1 + loss.high)) | ((advantages < 0) & (ratio < 1 - loss.low))
        pushed = np.where(clipped, 0.0, -advantages * ratio)
        if loss.beta:
            pushed = pushed + loss.beta * (1 - np.exp(columns["teacher_logprobs"] - logprobs))
        return pushed, None

    return push


def _dppo(loss: Any) -> Push:
    def push(columns: Columns, logprobs: Vector, entropies: Vector) -> tuple[Vector, None]:
        gap, advantages = logprobs - columns["logprobs"], columns["advantages"]
        moved = np.exp(logprobs) - np.exp(columns["logprobs"])
        masked = np.where(advantages > 0, moved > loss.high, moved < -loss.low)
        return np.where(masked, 0.0, -loss.adv_tau * advantages * np.exp(gap)) + 2 * loss.kl_tau * gap, None

    return push


def _ipo(loss: Any) -> Push:
    def push(columns: Columns, logprobs: Vector, entropies: Vector) -> tuple[Vector, None]:
        gap = logprobs - columns["logprobs"]
        masked = np.abs(np.exp(logprobs) - np.exp(columns["logprobs"])) > loss.threshold
        pushed = np.where(masked, 0.0, -loss.adv_tau * columns["advantages"] * np.exp(gap))
        return pushed + 2 * loss.kl_tau * gap, None

    return push


def _sft(loss: Any) -> Push:
    def push(columns: Columns, logprobs: Vector, entropies: Vector) -> tuple[Vector, None]:
        return -np.ones(len(logprobs)), None

    return push


def _tensors(columns: Columns) -> dict[str, Any]:
    """The columns of one sample, as a loss gets them."""
    import torch

    tensors = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in columns.items()}
    tensors["sequence_lengths"] = torch.tensor([len(columns["token_ids"])], dtype=torch.int32)
    return tensors


def _derived(loss: Any) -> Push:
    def push(columns: Columns, logprobs: Vector, entropies: Vector) -> tuple[Vector, Vector]:
        import torch

        inputs = [torch.from_numpy(values.copy()).requires_grad_() for values in (logprobs, entropies)]
        terms = loss(_tensors(columns), *inputs)
        total = getattr(terms, "loss", terms).sum()
        found = torch.autograd.grad(total, inputs, allow_unused=True) if total.requires_grad else (None, None)
        first, second = (np.zeros(len(logprobs)) if g is None else g.numpy() for g in found)
        return first, second

    return push
