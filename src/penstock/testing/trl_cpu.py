"""Runs TRL's asynchronous trainer on a machine without a GPU.

    with trl_on_cpu():
        trainer = AsyncGRPOTrainer(..., weight_transfer=NoTransfer())

For tests and first steps. TRL's attention over trees is a GPU kernel, replaced here by a loop over segments in plain
torch; TRL also asks CUDA for its peak speed, which is unknown here. Nothing else is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class NoTransfer:
    """A weight transfer for TRL that sends nothing: for rollouts that exist already."""

    def __init__(self) -> None:
        self.sent = 0
        """How often weights would have been sent."""

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
    """Make trainers created in the block work without a GPU."""
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
    """Attention over a tree: [1, heads, tokens, size] in, [1, tokens, heads, size] out. Each segment sees its path from
    the root."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    grouped, parts = getattr(module, "num_key_value_groups", 1) > 1, []
    starts, ends = tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist()
    for i in range(len(starts) - 1):
        path = tree_kv_index[ends[i] : ends[i + 1]]
        own, seen = starts[i + 1] - starts[i], len(path)
        # Own tokens are the last ones of the path. With 2 own of 5 seen the first sees 4 and the second 5: tril(3).
        mask = torch.ones(own, seen, dtype=torch.bool).tril(seen - own)
        q, k, v = query[:, :, starts[i] : starts[i + 1]], key[:, :, path], value[:, :, path]
        parts.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=grouped))
    return torch.cat(parts, 2).transpose(1, 2).contiguous(), None
