"""A rank plan comes as bytes: it is compared with the samples, the columns and a limit before it is filled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock.arrays import Samples
from penstock.errors import CorruptFrame, InvalidInput
from penstock.packing import RankPlan, bytes_needed, fill, pack
from tests.packing.small_samples import sample
from tests.support.groups import named_group

SAMPLES = Samples.of(named_group("g", samples=3, tokens=12))
GOOD = pack(SAMPLES, ranks=1, seq_len=64).plan.rank_plans[0]


def read(**changes: object) -> RankPlan:
    return RankPlan.from_bytes(replace(GOOD, **changes).to_bytes())  # type: ignore[arg-type]


def test_a_cut_beyond_a_sample_never_reaches_into_the_next_one() -> None:
    longer = read(cuts=GOOD.cuts + np.int32(1), padded=GOOD.padded + np.int32(8))
    with pytest.raises(InvalidInput, match="has 12 tokens, the rank plan takes 13"):
        fill(SAMPLES, longer)


def test_a_plan_of_gigabytes_of_padding_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(CorruptFrame, match="2147483647 tokens with padding"):
        read(padded=np.array([2**31 - 1], np.int32))
    with pytest.raises(CorruptFrame, match="this reader takes 16"):
        RankPlan.from_bytes(GOOD.to_bytes(), max_tokens=16)


@pytest.mark.parametrize("columns", [(), ("token_ids",), (*GOOD.columns, "secrets"), (*GOOD.columns, "token_ids")])
def test_columns_that_no_micro_batch_has_are_refused(columns: tuple[str, ...]) -> None:
    with pytest.raises(CorruptFrame, match="not those of a micro-batch"):
        read(columns=columns)


@pytest.mark.parametrize("pad_id", [-1, 2**32])
def test_a_pad_id_that_is_no_token_is_refused(pad_id: int) -> None:
    with pytest.raises(CorruptFrame, match="pad id"):
        read(pad_id=pad_id)


def test_a_step_of_no_ranks_is_refused() -> None:
    with pytest.raises(CorruptFrame, match="rank 0 of 0"):
        read(accounting=replace(GOOD.accounting, num_ranks=0))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("routed_experts", ("|u1", (2,))),
        ("routed_experts", ("|O", (2, 2))),
        ("routed_experts", ("|u1", (0, 2))),
        ("routed_experts", ("|u1", (1 << 20, 2))),
        ("loss_mask", ("|b1", (2, 2))),
        ("secrets", ("|u1", (2, 2))),
    ],
)
def test_shapes_that_no_column_has_are_refused(name: str, shape: tuple[str, tuple[int, ...]]) -> None:
    with pytest.raises(CorruptFrame, match="no column looks like that"):
        read(columns=(*GOOD.columns, "routed_experts"), shapes={name: shape})


def test_a_dummy_of_gigabytes_of_experts_is_refused_before_anything_is_allocated() -> None:
    changes = {"order": GOOD.order[:0], "cuts": GOOD.cuts[:0], "starts": np.zeros(2, np.int32)}
    with pytest.raises(CorruptFrame, match="bytes of routed_experts; this reader takes"):
        read(
            **changes,
            dummy=np.array([True]),
            dummy_tenants=("",),
            padded=np.array([1 << 20], np.int32),
            columns=(*GOOD.columns, "routed_experts"),
            shapes={"routed_experts": ("|u1", (1000, 10))},
        )


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_samples_with_and_without_experts_in_one_micro_batch_are_refused(order: list[int]) -> None:
    routed = np.zeros((12, 2, 3), np.uint8)
    bare, other = named_group("g", tokens=12)
    mixed = Samples.of([bare, other.replace(routed_experts=routed)])
    columns = (*GOOD.columns, "routed_experts")
    changes = {"order": np.array(order, np.int32), "cuts": np.array([12, 12], np.int32), "columns": columns}
    together = read(**changes, starts=np.array([0, 2], np.int32), padded=np.array([24], np.int32))
    with pytest.raises(InvalidInput, match="one has no routed_experts"):
        fill(mixed, together)


def test_a_share_of_other_samples_is_refused() -> None:
    step = pack([sample(4) for _ in range(4)], ranks=2, seq_len=8)
    with pytest.raises(InvalidInput, match=r"2 given.*samples.take"):
        fill(Samples.of([sample(4), sample(4)]), step.ranks[1].rank_plan)


def test_memory_that_is_given_is_filled_and_used_again() -> None:
    samples = Samples.of([sample(4 + i, f"s{i}", advantages=float(i)) for i in range(9)])
    rank_plans = pack(samples, ranks=2, seq_len=16, pad_to_multiple_of=8).plan.rank_plans
    buffer = np.zeros(max(map(bytes_needed, rank_plans)), np.uint8)
    for rank_plan in rank_plans:
        filled = fill(samples, rank_plan, out=buffer)
        assert [b.digest for b in filled] == [b.digest for b in fill(samples, rank_plan)]
        assert all(np.shares_memory(values, buffer) for b in filled for values in b.columns.values())
    with pytest.raises(InvalidInput, match="out: 10 bytes; this rank plan needs"):
        fill(samples, rank_plans[0], out=buffer[:10])


def test_altered_or_truncated_shares_are_detected() -> None:
    rank_plan = pack([sample(4) for _ in range(4)], ranks=2, seq_len=8).ranks[0].rank_plan
    data = rank_plan.to_bytes()
    for cut in range(len(data)):
        with pytest.raises(CorruptFrame):
            RankPlan.from_bytes(data[:cut])
    with pytest.raises(CorruptFrame, match="shorter than its segments"):
        RankPlan.from_bytes(replace(rank_plan, padded=rank_plan.padded - 1).to_bytes())
    with pytest.raises(CorruptFrame, match="do not add up"):
        RankPlan.from_bytes(replace(rank_plan, starts=rank_plan.starts[::-1].copy()).to_bytes())


def test_a_share_is_a_few_bytes_per_sample() -> None:
    step = pack([sample(10 + i % 50) for i in range(2000)], ranks=2, seq_len=64)
    rank_plan = step.ranks[0].rank_plan
    assert len(rank_plan.to_bytes()) < 8 * len(rank_plan.order) + 10 * len(rank_plan) + 1100
