"""The smallest language model worth timing a training step of: two layers of width 256 over 8,192 ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock.packing import MicroBatch
from penstock.train.logits import token_logprobs
from penstock.train.loss import ByMode
from penstock.train.tensors import to_torch
from penstock.train.terms import Terms

VOCABULARY = 8_192


class TinyLm(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, width: int = 256, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.embed = torch.nn.Embedding(VOCABULARY, width)
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, VOCABULARY, bias=False)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        causal = torch.nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.layers(self.embed(ids), mask=causal, is_causal=True))


def train(model: Any, batches: Sequence[MicroBatch]) -> list[tuple[MicroBatch, Terms]]:
    """Forward and backward over the micro-batches; what an exporter would be fed."""
    fed = []
    model.zero_grad()
    for batch in batches:
        columns = to_torch(batch)
        ids = columns["token_ids"] % VOCABULARY
        logprobs, entropy = token_logprobs(
            model(ids[None]), ids, columns["sequence_lengths"], columns.get("temperatures")
        )
        terms = ByMode()(columns, logprobs, entropy)
        terms.loss.sum().backward()
        fed.append((batch, terms))
    return fed
