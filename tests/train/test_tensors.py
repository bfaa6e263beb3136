"""Tensors from micro-batches: the right values and dtypes, shared memory where it can be shared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from penstock.arrays import Ragged, Sample
from penstock.packing import Packing, pack, pack_with
from penstock.testing.strategies import OWN_COLUMNS
from penstock.train import to_torch
from tests.support.packable import packable

torch = pytest.importorskip("torch")


def sample(length: int, **more: Any) -> Sample:
    return Sample(
        token_ids=np.arange(2**32 - length, 2**32, dtype=np.uint32),
        loss_mask=np.arange(length) > 0,
        logprobs=-np.ones(length, np.float32),
        advantages=0.5,
        rewards=1.0,
        mm_token_type_ids=np.zeros(length, np.uint8),
        routed_experts=np.full((length, 3, 2), 300, np.uint16),
        **more,
    )


def test_dtypes_and_shapes_are_what_models_take() -> None:
    (batch,) = pack([sample(5), sample(3)], ranks=1, seq_len=16, pad_to_multiple_of=16).ranks[0]
    tensors = to_torch(batch)
    found = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    assert found == {
        "token_ids": (torch.int64, (16,)),
        "loss_mask": (torch.bool, (16,)),
        "logprobs": (torch.float32, (16,)),
        "advantages": (torch.float32, (16,)),
        "rewards": (torch.float32, (16,)),
        "routed_experts": (torch.uint16, (16, 3, 2)),
        "mm_token_type_ids": (torch.int64, (16,)),
        "position_ids": (torch.int64, (16,)),
        "sequence_lengths": (torch.int32, (3,)),
    }
    assert tensors["token_ids"].max().item() == 2**32 - 1
    assert tensors["routed_experts"][0, 0, 0].item() == 300


def test_what_needs_no_conversion_shares_memory() -> None:
    (batch,) = pack([sample(5)], ranks=1, seq_len=16).ranks[0]
    tensors = to_torch(batch)
    batch["logprobs"][2] = -7.0
    batch["position_ids"][0] = 4
    assert tensors["logprobs"][2].item() == -7.0 and tensors["position_ids"][0].item() == 4
    batch["token_ids"][0] = 1
    assert tensors["token_ids"][0].item() != 1


def test_tensors_have_the_shapes_of_the_numpy_columns_and_experts_stay_as_narrow() -> None:
    experts = np.full((5, 3, 2), 7, np.uint8)
    (batch,) = pack([Sample(token_ids=range(5), routed_experts=experts)], ranks=1, seq_len=16).ranks[0]
    tensors = to_torch(batch)
    assert {name: tuple(tensors[name].shape) for name in batch} == {name: batch[name].shape for name in batch}
    assert tensors["routed_experts"].dtype == torch.uint8


@given(packable())
@settings(max_examples=25)
def test_values_are_those_of_the_micro_batch_with_and_without_a_pool(samples: list[Sample]) -> None:
    pool: dict[str, Any] = {}
    for batch in [
        b for rank in pack_with(Packing(ranks=2, seq_len=64, columns=OWN_COLUMNS), samples).ranks for b in rank
    ]:
        for tensors in (to_torch(batch), to_torch(batch, out=pool), to_torch(batch, device="cpu")):
            columns = dict(batch.columns)
            for name in [name for name, cells in columns.items() if isinstance(cells, Ragged)]:
                lists = columns.pop(name)
                columns |= {f"{name}_values": lists.values, f"{name}_offsets": lists.offsets}
                assert tensors[f"{name}_offsets"].dtype == torch.int64
            for name in {"token_ids", "sampling_mask_values", "teacher_topk_ids"} & tensors.keys():
                assert tensors[name].dtype == torch.int64
            assert set(tensors) == {*columns, "sequence_lengths"}
            for name, values in columns.items():
                found = tensors[name].numpy()
                assert np.array_equal(found, values.astype(found.dtype), equal_nan=found.dtype.kind == "f")


def test_a_pool_reuses_its_memory_and_grows_when_it_must() -> None:
    pool: dict[str, Any] = {}
    small, large = (next(iter(pack([sample(n)], ranks=1, seq_len=64).ranks[0])) for n in (5, 40))
    first = to_torch(large, out=pool)
    where = pool["token_ids"].data_ptr()
    second = to_torch(small, out=pool)
    assert pool["token_ids"].data_ptr() == where == second["token_ids"].data_ptr()
    assert first["token_ids"][:5].tolist() == second["token_ids"].tolist()
    empty: dict[str, Any] = {}
    to_torch(small, out=empty)
    assert len(empty["token_ids"]) == 5
    to_torch(large, out=empty)
    assert len(empty["token_ids"]) == 40


def test_a_forest_comes_beside_the_columns_of_its_samples_with_and_without_a_pool() -> None:
    prompt = sample(40)
    samples = [
        prompt.replace(
            id=str(i),
            group="g",
            token_ids=np.append(prompt["token_ids"][:-1], np.uint32(i)),
            loss_mask=np.arange(40) > 9,
        )
        for i in range(3)
    ]
    (batch,) = pack(samples, ranks=1, seq_len=256, trees=True, pad_to_multiple_of=8).ranks[0]
    assert batch.forest is not None and batch.forest.padding == 6
    pool: dict[str, Any] = {}
    for tensors in (to_torch(batch), to_torch(batch, out=pool), to_torch(batch, out=pool)):
        own = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items() if name.startswith("forest.")}
        assert own == {
            "forest.token_ids": (torch.int64, (48,)),
            "forest.position_ids": (torch.int64, (48,)),
            "forest.mm_token_type_ids": (torch.int64, (48,)),
            "forest.routed_experts": (torch.uint16, (48, 3, 2)),
            "forest.index": (torch.int64, (120,)),
            "forest.sources": (torch.int64, (48,)),
            "forest.lengths": (torch.int32, (5,)),
            "forest.parents": (torch.int32, (5,)),
        }
        assert torch.equal(tensors["forest.token_ids"][tensors["forest.index"]], tensors["token_ids"])
        assert "routed_experts" not in tensors and tensors["sequence_lengths"].tolist() == [40, 40, 40]
