"""Micro-batches whose samples share tokens hold what plain ones hold: every token, every column, every boundary."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.arrays import Sample, Samples
from penstock.arrays.columns import TOKEN_COLUMNS
from penstock.arrays.ragged import Ragged, same_bits
from penstock.errors import CorruptFrame, InvalidInput
from penstock.frames.node_prefixes import find_node_prefixes
from penstock.packing import MicroBatch, PackedStep, Packing, RankPlan, fill, pack_with
from penstock.packing.forest import MASK_TOKENS, grow
from tests.support import reference_step as reference
from tests.support.packable import branching, tree_packings


@st.composite
def shapes(draw: st.DrawFn) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Lengths of samples in depth-first order, and what each shares with the one before it."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    shared = [0, *(draw(st.integers(0, min(pair))) for pair in pairwise(lengths))]
    return np.array(lengths), np.array(shared)


@given(shapes(), st.integers(0, 3))
def test_a_forest_is_the_one_built_token_by_token(shape: tuple[NDArray[np.int64], NDArray[np.int64]], pad: int) -> None:
    lengths, shared = shape
    found, plain = (
        grow(lengths, shared, columns={}, padding=pad),
        reference.plain_forest(lengths.tolist(), shared.tolist()),
    )
    places = len(plain.sources)
    assert found.num_tokens == places + pad and found.padding == pad
    assert found.shared_tokens == int(shared.sum())
    assert found.index.tolist() == [place for path in plain.index for place in path]
    own = found.sources.tolist()
    assert own[:places] == plain.sources and own[places:] == [-1, *range(places, places + pad - 1)][:pad]
    extent = list(zip(found.starts.tolist(), (found.starts + found.lengths).tolist(), strict=True))
    padding = [(places, places + pad)] if pad else []
    assert extent == [(s[0], s[-1] + 1) for s in plain.segments] + padding
    assert found.parents.tolist() == plain.parents + [-1] * len(padding)
    assert found.paths.tolist() == plain.paths
    assert [set(np.flatnonzero(row).tolist()) for row in found.mask()[:places]] == plain.sees


@given(shapes(), st.integers(0, 3))
def test_keys_of_a_segment_are_its_path_with_the_queries_last(
    shape: tuple[NDArray[np.int64], NDArray[np.int64]], pad: int
) -> None:
    forest = grow(*shape, columns={}, padding=pad)
    mask, keys, ends = forest.mask(), forest.key_index, forest.cu_seqlens_k
    assert ends[-1] == len(keys) and forest.cu_seqlens[-1] == forest.num_tokens
    for k, (start, length) in enumerate(zip(forest.starts.tolist(), forest.lengths.tolist(), strict=True)):
        own = keys[ends[k] : ends[k + 1]].tolist()
        assert own[-length:] == list(range(start, start + length))
        for q in range(length):  # bottom right: the last query sees all keys, the one before it all but one
            assert own[: len(own) - length + q + 1] == np.flatnonzero(mask[start + q]).tolist()


def batches_of(step: PackedStep) -> list[tuple[RankPlan, int, MicroBatch]]:
    return [(rank.rank_plan, m, batch) for rank in step.ranks for m, batch in enumerate(rank)]


@settings(max_examples=60, deadline=None)
@given(branching(), tree_packings())
def test_columns_of_a_forest_are_those_of_its_samples_token_by_token(samples: list[Sample], packing: Packing) -> None:
    of = {sample.id: sample for sample in samples}
    for plan, m, batch in batches_of(pack_with(packing, samples)):
        forest = batch.forest
        if forest is None:
            continue
        rows = reference.token_rows(samples, plan, m)[: batch.sample_tokens]
        assert batch.num_tokens == len(rows) and batch.padding == 0
        for name, cells in batch.columns.items():
            given = [row[name] for row in rows]
            if isinstance(cells, Ragged):
                assert cells.tolist() == given
            else:
                np.testing.assert_array_equal(cells, np.array(given, cells.dtype), name)
        for name, cells in batch.inputs.items():
            assert len(cells) == forest.num_tokens == plan.padded[m]
            given = [row[name] for row in rows]
            assert cells[forest.index].tolist() == given, name
            assert not cells[forest.num_tokens - forest.padding :].any() or name in ("token_ids", "position_ids")
        assert set(batch.inputs) == {n for n in plan.columns if TOKEN_COLUMNS[n].per_node} | {"position_ids"}
        if "routed_experts" in plan.columns:  # gathered when asked for
            assert "routed_experts" not in batch.columns and "routed_experts" in batch
            assert batch["routed_experts"].tolist() == [row["routed_experts"] for row in rows]
        assert [of[name].num_tokens for name in batch.segments.ids] >= batch.segments.lengths.tolist()


@settings(max_examples=60, deadline=None)
@given(branching(), tree_packings())
def test_edges_are_the_trained_tokens_each_from_the_place_before_it(samples: list[Sample], packing: Packing) -> None:
    for _, _, batch in batches_of(pack_with(packing, samples)):
        if batch.forest is None:
            continue
        edges, ids = batch.forest.edges(batch["loss_mask"]), batch.inputs["token_ids"]
        assert len(edges.tokens) == batch.loss_tokens
        for token, sample, source, target in zip(
            *(a.tolist() for a in (edges.tokens, edges.samples, edges.sources, edges.targets)), strict=True
        ):
            assert batch.sample_at(token) == batch.segments.ids[sample]
            assert source == batch.forest.index[token - 1] and target == batch.forest.index[token]
            assert (ids[source], ids[target]) == (batch["token_ids"][token - 1], batch["token_ids"][token])


@settings(max_examples=40, deadline=None)
@given(branching(), tree_packings())
def test_images_of_a_forest_stand_once_and_are_found_by_every_sample(samples: list[Sample], packing: Packing) -> None:
    for _, _, batch in batches_of(pack_with(packing, samples)):
        if batch.forest is None:
            continue
        spans = {(image.hash, image.offset, image.length) for image in batch.forest.images}
        assert len(spans) == len(batch.forest.images)
        index = batch.forest.index
        seen = {(image.hash, int(index[image.offset]), image.length) for image in batch.images}
        assert seen == spans
        for image in batch.images:
            place = int(index[image.offset])
            assert index[image.offset : image.end].tolist() == list(range(place, place + image.length))


@settings(max_examples=60, deadline=None)
@given(branching())
def test_shared_tokens_agree_in_all_that_a_model_computes_from(made: list[Sample]) -> None:
    samples = Samples.of(made)
    found = find_node_prefixes(samples)
    for i, (parent, n) in enumerate(zip(found.parents.tolist(), found.lengths.tolist(), strict=True)):
        if parent < 0:
            assert n == 0
            continue
        a, b = samples[i], samples[parent]
        assert a.group == b.group and 0 < n <= min(a.num_tokens, b.num_tokens)
        for name in ("token_ids", "mm_token_type_ids", "routed_experts"):
            if name in a:
                assert same_bits(a[name][:n], b[name][:n])
        assert [i for i in a.images if i.offset < n] == [i for i in b.images if i.offset < n]
        assert all(i.end <= n for i in a.images if i.offset < n)
        assert found.parted[i] >= 0 and found.patches[i] == sum(
            image.num_patches for image in a.images if image.offset < n
        )


@settings(max_examples=60, deadline=None)
@given(branching())
def test_neighbours_in_depth_first_order_share_what_they_share_with_their_parents(made: list[Sample]) -> None:
    samples = Samples.of(made)
    found = find_node_prefixes(samples)
    order = found.depth_first()
    assert sorted(order.tolist()) == list(range(len(samples)))
    for before, here in pairwise(order.tolist()):
        n = int(found.lengths[here])
        assert same_bits(samples[before]["token_ids"][:n], samples[here]["token_ids"][:n])


@settings(max_examples=40, deadline=None)
@given(branching(), tree_packings())
def test_a_rank_fills_from_bytes_and_its_own_samples_what_all_samples_give(
    samples: list[Sample], packing: Packing
) -> None:
    step = pack_with(packing, samples)
    columns = Samples.of(samples)
    for rank in step.ranks:
        received = RankPlan.from_bytes(rank.rank_plan.relative().to_bytes())
        got = fill(columns.take(rank.rank_plan.needs), received)
        assert [batch.digest for batch in got] == [batch.digest for batch in rank]
        assert [batch.digest for batch in got] == [rank[m].digest for m in range(len(rank))]


def test_a_dense_mask_is_refused_where_it_would_be_large() -> None:
    forest = grow(np.array([MASK_TOKENS + 1]), np.array([0]), columns={})
    with pytest.raises(InvalidInput, match=f"mask: {MASK_TOKENS + 1} tokens; at most {MASK_TOKENS}"):
        forest.mask()


@pytest.mark.parametrize("shared", [[1, 0], [0, 4], [0, -1]])
def test_a_forest_whose_samples_share_more_than_they_have_is_refused(shared: list[int]) -> None:
    with pytest.raises(InvalidInput, match=r"shared\["):
        grow(np.array([3, 5]), np.array(shared), columns={})


def test_a_rank_plan_whose_segments_share_more_than_they_have_is_corrupt() -> None:
    ids = np.arange(50)
    samples = [Sample(id=str(i), token_ids=np.append(ids, i), loss_mask=np.arange(51) > 48) for i in range(3)]
    plan = pack_with(Packing(ranks=1, seq_len=200, trees=True), samples).ranks[0].rank_plan
    assert plan.shared.tolist() == [0, 50, 50] and plan.padded.tolist() == [53]
    assert RankPlan.from_bytes(plan.to_bytes()).shared.tolist() == [0, 50, 50]
    for shared in ([1, 50, 50], [0, 52, 50], [0, -1, 50]):
        wrong = replace(plan, shared=np.array(shared, np.int32))
        with pytest.raises(CorruptFrame, match="share more tokens than they have"):
            RankPlan.from_bytes(wrong.to_bytes())


def test_samples_that_do_not_share_what_the_plan_says_are_refused() -> None:
    ids = np.arange(50)
    samples = [Sample(id=str(i), token_ids=np.append(ids, i), loss_mask=np.arange(51) > 48) for i in range(2)]
    plan = pack_with(Packing(ranks=1, seq_len=200, trees=True), samples).ranks[0].rank_plan
    other = [samples[0], samples[1].replace(token_ids=np.append(ids + 1, 1))]
    with pytest.raises(InvalidInput, match="number 1 of a micro-batch does not begin with the 50 tokens"):
        fill(Samples.of(other), plan)
