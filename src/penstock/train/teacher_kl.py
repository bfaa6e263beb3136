"""KL divergence between the model and a teacher known only by its k most likely tokens.

A teacher's distribution over 151,936 ids is 600 KB a token in float32; its k best ids with their log-probabilities are
8 k bytes. The total probability of all other ids is known too: 1 minus the sum. So both are compared over k + 1
buckets, the listed ids and one tail, with q of the teacher and p of the model at the same token:

    forward_kl   sum q (log q - log p)     the model covers what the teacher might say
    reverse_kl   sum p (log p - log q)     the model avoids what the teacher would not say

If k is the vocabulary size there is no tail, and these are the divergences of the full distributions. Otherwise they
are lower bounds: how the teacher spreads its tail is unknown, and the model may spread its own freely.

Logits are widened chunk by chunk and recomputed in the backward pass, as in `penstock.train.logits`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.arrays import TOPK
from penstock.errors import InvalidInput
from penstock.train.logits import CHUNK, Predictions, add_to_rows, chunks_of, rows_of, starts_of, widened
from penstock.train.loss import Columns, need, plain_terms
from penstock.train.tensors import checked_lengths
from penstock.train.terms import Terms

MIN_TAIL = 1e-6
"""The smallest tail probability of a teacher: float32 log-probabilities cannot tell less from 0."""

Divergence: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""log p and log q, both [T, buckets] -> [T]"""


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(teacher || model) over the buckets."""
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(model || teacher) over the buckets."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def topk_kl(
    logits: Tensor,
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    sequence_lengths: Tensor,
    temperatures: Tensor | None = None,
    *,
    divergence: Divergence = forward_kl,
    loss_mask: Tensor | None = None,
    predictions: Predictions | None = None,
    min_tail: float = MIN_TAIL,
    chunk: int = CHUNK,
) -> Tensor:
    """Return the divergence of every token, [T] in float32 or wider. Differentiable.

    Logits are [T, V], or [1, T, V] as models return them; ids and log-probabilities are [T, k]. Row t is the teacher's
    distribution of token t given the tokens before it, so it is compared with the logits at t - 1 of the same sample.
    The ids of a row are distinct. First tokens of samples and tokens outside `loss_mask` are 0, whatever their row
    contains.

    With the `predictions` of a micro-batch with a forest, logits are those of the places it names, and tokens without a
    prediction are 0.

    A teacher's tail below `min_tail` counts as `min_tail`. Otherwise the reverse divergence would be infinite for a
    model that puts probability outside the ids of a teacher that is certain.

    >>> logits = torch.tensor([[0.0, 0.0, 0.0], [0.0, 1.0, 2.0]])
    >>> ids, teacher = torch.tensor([[0, 1], [2, 1]]), torch.tensor([[0.5, 0.5], [0.5, 0.3]]).log()
    >>> [round(value, 4) for value in topk_kl(logits, ids, teacher, torch.tensor([2])).tolist()]
    [0.0, 0.069]
    """
    count, vocabulary, k = _checked(logits, topk_ids, topk_logprobs, predictions)
    checked_lengths(sequence_lengths, count)
    given = logits.reshape(-1, vocabulary)
    compared = ~starts_of(sequence_lengths).to(given.device)
    if loss_mask is not None:
        compared &= loss_mask.reshape(-1).to(given.device)
    rows = None
    if predictions is not None:
        rows = predictions.row_of_token
        compared &= rows >= 0
        rows = rows.clamp_min(0)  # any valid row: these tokens are not compared
    scale = None if temperatures is None else temperatures.reshape(-1).to(given.device, torch.float32).reciprocal()
    # Rows that are not compared may be NaN. Replace them before computing: NaN * 0 would be NaN in the gradient.
    known = torch.where(compared[:, None], topk_logprobs, -math.log(k + 1))

    def measure(z: Tensor, ids: Tensor, known: Tensor) -> Tensor:
        return divergence(*_buckets(z, ids, known.to(z.dtype), min_tail))

    values: Tensor = _ByChunk.apply(measure, given, rows, scale, chunk, topk_ids.long(), known)
    return torch.where(compared, values, 0.0)


def kl_to_teacher(
    logits: Tensor,
    columns: Columns,
    *,
    teacher: str = "",
    temperatures: Tensor | None = None,
    divergence: Divergence = forward_kl,
    predictions: Predictions | None = None,
    min_tail: float = MIN_TAIL,
    chunk: int = CHUNK,
) -> Tensor:
    """Compute `topk_kl` from the columns of a micro-batch, for the column `teacher_kl` of `TeacherKl`.

    Covers the tokens with `ref_kl_weights`, or all trained tokens without that column. `teacher` selects one of several
    teachers, whose columns are `teacher_topk_ids_NAME` and `teacher_topk_logprobs_NAME`. The columns may be missing if
    no token is trained by a teacher, as in a step without distillation.
    """
    mask, names = columns["loss_mask"], [f"{name}_{teacher}" if teacher else name for name in TOPK]
    if "ref_kl_weights" in columns:
        mask = mask & (columns["ref_kl_weights"] != 0)
    if not columns.keys() >= {*names} and not bool(mask.any()):
        return torch.zeros(mask.shape, dtype=torch.float32, device=logits.device)
    ids, logprobs = (need(columns, name, "kl_to_teacher") for name in names)
    return topk_kl(
        logits,
        ids,
        logprobs,
        columns["sequence_lengths"],
        temperatures,
        divergence=divergence,
        loss_mask=mask,
        predictions=predictions,
        min_tail=min_tail,
        chunk=chunk,
    )


def _checked(logits: Tensor, ids: Tensor, logprobs: Tensor, predictions: Predictions | None) -> tuple[int, int, int]:
    """Check shapes. Returns the numbers of tokens, vocabulary ids and k."""
    vocabulary, rows = logits.shape[-1], math.prod(logits.shape[:-1])
    one_row = logits.shape[:-1] in ((rows,), (1, rows))
    count = rows if predictions is None else len(predictions.spread)
    if predictions is not None:
        one_row = one_row and rows == len(predictions.places)
    if not one_row or ids.ndim != 2 or ids.shape != logprobs.shape or len(ids) != count:
        raise InvalidInput(
            f"logits {tuple(logits.shape)} for ids {tuple(ids.shape)} and log-probabilities {tuple(logprobs.shape)} of "
            "a teacher; give one row: [T, V] or [1, T, V] for [T, k] and [T, k]"
        )
    if not 0 < ids.shape[1] <= vocabulary:
        raise InvalidInput(f"ids {tuple(ids.shape)} of a teacher: k must be from 1 to the vocabulary, {vocabulary}")
    return count, vocabulary, ids.shape[1]


def _buckets(z: Tensor, ids: Tensor, known: Tensor, min_tail: float) -> tuple[Tensor, Tensor]:
    """Return log p and log q of the listed ids and, unless all ids are listed, of the tail: [T, k + 1]."""
    norm = z.logsumexp(-1, keepdim=True)
    listed = z.gather(-1, ids) - norm
    if ids.shape[-1] == z.shape[-1]:
        return listed, known
    # Not 1 - sum p: that has no digits left where the model's tail is small.
    tail = z.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True) - norm
    rest = (1 - known.exp().sum(-1, keepdim=True)).clamp_min(min_tail).log()
    return torch.cat([listed, tail], -1), torch.cat([known, rest], -1)


class _ByChunk(torch.autograd.Function):  # type: ignore[misc]
    """Applies a function of logits and per-token columns chunk by chunk. The backward pass recomputes each chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        measure: Callable[..., Tensor],
        logits: Tensor,
        rows: Tensor | None,
        scale: Tensor | None,
        chunk: int,
        *columns: Tensor,
    ) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        count = len(columns[0])
        out = torch.zeros(count, dtype=wide, device=logits.device)
        for a, b in chunks_of(count, chunk, rows):
            z = widened(rows_of(logits, rows, a, b), scale, a, b, wide)
            out[a:b] = measure(z, *(column[a:b] for column in columns))
        ctx.save_for_backward(logits, rows, scale, *columns)
        ctx.measure, ctx.chunk = measure, chunk
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, rows, scale, *columns = ctx.saved_tensors
        out = torch.zeros_like(logits)
        for a, b in chunks_of(len(columns[0]), ctx.chunk, rows):
            own = rows_of(logits, rows, a, b).detach().requires_grad_()
            with torch.enable_grad():
                z = widened(own, scale, a, b, grads[0].dtype)
                values = ctx.measure(z, *(column[a:b] for column in columns))
            add_to_rows(out, rows, a, b, *torch.autograd.grad(values, own, grads[0][a:b]))
        return None, out, None, None, None, *(None for _ in columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherKl:
    """The loss over `topk_kl`, passed in as the column `teacher_kl` because it is computed from logits.

    Needs no sampler log-probabilities: there is no ratio and nothing is masked. As `ref_kl` of `ByMode` it trains the
    tokens with `ref_kl_weights`.

    >>> columns = {"loss_mask": torch.tensor([False, True]), "teacher_kl": torch.tensor([0.0, 0.25])}
    >>> TeacherKl()(columns, torch.tensor([0.0, -1.0])).loss.tolist()
    [0.0, 0.25]
    """

    def __call__(self, columns: Columns, trainer_logprobs: Tensor, entropy: Tensor | None = None) -> Terms:
        divergence, mask = need(columns, "teacher_kl", "TeacherKl"), columns["loss_mask"]
        if divergence.shape != mask.shape:
            raise InvalidInput(f"teacher_kl: shape {list(divergence.shape)} for a loss_mask {list(mask.shape)}")
        return plain_terms(columns, torch.where(mask, divergence, 0.0), trainer_logprobs, entropy)
