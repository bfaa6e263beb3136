"""Convert a micro-batch to tensors: shared memory where the dtype allows it, one copy otherwise.

    token_ids, position_ids, mm_token_type_ids     int64    [T]
    loss_mask                                      bool     [T]
    logprobs, advantages, weights and the like     float32  [T]
    weight_versions                                int32    [T]
    routed_experts                                 uint8    [T, layers, top_k]      (uint16 above 256 experts)
    teacher_topk_ids, teacher_topk_logprobs        int64, float32  [T, k]
    sampling_mask_values                           int64    [N]                     the lists of all tokens end to end
    sampling_mask_offsets                          int64    [T + 1]                 where the list of each token starts
    sequence_lengths                               int32    [segments]

A column of lists becomes two tensors, `_values` and `_offsets`: token t has `values[offsets[t] : offsets[t + 1]]`.

For a micro-batch with a forest (`packing.trees`) these are the columns of its samples, end to end, as a loss takes
them. Additional tensors are the model's inputs, with each of the U places once:

    forest.token_ids, forest.position_ids          int64    [U]                     and other inputs of the model, such
                                                                                    as forest.routed_experts
    forest.index                                   int64    [T]                     the place of each token
    forest.sources                                 int64    [U]                     the preceding place, or -1
    forest.lengths, forest.parents                 int32    [segments]              of segments, depth first

Shapes are those of the numpy columns. Pass a row to a model as `tensor[None]`.

position_ids, masks, floats and experts share memory with the micro-batch: changing one changes the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import Array, Cells, Ragged
from penstock.errors import InvalidInput
from penstock.extras import require
from penstock.packing import Forest, MicroBatch

if TYPE_CHECKING:
    import torch

# Embedding lookups need int64. Experts are many (layers x top_k per token), so they keep their narrow dtype.
_INDICES = ("token_ids", "mm_token_type_ids", "sampling_mask_values", "teacher_topk_ids")
CONVERTED = dict.fromkeys(_INDICES, np.int64)

FOREST = "forest."
"""Prefix of tensors with one entry per place of the forest."""


def to_torch(
    batch: MicroBatch, *, device: str | torch.device | None = None, out: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Return the micro-batch as tensors by column name.

    With `device` they are copied there. `out` is a pool that the caller keeps between calls: its tensors are reused if
    they are large enough and replaced by larger ones if not. Put pinned tensors in it to overlap copies to the device
    with computation. A call overwrites the result of the previous call with the same pool.

    >>> from penstock import Sample
    >>> from penstock.packing import pack
    >>> step = pack([Sample(token_ids=[4, 5, 6], loss_mask=[0, 1, 1])], ranks=1, seq_len=8)
    >>> tensors = to_torch(step.ranks[0][0])
    >>> tensors["token_ids"].tolist(), tensors["position_ids"].shape
    ([4, 5, 6], torch.Size([3]))
    """
    if not isinstance(batch, MicroBatch):
        raise InvalidInput(
            f"to_torch: a {type(batch).__name__}; give a micro-batch: for batch in step: to_torch(batch)"
        )
    require("ps.to_torch", "torch")
    import torch

    tensors: dict[str, torch.Tensor] = {}
    for name, values in chain(_flat(batch.columns), _of_forest(batch.forest)):
        if out is None:
            tensors[name] = torch.from_numpy(_converted(name, values))
        else:
            tensors[name] = _into_pool(out, name, values)
    tensors["sequence_lengths"] = torch.from_numpy(batch.sequence_lengths)
    if device is None:
        return tensors
    return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}


def _flat(columns: Mapping[str, Cells]) -> Iterator[tuple[str, Array]]:
    """Yield the columns as arrays, a column of lists as two."""
    for name, cells in columns.items():
        if isinstance(cells, Ragged):
            yield f"{name}_values", cells.values
            yield f"{name}_offsets", cells.offsets
        else:
            yield name, cells


def _of_forest(forest: Forest | None) -> Iterator[tuple[str, Array]]:
    """Yield the model's inputs and the mapping between places and tokens."""
    if forest is None:
        return
    for name, values in _flat(forest.columns):
        yield f"{FOREST}{name}", values
    for name in ("index", "sources", "lengths", "parents"):
        yield f"{FOREST}{name}", getattr(forest, name)


def _converted(name: str, values: Array) -> Array:
    dtype = CONVERTED.get(name.removeprefix(FOREST))
    return values if dtype is None else values.astype(dtype)


def _into_pool(pool: dict[str, Any], name: str, values: Array) -> torch.Tensor:
    """Copy values into the pool's tensor of that name, replacing it by a larger one if needed."""
    import torch

    dtype = np.dtype(CONVERTED.get(name.removeprefix(FOREST), values.dtype))
    wanted = torch.from_numpy(np.empty(0, dtype)).dtype
    have = pool.get(name)
    if have is None or have.dtype != wanted or have.shape[1:] != values.shape[1:] or len(have) < len(values):
        pool[name] = have = torch.empty(values.shape, dtype=wanted)
    view: torch.Tensor = have[: len(values)]
    # numpy converts while copying: one pass over the values instead of astype and a copy.
    np.copyto(view.numpy(), values, casting="unsafe")
    return view


def checked_lengths(sequence_lengths: Any, num_tokens: int | None = None) -> NDArray[np.int64]:
    """Return the lengths of a row's samples as a numpy array, from a list, an array or a tensor.

    Raises unless they add up to `num_tokens`. Everything that takes lengths calls this first, because wrong ones do not
    fail by themselves: a [1, S] tensor broadcasts, and log-probabilities are silently taken from a neighbouring sample.

    >>> checked_lengths([3, 1, 2], 6).tolist()
    [3, 1, 2]
    """
    on_host = sequence_lengths.detach().cpu() if hasattr(sequence_lengths, "detach") else sequence_lengths
    found = np.asarray(on_host)
    if found.ndim != 1:
        raise InvalidInput(
            f"sequence_lengths: shape {list(found.shape)}; must be [segments], the lengths of one row's samples"
        )
    if found.size and found.dtype.kind not in "iu":
        raise InvalidInput(f"sequence_lengths: dtype {found.dtype}; must be integers")
    if found.size and int(found.min()) < 1:
        at = int(found.argmin())
        raise InvalidInput(f"sequence_lengths[{at}]: {int(found[at])}; every segment has at least one token")
    total = int(found.sum())
    if num_tokens is not None and total != num_tokens:
        raise InvalidInput(
            f"sequence_lengths: add up to {total} for {num_tokens} tokens; padding is a segment of its own, the last"
        )
    return found.astype(np.int64)
