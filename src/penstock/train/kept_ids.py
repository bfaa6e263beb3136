"""Restrict the trainer's logits to the ids the sampler kept (top-p, top-k, min-p).

Such a sampler draws from a part of the vocabulary, and the log-probability it reports is normalized over that part. To
compare with it, the trainer must normalize over the same ids. The sets come as the two tensors that `to_torch` makes
of the column `sampling_mask`: token t was drawn from the ids
`values[offsets[t] : offsets[t + 1]]`, or from all ids where that is empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import InvalidInput


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """The sets of a row's tokens."""

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
