"""What holds for every packed step, whatever is packed and however."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.arrays import Ragged, Sample, Samples
from penstock.arrays.ragged import arrays_in, copied, same_bits
from penstock.packing import PackedStep, Packing, RankPlan, SampleMetadata, fill, pack_with
from tests.packing.small_samples import batches_of
from tests.support import reference_step as reference
from tests.support.packable import packable, packings

steps = given(packable(), packings())


def kept(samples: list[Sample], packing: Packing) -> dict[str, int]:
    metadata = SampleMetadata.of(Samples.of(samples), packing.seq_len)
    return {sample.id: int(n) for sample, n in zip(samples, metadata.kept, strict=True) if n}


def try_pack(packing: Packing, samples: list[Sample]) -> PackedStep | None:
    """None when not one of the samples can be packed."""
    if samples and not kept(samples, packing):
        return None
    return pack_with(packing, samples)


@steps
def test_every_sample_is_packed_exactly_once_or_dropped_with_a_reason(samples: list[Sample], packing: Packing) -> None:
    step = try_pack(packing, samples)
    if step is None:
        return
    packed = {name: n for b in batches_of(step) for name, n in zip(b.segments.ids, b.segments.lengths, strict=True)}
    count = sum(b.sample_count for b in batches_of(step))
    assert packed == kept(samples, packing) and count == len(packed)
    assert {samples[i].id for i in step.plan.dropped} == {s.id for s in samples} - packed.keys()


@steps
def test_no_micro_batch_passes_a_cap_unless_it_is_a_single_sample(samples: list[Sample], packing: Packing) -> None:
    step = try_pack(packing, samples)
    over = 0
    for batch in [] if step is None else batches_of(step):
        patches = sum(image.num_patches for image in batch.images)
        within = batch.num_tokens <= packing.cap and patches <= (packing.max_patches or math.inf)
        if not batch.is_dummy:
            assert within or batch.sample_count == 1
            assert batch.sample_count <= (packing.max_samples or math.inf)
            assert batch.padding < packing.pad_to_multiple_of
            over += not within
        assert batch.num_tokens % packing.pad_to_multiple_of == 0 and batch.num_tokens > 0
    assert step is None or over == step.accounting.over_cap


@steps
def test_runs_modalities_and_routing_never_mix_and_rows_have_one_modality(
    samples: list[Sample], packing: Packing
) -> None:
    step = try_pack(packing, samples)
    if step is None:
        return
    of = {sample.id: sample for sample in samples}
    filled = [list(rank) for rank in step.ranks]
    assert {len(rank) for rank in filled} == {step.num_micro_batches}
    for row in zip(*filled, strict=True):
        assert len({batch.modality for batch in row}) == 1
        assert any(not batch.is_dummy for batch in row)
        if packing.rows_by == "tenant":
            assert len({batch.run for batch in row if not batch.is_dummy}) == 1
        for batch in row:
            assert {of[i].run for i in batch.segments.ids} <= {batch.run}
            assert (batch.modality == "image") == bool(batch.images)
            routed = {"routed_experts" in of[i] for i in batch.segments.ids}
            assert routed <= {"routed_experts" in batch}


@steps
def test_boundaries_are_explicit_and_padding_is_a_segment_without_loss(samples: list[Sample], packing: Packing) -> None:
    step = try_pack(packing, samples)
    for batch in [] if step is None else batches_of(step):
        ends = batch.cu_seqlens
        assert ends[-1] == batch.num_tokens and (batch.sequence_lengths > 0).all()
        assert batch["position_ids"].tolist() == [t for n in batch.sequence_lengths for t in range(n)]
        assert batch.segments.offsets.tolist() == ends[: batch.sample_count].tolist()
        assert batch.segments.lengths.tolist() == batch.sequence_lengths[: batch.sample_count].tolist()
        behind = slice(batch.sample_tokens, None)
        assert not batch["loss_mask"][behind].any()
        assert not batch["loss_mask"][ends[:-1]].any()
        for name in ("advantages", "rl_weights", "ce_weights", "ref_kl_weights", "logprobs"):
            if name in batch:
                assert not batch[name][behind].any()
        if "rewards" in batch:
            assert np.isnan(batch["rewards"][behind]).all()


@steps
def test_dummies_train_nothing_and_exist_only_when_no_bin_can_be_split(samples: list[Sample], packing: Packing) -> None:
    step = try_pack(packing, samples)
    if step is None:
        return
    packed = batches_of(step)
    dummies = [batch for batch in packed if batch.is_dummy]
    for batch in dummies:
        assert batch.sample_count == batch.loss_tokens == 0
        if batch.modality == "text":
            assert batch.num_tokens == packing.pad_to_multiple_of
        else:
            assert len(batch.images) == 1
    if packing.rows_by == "modality":
        splittable = {batch.modality for batch in packed if batch.sample_count > 1}
        assert not splittable & {batch.modality for batch in dummies}


@steps
def test_accounts_add_up_and_equal_what_is_counted_token_by_token(samples: list[Sample], packing: Packing) -> None:
    step = try_pack(packing, samples)
    if step is None:
        return
    accounts = step.accounting
    accounts.check()
    counted = reference.count_step(step)
    assert counted == {name: getattr(accounts.total, name) for name in counted}
    assert accounts.input_tokens == sum(s.num_tokens for s in samples)
    assert accounts.input_loss_tokens == sum(s.loss_tokens for s in samples)
    cuts = kept(samples, packing)
    assert accounts.total.tokens == sum(cuts.values())
    trained = {s.id: int(np.count_nonzero(s.loss_mask[: cuts[s.id]])) for s in samples if s.id in cuts}
    assert step.loss_tokens == accounts.total.loss_tokens == sum(trained.values())
    for totals in (step.totals.modes, step.totals.tenants):
        assert sum(d.loss_tokens for d in totals.values()) == step.loss_tokens
        assert sum(d.samples for d in totals.values()) == step.denominators.samples == len(cuts)


@steps
def test_denominators_count_groups_and_the_tokens_of_each_loss_term(samples: list[Sample], packing: Packing) -> None:
    step = try_pack(packing, samples)
    if step is None:
        return
    packed = [s for s in samples if s.id in kept(samples, packing)]
    named = {(s.run, s.group) for s in packed if s.group}
    assert step.denominators.groups == len(named) + sum(not s.group for s in packed)
    weighted = dict.fromkeys(("rl_weights", "ce_weights", "ref_kl_weights"), 0)
    for batch in batches_of(step):
        for name in weighted:
            plain = np.full(batch.num_tokens, float(name == "rl_weights"), np.float32)
            weights = batch.columns.get(name, plain)
            weighted[name] += int(np.count_nonzero(batch["loss_mask"] & (weights != 0)))
    found = step.denominators
    assert list(weighted.values()) == [found.rl_tokens, found.ce_tokens, found.ref_kl_tokens]


@steps
def test_the_same_input_gives_the_same_bytes(samples: list[Sample], packing: Packing) -> None:
    one, other = try_pack(packing, samples), try_pack(packing, list(samples))
    if one is None or other is None:
        return
    assert [b.digest for b in batches_of(one)] == [b.digest for b in batches_of(other)]
    assert [s.to_bytes() for s in one.plan.rank_plans] == [s.to_bytes() for s in other.plan.rank_plans]


@given(packable(), packings(), st.randoms(use_true_random=False))
def test_the_order_of_the_input_changes_neither_the_samples_of_the_step_nor_its_counts(
    samples: list[Sample], packing: Packing, random: object
) -> None:
    step = try_pack(packing, samples)
    if step is None:
        return
    shuffled = list(samples)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    other = pack_with(packing, shuffled)
    ids = [sorted(i for b in batches_of(s) for i in b.segments.ids) for s in (step, other)]
    assert ids[0] == ids[1] and step.totals == other.totals
    assert step.accounting.total.tokens == other.accounting.total.tokens
    assert math.isclose(step.accounting.lower_bound, other.accounting.lower_bound, rel_tol=1e-9)


@steps
def test_inputs_are_left_as_they_were(samples: list[Sample], packing: Packing) -> None:
    columns = Samples.of(samples)
    before = {name: Ragged(copied(c.values), c.offsets.copy()) for name, c in columns.columns.items()}
    step = try_pack(packing, samples)
    for batch in [] if step is None else batches_of(step):
        for array in (array for cells in batch.columns.values() for array in arrays_in(cells)):
            array[:] = 0
    for name, before_it in before.items():
        assert same_bits(columns[name].values, before_it.values) and np.array_equal(
            columns[name].offsets, before_it.offsets
        )


@steps
def test_micro_batches_equal_the_plain_reference_token_by_token(samples: list[Sample], packing: Packing) -> None:
    step = try_pack(packing, samples)
    of = {sample.id: sample for sample in samples}
    for rank in [] if step is None else step.ranks:
        for m, batch in enumerate(rank):
            rows = reference.token_rows(samples, rank.rank_plan, m)
            wanted_columns = {*rank.rank_plan.columns, "position_ids"}
            if not batch.is_dummy and not any("routed_experts" in of[i] for i in batch.segments.ids):
                wanted_columns -= {"routed_experts"}
            assert set(batch.columns) == wanted_columns
            for name, values in batch.columns.items():
                expected = [row[name] for row in rows]
                if isinstance(values, Ragged):
                    wanted_lists = Ragged.of_lists(expected, values.dtype)
                    assert values.offsets.tolist() == wanted_lists.offsets.tolist()
                    assert np.array_equal(values.values, wanted_lists.values, equal_nan=values.dtype.kind == "f")
                    continue
                wanted = np.array(expected, values.dtype)
                assert len(values) == len(rows)
                assert np.array_equal(values, wanted, equal_nan=values.dtype.kind == "f")


@steps
@settings(max_examples=50)
def test_a_rank_that_holds_only_its_own_samples_fills_the_same_micro_batches(
    samples: list[Sample], packing: Packing
) -> None:
    step = try_pack(packing, samples)
    if step is None:
        return
    columns = Samples.of(samples)
    for rank in step.ranks:
        digests = [batch.digest for batch in rank]
        received = RankPlan.from_bytes(rank.rank_plan.relative().to_bytes())
        own = columns.take(rank.rank_plan.needs)
        assert [batch.digest for batch in fill(own, received)] == digests
        assert [rank[m].digest for m in range(len(rank))] == digests


@steps
def test_images_move_with_their_tokens(samples: list[Sample], packing: Packing) -> None:
    step = try_pack(packing, samples)
    of = {sample.id: sample for sample in samples}
    for batch in [] if step is None else batches_of(step):
        for image in batch.images:
            assert (batch["mm_token_type_ids"][image.offset : image.end] == 1).all()
        if batch.is_dummy:
            continue
        assert int((batch["mm_token_type_ids"] == 1).sum() if batch.images else 0) == sum(
            i.length for i in batch.images
        )
        expected = [
            (image.hash, image.offset + int(offset))
            for name, offset, n in zip(batch.segments.ids, batch.segments.offsets, batch.segments.lengths, strict=True)
            for image in of[name].images
            if image.end <= n
        ]
        assert [(image.hash, image.offset) for image in batch.images] == expected


def test_samples_of_one_micro_batch_keep_their_input_order() -> None:
    samples = [Sample(id=f"{i:02}", token_ids=[1] * (1 + i % 5)) for i in range(40)]
    step = pack_with(Packing(ranks=2, seq_len=16), samples)
    for batch in batches_of(step):
        assert list(batch.segments.ids) == sorted(batch.segments.ids)


@steps
def test_samples_cut_out_of_a_step_are_those_that_were_packed(samples: list[Sample], packing: Packing) -> None:
    """Every column as far as it is trained; what was one number is one per token."""
    step = try_pack(packing, samples)
    if step is None:
        return
    lengths, given_ = kept(samples, packing), {sample.id: sample for sample in samples}
    found = [cut for rank in step.ranks for cut in rank.samples()]
    assert sorted(cut.id for cut in found) == sorted(lengths)
    for cut in found:
        sample, length = given_[cut.id], lengths[cut.id]
        for name in ("group", "prompt", "env", "run", "mode", "policy_version"):
            assert getattr(cut, name) == getattr(sample, name)
        assert cut.images == tuple(span for span in sample.images if span.end <= length)
        for name, cells in sample.columns.items():
            whole = cells if isinstance(cells, Ragged) or cells.ndim else np.full(sample.num_tokens, cells)
            assert same_bits(cut[name], whole[:length]), name
