"""From received bytes to packed, padded tensors: what a step costs between the socket and the forward pass.

Ours: decode the frame, plan, fill, tensors, for both ranks. The rival is what list-based trainers do with the same
samples: byte arrays to lists, lists joined per micro-batch, lists encoded and decoded once more before the
ranks, tensors from lists. Both give the same ids, masks, positions, log-probabilities, advantages, temperatures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from benchmarks import baselines
from benchmarks.report import Row, best, faster, skipped
from penstock.frames import decode
from penstock.packing import Plan, pack
from penstock.train.tensors import to_torch

SEQ_LEN = 16384
RANKS = 2


def rows(frame: bytes, packed: bytes, progress: Callable[[str], None], *, repeats: int) -> list[Row]:
    """The comparison on one step: `frame` is ours, `packed` the same samples as byte arrays."""
    name, rival = "received bytes to packed tensors, 2 ranks", "byte arrays and lists"
    try:
        import torch
    except ImportError:
        return [skipped(name, "torch is not installed", unit="ms", rival_name=rival, target=80.0)]
    torch.set_num_threads(1)
    made = pack(decode(frame), ranks=RANKS, seq_len=SEQ_LEN).plan
    _check_equal(frame, packed, made)

    def ours() -> None:
        step = pack(decode(frame), ranks=RANKS, seq_len=SEQ_LEN)
        for rank in step.ranks:
            for batch in rank:
                to_torch(batch)

    progress("bytes to tensors, against lists")
    ours_s, lists_s = best(ours, lambda: list_path(packed, made), repeats=repeats, budget_s=30)
    return [faster(name, ours_s, lists_s, rival, target=80.0)]


def list_path(packed: bytes, plan: Plan) -> list[list[dict[str, Any]]]:
    """The list-based path; it uses our plan, so that only the handling of values is compared."""
    import torch

    samples = baselines.decode_byte_arrays(packed)
    wire = [[_joined(samples, share.only(i).order.tolist()) for i in range(len(share))] for share in plan.rank_plans]
    received = [msgspec.msgpack.decode(msgspec.msgpack.encode(batches)) for batches in wire]
    return [[{name: torch.tensor([values]) for name, values in b.items()} for b in batches] for batches in received]


def _joined(samples: list[list[Any]], order: list[int]) -> dict[str, list[Any]]:
    out: dict[str, list[Any]] = {
        name: [] for name in ("token_ids", "loss_mask", "logprobs", "advantages", "temperatures", "position_ids")
    }
    for i in order:
        prompt, prompt_mask, completion, mask, logprobs, temperature, advantage, *_ = samples[i]
        count = len(prompt) + len(completion)
        out["token_ids"].extend(prompt + completion)
        out["loss_mask"].extend(prompt_mask + mask)
        out["logprobs"].extend([0.0] * len(prompt) + logprobs)
        out["advantages"].extend([advantage] * count)
        out["temperatures"].extend([temperature] * count)
        out["position_ids"].extend(range(count))
    return out


def _check_equal(frame: bytes, packed: bytes, plan: Plan) -> None:
    """Both paths must give the same tensors, or the comparison means nothing."""
    theirs = list_path(packed, plan)
    for rank, step in enumerate(pack(decode(frame), ranks=RANKS, seq_len=SEQ_LEN).ranks):
        for batch, other in zip(step, theirs[rank], strict=True):
            for name, values in other.items():
                mine = np.asarray(batch[name])[: values.shape[1]]
                assert np.array_equal(mine, values[0].numpy().astype(mine.dtype)), name
