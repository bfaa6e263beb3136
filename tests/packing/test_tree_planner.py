"""Plans of samples that share tokens: caps on what is computed, costs as the tree has them, never above plain rows."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from benchmarks.tree_cases import Case, cases
from benchmarks.tree_packers import RIVALS
from benchmarks.trees import bins_of, packing_of, score
from penstock.arrays import Sample
from penstock.arrays.sample_metadata import SampleMetadata
from penstock.arrays.shared_prefixes import SharedPrefixes
from penstock.errors import InvalidInput
from penstock.packing import Cost, MicroBatch, Packing, Plan, pack_with, plan
from penstock.packing.bins import Items
from tests.packing.small_samples import batches_of
from tests.support import reference_step as reference
from tests.support.packable import branching, packable, packings, tree_packings


def family(lengths: NDArray[np.int64], prompt: int, size: int) -> SampleMetadata:
    """Samples in groups of `size`, which share their first `prompt` tokens."""
    numbers = np.arange(len(lengths))
    first = numbers % size == 0
    shared = SharedPrefixes.of(np.where(first, -1, numbers - 1).tolist(), np.where(first, 0, prompt).tolist())
    return replace(SampleMetadata.of_lengths(lengths), shared=shared)


def computed(planned: Plan) -> int:
    return planned.accounting.total.computed_tokens


@settings(max_examples=80, deadline=None)
@given(branching(), tree_packings())
def test_no_micro_batch_computes_more_than_a_cap_unless_it_is_a_single_sample(
    samples: list[Sample], packing: Packing
) -> None:
    step = pack_with(packing, samples)
    step.accounting.check()
    assert sorted(name for b in batches_of(step) for name in b.segments.ids) == sorted(s.id for s in samples)
    for batch in batches_of(step):
        images = batch.images if batch.forest is None else batch.forest.images
        within = batch.computed_tokens <= packing.cap
        within &= sum(image.num_patches for image in images) <= (packing.max_patches or math.inf)
        assert within or batch.sample_count <= 1
        assert batch.sample_count <= (packing.max_samples or math.inf)
        assert batch.computed_tokens % packing.pad_to_multiple_of == 0
        assert batch.is_dummy or batch.computed_tokens - batch.sample_tokens < packing.pad_to_multiple_of


@settings(max_examples=80, deadline=None)
@given(branching(), tree_packings())
def test_accounts_are_those_of_the_forests_that_are_filled(samples: list[Sample], packing: Packing) -> None:
    step = pack_with(packing, samples)
    total, filled = step.accounting.total, batches_of(step)
    forests = [batch.forest for batch in filled if batch.forest is not None]
    assert total.shared_tokens == sum(forest.shared_tokens for forest in forests)
    assert total.computed_tokens == sum(batch.computed_tokens for batch in filled)
    assert total.tokens == sum(batch.sample_tokens for batch in filled)
    rows = zip(*[list(rank) for rank in step.ranks], strict=True)
    assert step.accounting.step_cost == pytest.approx(sum(max(cost_of(b, packing) for b in row) for row in rows))


def cost_of(batch: MicroBatch, packing: Packing) -> float:
    """What a micro-batch costs, from its segments: each token, and each pair that attends."""
    cost, forest = packing.cost, batch.forest
    lengths = batch.sequence_lengths.astype(np.int64) if forest is None else forest.lengths.astype(np.int64)
    before = np.zeros_like(lengths) if forest is None else forest.depths.astype(np.int64)
    pairs = int(((before + lengths) ** 2 - before**2).sum())
    images = batch.images if forest is None else forest.images
    patches = sum(image.num_patches for image in images)
    return (
        cost.overhead + cost.per_token * int(lengths.sum()) + cost.per_token_squared * pairs + cost.per_patch * patches
    )


@settings(max_examples=80, deadline=None)
@given(branching(most_groups=6), tree_packings())
def test_a_plan_with_trees_never_costs_more_than_one_without(samples: list[Sample], packing: Packing) -> None:
    packing = replace(packing, pad_to_multiple_of=1)
    trees, plain = pack_with(packing, samples), pack_with(replace(packing, trees=False), samples)
    assert trees.accounting.step_cost <= plain.accounting.step_cost * (1 + 1e-9)
    assert trees.accounting.total.computed_tokens <= plain.accounting.total.computed_tokens


@settings(max_examples=60, deadline=None)
@given(packable(), packings())
def test_where_nothing_is_shared_plans_are_those_without_trees(samples: list[Sample], packing: Packing) -> None:
    alone = [sample.replace(group=f"g{i}") for i, sample in enumerate(samples)]
    try:
        plain = pack_with(packing, alone)
    except InvalidInput:  # not one of them can be packed
        return
    trees = pack_with(replace(packing, trees=True), alone)
    for a, b in zip(plain.ranks, trees.ranks, strict=True):
        assert a.rank_plan.to_bytes() == b.rank_plan.to_bytes()
        assert [batch.digest for batch in a] == [batch.digest for batch in b]


@settings(max_examples=60, deadline=None)
@given(branching(), tree_packings())
def test_no_fewer_tokens_are_computed_than_a_trie_of_all_samples_has(samples: list[Sample], packing: Packing) -> None:
    step = pack_with(packing, samples)
    groups: dict[str, list[list[int]]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample["token_ids"][: packing.seq_len].tolist())
    fewest = sum(reference.unique_prefixes(paths) for paths in groups.values())
    assert step.accounting.total.tokens - step.accounting.total.shared_tokens >= fewest


def test_families_are_computed_once_where_there_are_enough_of_them() -> None:
    lengths = np.random.default_rng(0).integers(2_100, 4_000, 512)
    packing = Packing(ranks=8, seq_len=65_536, trees=True)
    metadata = family(lengths, 2_000, 16)
    made, plain = plan(metadata, packing), plan(metadata, replace(packing, trees=False))
    unique = int(lengths.sum()) - 2_000 * 15 * 32
    assert computed(made) <= 1.03 * unique
    assert made.accounting.step_cost <= 0.75 * plain.accounting.step_cost
    assert made.accounting.step_cost <= 1.02 * made.accounting.lower_bound


def test_a_family_is_split_where_ranks_would_wait_for_it() -> None:
    packing = Packing(ranks=8, seq_len=65_536, trees=True)
    made = plan(family(np.full(16, 3_000), 1_000, 16), packing)
    assert made.accounting.rows == 1 and made.accounting.total.dummy_micro_batches == 0
    assert made.accounting.step_cost == pytest.approx(
        float(Cost().of_samples(np.array(3_000)) * 2 - Cost().of_samples(np.array(1_000)))
    )


def test_branches_of_a_rollout_stay_together_and_rollouts_part() -> None:
    rollout = [20_000, 18_500, 17_500]  # a main branch, and two that leave it at 18,000 and 17,000 tokens
    lengths = np.array(rollout * 4)
    shared = [0, 18_000, 17_000] + [500, 18_000, 17_000] * 3
    found = SharedPrefixes.of([-1, 0, 0, 0, 3, 3, 0, 6, 6, 0, 9, 9], shared)
    made = plan(replace(SampleMetadata.of_lengths(lengths), shared=found), Packing(ranks=4, seq_len=65_536, trees=True))
    assert sorted(sorted(p.order.tolist()) for p in made.rank_plans) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


def test_a_family_longer_than_the_cap_is_split_and_every_piece_keeps_the_cap() -> None:
    packing = Packing(ranks=2, seq_len=8_192, trees=True)
    made = plan(family(np.full(64, 3_000), 2_000, 64), packing)
    made.accounting.check()
    assert made.accounting.total.max_micro_batch_tokens <= 8_192
    assert computed(made) <= 64 * 1_000 + 2_000 * 12


@pytest.mark.parametrize("case", cases((512,), (8, 64)), ids=lambda case: case.name)
def test_no_other_way_to_keep_families_together_has_a_cheaper_step(case: Case) -> None:
    packing = packing_of(case)
    ours = score(bins_of(plan(case.metadata, packing)), case, packing)
    items = Items.of(case.metadata.kept, packing.cost.of_samples(case.metadata.kept), packing.caps)
    for name, packer in RIVALS.items():
        other = score(packer(case, items, packing), case, packing)
        assert ours.cost <= other.cost * 1.01, name


def test_tokens_that_were_routed_otherwise_are_counted_and_computed_for_each() -> None:
    ids, experts = np.arange(100), np.zeros((100, 2, 2), np.uint8)
    other = experts.copy()
    other[60:] = 1
    samples = [
        Sample(id=str(i), token_ids=ids, loss_mask=ids > 90, routed_experts=own)
        for i, own in enumerate((experts, other))
    ]
    step = pack_with(Packing(ranks=1, seq_len=400, trees=True), samples)
    assert step.accounting.total.shared_tokens == 60 and step.accounting.parted_tokens == 40
    assert step.accounting.metrics(0)["parted_tokens"] == 40
    forest = step.ranks[0][0].forest
    assert forest is not None and forest.columns["routed_experts"].shape == (140, 2, 2)
