"""Compute log-probabilities and entropy of a micro-batch's tokens from its logits, without a float32 copy of them.

The logits of a token predict the next one. Within a packed row the next token may belong to another sample, so the
shift is per segment: the first token of every sample has no prediction and gets that of a uniform model, log(1/V)
with entropy log(V). It is never trained, so the value is only a filler:

    tokens            a b c | x y         lengths [3, 2]
    predicted by      - a b | -  x        row r - 1 of the logits predicts token r, except where a segment starts

In a forest the logits of one place predict the next token of every sample that passes through it. `predictions` maps
rows of logits to tokens, and a prediction shared by several samples is computed once.

Logits are the largest tensor of a training step (8,192 tokens x 151,936 ids in bfloat16 are 2.5 GB; one float32 copy
is another 5 GB, and a log-softmax keeps a third for its backward pass). This module widens one chunk of
tokens at a time, and the backward pass recomputes the softmax instead of storing it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

try:
    import torch
    from torch import Tensor
except ImportError as error:
    from penstock.extras import missing

    raise missing("penstock.train.logits", error) from None

from penstock.errors import InvalidInput
from penstock.train.tensors import checked_lengths

CHUNK = 1024
"""Tokens widened to float32 at a time."""


def token_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    sequence_lengths: Tensor,
    temperatures: Tensor | None = None,
    *,
    kept: tuple[Tensor, Tensor] | None = None,
    predictions: Predictions | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Return log-probability and entropy of every token, both in the shape of `token_ids`, in float32.

    Logits are [T, V], or [1, T, V] as models return them; token ids and temperatures are [T] or [1, T]. Logits are
    divided by the temperature each token was sampled with. Both results are differentiable.

    `kept` has the ids that the sampler kept for each token (top-p, top-k, min-p) as values [N] and offsets [T + 1];
    both results then refer to the distribution over these ids, as the sampler's do. `kept_of(tensors)` returns them. A
    token with an empty set was drawn from all ids.

    `predictions` describe a micro-batch with a forest (`predictions_of(tensors)`). Logits are then [R, V], for the
    places it names, and tokens without a prediction get the filler of first tokens.

    >>> logits = torch.zeros(1, 4, 8)
    >>> logprobs, entropy = token_logprobs(logits, torch.tensor([3, 1, 5, 2]), torch.tensor([2, 2]))
    >>> bool(torch.allclose(logprobs, -torch.full((4,), 8.0).log()))
    True
    """
    count = token_ids.numel()
    rows_needed = count if predictions is None else len(predictions.places)
    if not all(_is_row(x, count) for x in (token_ids, temperatures)) or not _is_row(logits[..., 0], rows_needed):
        given = "" if temperatures is None else f" and temperatures {tuple(temperatures.shape)}"
        raise InvalidInput(
            f"logits {tuple(logits.shape)} for token_ids {tuple(token_ids.shape)}{given}; give one row: [T, V] or "
            "[1, T, V] for [T] or [1, T]" + ("" if predictions is None else f", with T = {rows_needed} for logits")
        )
    checked_lengths(sequence_lengths, count)
    rows = logits.reshape(-1, logits.shape[-1])
    scale = None if temperatures is None else temperatures.reshape(-1).to(rows.device, torch.float32).reciprocal()
    sets, ids = Kept.of(kept, count, rows.device), _checked_ids(token_ids.reshape(-1), rows.shape[-1])
    if predictions is None:
        starts = starts_of(sequence_lengths).to(rows.device)
        logprobs, entropy = _Chunked.apply(rows, ids, starts, scale, sets, None, chunk)
    else:
        logprobs, entropy = _of_forest(rows, ids, scale, sets, predictions, chunk)
    return logprobs.view(token_ids.shape), entropy.view(token_ids.shape)


def _checked_ids(ids: Tensor, vocabulary: int) -> Tensor:
    """Return the ids, or raise if the logits lack one. On a GPU the kernel raises: to look would make the host wait."""
    if ids.device.type == "cpu" and len(ids) and int(ids.max()) >= vocabulary:
        raise InvalidInput(
            f"token_ids[{int(ids.argmax())}]: id {int(ids.max())} for logits of {vocabulary} tokens; use the same "
            "vocabulary in sampler and trainer"
        )
    return ids


def _is_row(values: Tensor | None, count: int) -> bool:
    return values is None or values.shape in ((count,), (1, count))


def _of_forest(
    logits: Tensor,
    ids: Tensor,
    scale: Tensor | None,
    kept: Kept | None,
    predictions: Predictions,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Compute each distinct prediction once, then copy it to every token it applies to."""
    once = predictions.tokens
    found = _Chunked.apply(
        logits,
        ids[once],
        torch.zeros_like(once, dtype=torch.bool),
        None if scale is None else scale[once],
        None if kept is None else kept.of_tokens(once),
        predictions.rows,
        chunk,
    )
    unknown = math.log(logits.shape[-1])
    logprobs, entropy = (
        torch.cat([one, one.new_full((1,), rest)])[
            predictions.spread
        ]  # -1, "no prediction", indexes the appended filler
        for one, rest in zip(found, (-unknown, unknown), strict=True)
    )
    return logprobs, entropy


def starts_of(sequence_lengths: Tensor) -> Tensor:
    """Return [T] flags, True on the first token of every segment, padding included.

    >>> starts_of(torch.tensor([3, 1, 2])).int().tolist()
    [1, 0, 0, 1, 1, 0]
    """
    lengths = checked_lengths(sequence_lengths)
    starts = torch.zeros(int(lengths.sum()), dtype=torch.bool, device=sequence_lengths.device)
    starts[torch.from_numpy(lengths.cumsum() - lengths).to(starts.device)] = True
    return starts


class _Chunked(torch.autograd.Function):  # type: ignore[misc]
    """Row r - 1 of the logits predicts token r unless r starts a segment, as token 0 does. With `rows`, row rows[r]."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        token_ids: Tensor,
        starts: Tensor,
        scale: Tensor | None,
        kept: Kept | None,
        rows: Tensor | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        count, vocabulary = len(token_ids), logits.shape[-1]
        wide = torch.promote_types(logits.dtype, torch.float32)
        logprobs = torch.full((count,), -math.log(vocabulary), dtype=wide, device=logits.device)
        entropy = torch.full_like(logprobs, math.log(vocabulary))
        norms = torch.zeros_like(logprobs)
        for a, b in chunks_of(count, chunk, rows):
            z = _predicted(logits, rows, scale, kept, a, b, wide)
            norm = z.logsumexp(-1)
            own = z.gather(-1, token_ids[a:b, None]).squeeze(-1) - norm
            # sum p * z, with the softmax written over z's own memory
            mean = torch.einsum("tv,tv->t", (z - norm[:, None]).exp_(), z)
            logprobs[a:b] = torch.where(starts[a:b], logprobs[a:b], own)
            entropy[a:b] = torch.where(starts[a:b], entropy[a:b], norm - mean)
            norms[a:b] = norm
        ctx.save_for_backward(logits, token_ids, starts, scale, rows, norms, entropy)
        ctx.kept, ctx.chunk = kept, chunk
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, token_ids, starts, scale, rows, norms, entropy = ctx.saved_tensors
        to_logprob, to_entropy = (grad.masked_fill(starts, 0.0) for grad in grads)
        out = torch.zeros_like(logits)
        for a, b in chunks_of(len(token_ids), ctx.chunk, rows):
            log_p = _predicted(logits, rows, scale, ctx.kept, a, b, norms.dtype) - norms[a:b, None]
            p = log_p.exp()
            # d logprob = onehot - p ; d entropy = -p * (log p + H)
            grad = -p * (to_logprob[a:b, None] + to_entropy[a:b, None] * (log_p + entropy[a:b, None]))
            grad.scatter_add_(-1, token_ids[a:b, None], to_logprob[a:b, None])
            if scale is not None:
                grad *= scale[a:b, None]
            add_to_rows(out, rows, a, b, grad)
        return out, None, None, None, None, None, None


def chunks_of(count: int, chunk: int, rows: Tensor | None = None) -> list[tuple[int, int]]:
    """Cut tokens into (start, stop) chunks. Without `rows` token 0 is skipped: no logits precede it."""
    return [(a, min(a + chunk, count)) for a in range(int(rows is None), count, chunk)]


def rows_of(logits: Tensor, rows: Tensor | None, a: int, b: int) -> Tensor:
    """Return the logits that predict tokens a to b: one row earlier, or the ones `rows` names."""
    return logits[a - 1 : b - 1] if rows is None else logits[rows[a:b]]


def add_to_rows(out: Tensor, rows: Tensor | None, a: int, b: int, grad: Tensor) -> None:
    """Write the gradient of tokens a to b to the rows of their logits."""
    if rows is None:
        out[a - 1 : b - 1] = grad
    else:
        # Added, not assigned: one row may predict several tokens.
        out.index_add_(0, rows[a:b], grad.to(out.dtype))


def _predicted(
    logits: Tensor,
    rows: Tensor | None,
    scale: Tensor | None,
    kept: Kept | None,
    a: int,
    b: int,
    wide: torch.dtype,
) -> Tensor:
    """Return the logits tokens a to b were drawn from: at their temperature, over the kept ids."""
    z = widened(rows_of(logits, rows, a, b), scale, a, b, wide)
    return z if kept is None else kept.only(z, a, b)


def widened(rows: Tensor, scale: Tensor | None, a: int, b: int, wide: torch.dtype) -> Tensor:
    """Convert logits of tokens a to b to at least float32 and divide them by each token's temperature."""
    # A vocabulary may be restricted with -inf. 0 * -inf would be NaN in the entropy, 0 * the smallest number is 0.
    z = rows.to(wide).clamp_min(lowest(wide))
    return z if scale is None else z * scale[a:b, None].to(wide)


# ------------------------------------------------------------------ predictions of a forest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predictions:
    """T tokens of samples, E predictions, from the logits of R places.

    Where samples continue with the same token at the same temperature, the prediction is computed once. Where
    temperatures or kept sets differ, each sample has its own. The gradients of all tokens that share a prediction add
    up.
    """

    places: Tensor
    """[R] places whose logits are needed, ascending: the argument `logits_to_keep` of Hugging Face models."""
    rows: Tensor
    """[E] the row of these logits that makes each prediction."""
    tokens: Tensor
    """[E] the first token each prediction is for. Its id, temperature and kept set apply to all of them."""
    spread: Tensor
    """[T] the prediction of each token, -1 for none."""

    @property
    def row_of_token(self) -> Tensor:
        """[T] the row of logits that predicts each token, -1 for none."""
        return torch.cat([self.rows, self.rows.new_full((1,), -1)])[self.spread]


def predictions_of(tensors: Mapping[str, Tensor], *, needed: Tensor | None = None) -> Predictions:
    """Find the predictions of a micro-batch with a forest: of all tokens, or those where `needed` is True.

    >>> index, sources = torch.tensor([0, 1, 2, 0, 1, 3]), torch.tensor([-1, 0, 1, 1])  # a b c | a b x
    >>> found = predictions_of({"forest.index": index, "forest.sources": sources})
    >>> found.places.tolist(), found.rows.tolist(), found.tokens.tolist(), found.spread.tolist()
    ([0, 1], [0, 1, 1], [1, 2, 5], [-1, 0, 1, -1, 0, 2])
    """
    index, sources = tensors["forest.index"], tensors["forest.sources"]
    before = sources[index]
    wanted = before >= 0 if needed is None else (before >= 0) & needed.reshape(-1)
    first = _first_alike(tensors, wanted)
    marked = torch.zeros_like(wanted)
    marked[first[wanted]] = True
    tokens = marked.nonzero()[:, 0]
    spread = torch.where(wanted, (marked.cumsum(0) - 1)[first], -1)
    is_source = torch.zeros_like(sources, dtype=torch.bool)
    is_source[before[tokens]] = True
    is_source[0] |= not len(tokens)  # keep one row even if no token is needed: backward() then has a graph
    number = is_source.cumsum(0) - 1
    return Predictions(places=is_source.nonzero()[:, 0], rows=number[before[tokens]], tokens=tokens, spread=spread)


def _first_alike(tensors: Mapping[str, Tensor], wanted: Tensor) -> Tensor:
    """Return for each token the first one at its place with the same prediction. A token with a kept set is its own."""
    index, own = tensors["forest.index"], torch.arange(len(wanted), device=wanted.device)
    alike = wanted
    if "sampling_mask_offsets" in tensors:
        alike = wanted & (tensors["sampling_mask_offsets"].diff().to(wanted.device) == 0)
    none = len(wanted)
    first = torch.full_like(tensors["forest.sources"], none)
    # The smallest token number of each place, then looked up per token. Index [0, 1, 0, 2]: first is [0, 1, 0, 3].
    first = first.scatter_reduce(0, index, torch.where(alike, own, none), "amin")[index].clamp_max(none - 1)
    if "temperatures" in tensors:
        temperatures = tensors["temperatures"].reshape(-1)
        alike = alike & (temperatures == temperatures[first])
    return torch.where(alike, first, own)


# ------------------------------------------------------------------ kept ids


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """The ids that the sampler kept for each token of a row (top-p, top-k, min-p).

    Such a sampler draws from a part of the vocabulary, and the log-probability it reports is normalized over that part.
    To compare with it, the trainer must normalize over the same ids. The sets come as the two tensors that `to_torch`
    makes of the column `sampling_mask`: token t was drawn from the ids `values[offsets[t] : offsets[t + 1]]`, or from
    all ids where that is empty.
    """

    values: Tensor
    """[N] ids, set after set."""
    offsets: Tensor
    """[T + 1] where each token's set starts. Kept on the host, so that slicing does not wait for the device."""

    @staticmethod
    def of(given: tuple[Tensor, Tensor] | None, num_tokens: int, device: torch.device) -> Kept | None:
        """Check values and offsets and wrap them. None for None."""
        if given is None:
            return None
        values, offsets = given[0].to(device, torch.int64), given[1].detach().cpu().to(torch.int64)
        sound = values.ndim == offsets.ndim == 1 and len(offsets) == num_tokens + 1
        if not sound or int(offsets[0]) != 0 or int(offsets[-1]) != len(values) or bool((offsets.diff() < 0).any()):
            raise InvalidInput(
                f"kept: values {tuple(given[0].shape)} and offsets {tuple(given[1].shape)} for {num_tokens} tokens; "
                "give [N] ids and [T + 1] offsets that rise from 0 to N"
            )
        return Kept(values, offsets)

    def of_tokens(self, tokens: Tensor) -> Kept:
        """Select the sets of some tokens, in the given order."""
        chosen = tokens.cpu()
        begins, counts = self.offsets[chosen], self.offsets.diff()[chosen]
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        # Offsets [0, 2, 2, 5] and tokens [2, 0]: counts [3, 2], new offsets [0, 3, 5], and values at [2, 3, 4, 0, 1].
        at = torch.repeat_interleave(begins - offsets[:-1], counts) + torch.arange(int(offsets[-1]))
        return Kept(self.values[at.to(self.values.device)], offsets)

    def only(self, z: Tensor, a: int, b: int) -> Tensor:
        """Set the logits of tokens a to b to the lowest value, in place, for ids outside each token's set."""
        start, stop = int(self.offsets[a]), int(self.offsets[b])
        if start == stop:
            return z
        counts = self.offsets[a : b + 1].diff()
        rows = torch.repeat_interleave(torch.arange(b - a), counts).to(z.device)
        inside = torch.zeros(z.shape, dtype=torch.bool, device=z.device)
        inside[rows, self.values[start:stop]] = True
        # An empty set means "all ids", not "none".
        inside |= (counts == 0).to(z.device)[:, None]
        return z.masked_fill_(~inside, lowest(z.dtype))


def lowest(dtype: torch.dtype) -> float:
    """Return a stand-in for -inf: its probability is 0, and 0 times it is 0 instead of NaN."""
    return float(torch.finfo(dtype).min) / 1e6


def kept_of(columns: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    """Return the sampling masks of a micro-batch as `token_logprobs` takes them, None if it has none."""
    if "sampling_mask_values" not in columns:
        return None
    return columns["sampling_mask_values"], columns["sampling_mask_offsets"]
