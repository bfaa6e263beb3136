"""Map the logits of a forest to the tokens they predict.

The logits of one place predict the next token of every sample that passes through it. Where samples continue with the
same token at the same temperature, the prediction is computed once. Where temperatures or kept sets differ, each sample
has its own. The gradients of all tokens that share a prediction add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predictions:
    """T tokens of samples, E predictions, from the logits of R places."""

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
