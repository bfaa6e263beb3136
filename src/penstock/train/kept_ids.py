"""Kept sets at the trainer: logits of ids that the sampler had left out are taken out here too.

A sampler with top-p, top-k or min-p draws from a part of the vocabulary, and the log-probability it reports is
normalized over that part. The trainer compares with it, so it must normalize over the same ids. Sets come as the two
tensors that `to_torch` makes of the column `sampling_mask`: token t was drawn from the ids
`values[offsets[t] : offsets[t + 1]]`, or from all ids where there are none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from penstock.errors import InvalidInput


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """The sets of a row's tokens."""

    values: torch.Tensor
    """[N] ids, set after set."""
    offsets: torch.Tensor
    """[T + 1] on the host: where each token's set starts."""

    @staticmethod
    def of(given: tuple[torch.Tensor, torch.Tensor] | None, num_tokens: int, device: torch.device) -> Kept | None:
        """The sets given as values and offsets; None where none were."""
        if given is None:
            return None
        values, offsets = given[0].to(device, torch.int64), given[1].detach().cpu().to(torch.int64)
        sound = values.ndim == offsets.ndim == 1 and len(offsets) == num_tokens + 1
        if not sound or int(offsets[0]) != 0 or int(offsets[-1]) != len(values) or bool((offsets.diff() < 0).any()):
            raise InvalidInput(
                f"kept: values {tuple(given[0].shape)} and offsets {tuple(given[1].shape)} for {num_tokens} tokens; "
                "give [N] ids, and [T + 1] offsets that rise from 0 to N"
            )
        return Kept(values, offsets)

    def of_tokens(self, tokens: torch.Tensor) -> Kept:
        """The sets of some of the tokens, in their order."""
        chosen = tokens.cpu()
        begins, counts = self.offsets[chosen], self.offsets.diff()[chosen]
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        at = torch.repeat_interleave(begins - offsets[:-1], counts) + torch.arange(int(offsets[-1]))
        return Kept(self.values[at.to(self.values.device)], offsets)

    def only(self, z: torch.Tensor, a: int, b: int) -> torch.Tensor:
        """The logits that predict tokens a to b, with those of ids outside their sets at the lowest there is."""
        start, stop = int(self.offsets[a]), int(self.offsets[b])
        if start == stop:
            return z
        counts = self.offsets[a : b + 1].diff()
        rows = torch.repeat_interleave(torch.arange(b - a), counts).to(z.device)
        inside = torch.zeros(z.shape, dtype=torch.bool, device=z.device)
        inside[rows, self.values[start:stop]] = True
        inside |= (counts == 0).to(z.device)[:, None]
        return z.masked_fill_(~inside, lowest(z.dtype))


def lowest(dtype: torch.dtype) -> float:
    """What stands for -inf: a probability of it is 0, and 0 times it is 0 and not NaN."""
    return float(torch.finfo(dtype).min) / 1e6


def kept_of(columns: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The sampling masks among the tensors of a micro-batch, as `token_logprobs` takes them; None if there are none."""
    if "sampling_mask_values" not in columns:
        return None
    return columns["sampling_mask_values"], columns["sampling_mask_offsets"]
