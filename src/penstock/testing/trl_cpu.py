"""TRL's asynchronous trainer on a machine without a GPU: what it takes from one, in plain torch.

    with trl_on_cpu():
        trainer = AsyncGRPOTrainer(..., weight_transfer=NoTransfer())

For tests and first steps. TRL's attention over trees is a GPU kernel, and it asks CUDA for its peak speed; here the
first is a loop over segments and the second is unknown. Nothing else is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class NoTransfer:
    """TRL's weight transfer, to nobody: for rollouts that are there already."""

    def __init__(self) -> None:
        self.sent = 0
        """How often weights would have gone out."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        self.sent += 1
        for _ in iterator:
            pass

    def resume(self) -> None: ...
    def destroy(self) -> None: ...


@contextmanager
def trl_on_cpu() -> Iterator[None]:
    """A trainer that is made in the block works without a GPU."""
    from transformers import AttentionInterface
    from trl.experimental.async_grpo import async_grpo_trainer
    from trl.experimental.async_grpo.packing import TREE_ATTENTION

    asked = async_grpo_trainer.get_peak_flops_per_device
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    try:
        yield
    finally:
        async_grpo_trainer.get_peak_flops_per_device = asked
    AttentionInterface.register(TREE_ATTENTION, path_attention)


def path_attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    _mask: Any,
    *,
    tree_kv_index: Any,
    tree_cu_seqlens_q: Any,
    tree_cu_seqlens_k: Any,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Any, None]:
    """[1, heads, tokens, size] in, [1, tokens, heads, size] out: each segment sees its path from the root."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    grouped, parts = getattr(module, "num_key_value_groups", 1) > 1, []
    starts, ends = tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist()
    for i in range(len(starts) - 1):
        path = tree_kv_index[ends[i] : ends[i + 1]]
        own, seen = starts[i + 1] - starts[i], len(path)
        mask = torch.ones(own, seen, dtype=torch.bool).tril(seen - own)
        q, k, v = query[:, :, starts[i] : starts[i + 1]], key[:, :, path], value[:, :, path]
        parts.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=grouped))
    return torch.cat(parts, 2).transpose(1, 2).contiguous(), None
