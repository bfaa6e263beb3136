"""Awkward batches, one by one: empty, tiny, giant, fewer samples than ranks, images alone."""

from __future__ import annotations

import time

import numpy as np
import pytest

from penstock.arrays import Sample, SampleMetadata
from penstock.errors import ConfigError
from penstock.packing import Modalities, Packing, pack, plan
from tests.packing.small_samples import SAFE, batches_of, image, picture, real, sample


def test_an_empty_batch_is_a_step_without_micro_batches() -> None:
    step = pack([], ranks=4, seq_len=16)
    assert [len(rank) for rank in step.ranks] == [0, 0, 0, 0]
    assert [list(rank) for rank in step.ranks] == [[], [], [], []]
    assert step.loss_tokens == 0 and step.denominators.per_loss_token == 0.0
    step.accounting.check()
    assert step.accounting.waste == step.accounting.efficiency == 0.0


def test_fewer_samples_than_ranks_leave_dummies_of_the_least_length() -> None:
    step = pack([sample(10, "a"), sample(7, "b")], ranks=5, seq_len=16, pad_to_multiple_of=4)
    assert step.num_micro_batches == 1
    assert sorted(b.num_tokens for b in batches_of(step)) == [4, 4, 4, 8, 12]
    assert step.accounting.total.dummy_micro_batches == 3
    step.accounting.check()


@pytest.mark.parametrize("count", [7, 8, 9, 31, 33])
def test_sample_counts_that_do_not_divide_need_no_dummies(count: int) -> None:
    step = pack([sample(3 + i % 4) for i in range(count)], ranks=4, seq_len=8)
    assert step.accounting.total.dummy_micro_batches == 0
    assert step.accounting.total.samples == count


def test_one_sample_on_one_rank() -> None:
    step = pack([sample(5, "only")], ranks=1, seq_len=8)
    (batch,) = step.ranks[0]
    assert batch.segments.ids == ("only",) and batch.padding == 0
    assert step.accounting.waste == pytest.approx(0.0)


def test_one_token_samples_keep_their_boundaries() -> None:
    step = pack([Sample(token_ids=[9]) for _ in range(6)], ranks=2, seq_len=4, pad_to_multiple_of=4)
    for batch in batches_of(step):
        assert batch.sequence_lengths.tolist() == [1, 1, 1, 1]
        assert batch.sample_count == 3 and batch.padding == 1
        assert batch["position_ids"].tolist() == [0, 0, 0, 0]


def test_samples_just_over_half_the_cap_have_a_micro_batch_each() -> None:
    step = pack([sample(9) for _ in range(16)], ranks=2, seq_len=16)
    assert step.num_micro_batches == 8
    assert {b.sample_count for b in batches_of(step)} == {1}


def test_one_giant_among_tiny_samples_bounds_the_step() -> None:
    step = pack([sample(600, "giant"), *[sample(2) for _ in range(50)]], ranks=4, seq_len=600)
    accounts = step.accounting
    assert accounts.bound_by_longest_sample
    assert accounts.step_cost == pytest.approx(accounts.lower_bound)
    assert [b.sample_count for b in batches_of(step) if "giant" in b.segments.ids] == [1]


def test_sixty_four_runs_of_one_sample_share_rows() -> None:
    samples = [sample(3 + i % 5, run=f"r{i}") for i in range(64)]
    step = pack(samples, ranks=16, seq_len=16)
    assert step.num_micro_batches == 4 and step.accounting.total.dummy_micro_batches == 0
    assert all(b.sample_count == 1 for b in batches_of(step))
    assert len(step.totals.tenants) == 64
    apart = pack(samples, ranks=16, seq_len=16, rows_by="tenant")
    assert apart.num_micro_batches == 64


def test_only_multimodal_samples_have_only_image_rows() -> None:
    step = pack([picture(12, image(1)) for _ in range(10)], ranks=4, seq_len=24)
    assert {b.modality for b in batches_of(step)} == {"image"}
    assert sum(len(b.images) for b in real(step)) == 10


def test_one_image_sample_with_sixty_four_ranks_runs_the_vision_tower_everywhere() -> None:
    samples = [picture(40, image(3), image(20, side=8), name="seen"), *[sample(8) for _ in range(64)]]
    step = pack(samples, ranks=64, seq_len=64)
    first = [rank[0] for rank in step.ranks]
    assert {b.modality for b in first} == {"image"} and {rank[1].modality for rank in step.ranks} == {"text"}
    dummies = [b for b in first if b.is_dummy]
    assert len(dummies) == 63
    for batch in dummies:
        # The shortest prefix with an image: three tokens, then four placeholders.
        assert batch.num_tokens == 7 and [i.offset for i in batch.images] == [3]
        assert batch["mm_token_type_ids"].tolist() == [0, 0, 0, 1, 1, 1, 1]
        assert batch["token_ids"].tolist() == [1, 2, 3, 4, 5, 6, 7]
        assert batch.loss_tokens == batch.sample_count == 0
    (seen,) = [b for b in first if not b.is_dummy]
    dummies[0].columns["token_ids"][:] = 0
    assert seen["token_ids"][0] == 1 and dummies[1]["token_ids"][0] == 1


def test_text_and_images_share_a_micro_batch_only_where_declared_safe() -> None:
    samples = [picture(8, image(1), name="image"), sample(8, "text")]
    assert all(b.sample_count == 1 for b in batches_of(pack(samples, ranks=1, seq_len=16)))
    (batch,) = pack(
        samples, ranks=1, seq_len=16, modalities=Modalities(together=("text", "image")), packed_images=SAFE
    ).ranks[0]
    assert batch.segments.ids == ("image", "text") and batch.modality == "image"


def test_a_step_without_trained_tokens_has_zero_denominators_and_no_nan() -> None:
    step = pack([Sample(token_ids=[1, 2, 3]) for _ in range(4)], ranks=2, seq_len=8)
    assert step.loss_tokens == 0 and step.denominators.per_loss_token == 0.0
    assert step.denominators.rl_tokens == 0 and step.denominators.samples == 4
    assert all(np.isfinite(v) for v in step.accounting.metrics(0).values())


@pytest.mark.parametrize("together", [("text",), ("text", "text"), ("text", "audio")])
def test_modalities_that_make_no_sense_together_are_refused(together: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"modalities\.together"):
        Modalities(together=together)


@pytest.mark.deep
def test_a_hundred_thousand_samples_are_planned_within_two_seconds() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(8, 1, 100_000)), 1, 32_000).astype(np.int64)
    started = time.process_time()
    made = plan(SampleMetadata.of_lengths(lengths), Packing(ranks=64, seq_len=32_768))
    assert time.process_time() - started < 2.0
    made.accounting.check()
    assert sum(len(rank_plan.order) for rank_plan in made.rank_plans) == len(lengths)
