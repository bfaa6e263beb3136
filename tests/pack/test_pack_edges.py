"""The awkward inputs, one by one."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.arrays import ImageSpan, Sample, Samples
from penstock.errors import ConfigError, CorruptFrame, InvalidInput
from penstock.pack import (
    Cost,
    MicroBatch,
    Modalities,
    PackedImages,
    Packing,
    RankPlan,
    SampleFacts,
    Step,
    bytes_needed,
    fill,
    pack,
    plan,
)

SAFE = PackedImages(explicit_boundaries=True, varlen_attention=True)


def sample(length: int, name: str | None = None, **more: Any) -> Sample:
    mask = [False] + [True] * (length - 1)
    return Sample(id=name, token_ids=np.arange(1, length + 1), loss_mask=mask, **more)


def image(offset: int, side: int = 4) -> ImageSpan:
    return ImageSpan(hash=f"{offset:064x}", grid=(1, side, side), offset=offset, length=side * side // 4)


def picture(length: int, *spans: ImageSpan, name: str | None = None, **more: Any) -> Sample:
    types = np.zeros(length, np.uint8)
    for span in spans:
        types[span.offset : span.end] = 1
    return sample(length, name, images=spans, mm_token_type_ids=types, **more)


def batches_of(step: Step) -> list[MicroBatch]:
    return [batch for rank in step.ranks for batch in rank]


def real(step: Step) -> list[MicroBatch]:
    return [batch for batch in batches_of(step) if not batch.is_dummy]


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
    assert len(step.totals.runs) == 64
    apart = pack(samples, ranks=16, seq_len=16, rows_by="run")
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


def test_samples_at_the_cap_fit_and_one_more_token_is_over_it() -> None:
    step = pack([sample(8, "at"), sample(9, "over"), sample(2)], ranks=1, seq_len=16, micro_batch_max_tokens=8)
    assert step.accounting.over_cap == 1 and step.accounting.truncated_samples == 0
    assert sorted(b.num_tokens for b in step.ranks[0]) == [2, 8, 9]


def test_a_strict_cap_names_the_sample_that_breaks_it() -> None:
    with pytest.raises(InvalidInput, match=r"'over'.*9 tokens.*at most 8 tokens"):
        pack([sample(8), sample(9, "over")], ranks=1, seq_len=16, micro_batch_max_tokens=8, over_cap="strict")


def test_padding_counts_towards_the_cap() -> None:
    step = pack([sample(7) for _ in range(8)], ranks=1, seq_len=30, micro_batch_max_tokens=30, pad_to_multiple_of=8)
    assert {b.num_tokens for b in step.ranks[0]} <= {8, 16, 24}
    assert step.accounting.over_cap == 0


def test_the_cap_is_separate_from_truncation() -> None:
    samples = [sample(20, f"s{i}") for i in range(12)]
    whole = pack(samples, ranks=2, seq_len=20)
    small = pack(samples, ranks=2, seq_len=60, micro_batch_max_tokens=20)
    assert whole.accounting.total.tokens == small.accounting.total.tokens == 240
    assert small.accounting.truncated_tokens == 0
    default = pack(samples, ranks=2, seq_len=60)
    assert default.num_micro_batches < small.num_micro_batches
    assert default.loss_tokens == small.loss_tokens


def test_longer_samples_are_cut_in_every_column_and_counted() -> None:
    long = sample(10, "long", logprobs=-np.arange(10.0), advantages=np.arange(10.0), rewards=2.0)
    (batch,) = pack([long], ranks=1, seq_len=6).ranks[0]
    assert {len(values) for values in batch.columns.values()} == {6}
    assert batch["logprobs"].tolist() == [0, -1, -2, -3, -4, -5] and batch["rewards"].tolist() == [2.0] * 6
    accounts = pack([long], ranks=1, seq_len=6).accounting
    assert (accounts.truncated_samples, accounts.truncated_tokens, accounts.truncated_loss_tokens) == (1, 4, 4)


@pytest.mark.parametrize(
    ("seq_len", "tokens", "images"), [(20, 20, 2), (14, 14, 2), (13, 10, 1), (10, 10, 1), (6, 6, 1), (5, 2, 0)]
)
def test_truncation_never_splits_an_image(seq_len: int, tokens: int, images: int) -> None:
    (batch,) = pack([picture(20, image(2), image(10))], ranks=1, seq_len=seq_len).ranks[0]
    assert batch.num_tokens == tokens and len(batch.images) == images
    assert batch.modality == ("image" if images else "text")
    assert int((batch["mm_token_type_ids"] == 1).sum()) == 4 * images


def test_a_sample_that_begins_with_an_image_that_does_not_fit_is_dropped_and_counted() -> None:
    samples = [picture(20, image(0, side=8), name="big"), sample(5, "fine")]
    step = pack(samples, ranks=2, seq_len=10)
    assert step.plan.dropped == {0: "unpackable"}
    accounts = step.accounting
    accounts.check()
    assert accounts.dropped == {"unpackable": 1} and accounts.dropped_tokens == 20
    assert accounts.total.samples == step.denominators.samples == 1
    with pytest.raises(InvalidInput, match=r"'big'.*none of 1 can be packed.*seq_len 10"):
        pack(samples[:1], ranks=2, seq_len=10)


def test_patch_and_sample_caps_hold() -> None:
    pictures = [picture(8, image(1)) for _ in range(9)]
    by_patches = pack(pictures, ranks=1, seq_len=80, max_patches=32, packed_images=SAFE)
    assert max(sum(i.num_patches for i in b.images) for b in by_patches.ranks[0]) == 32
    by_samples = pack([sample(2) for _ in range(10)], ranks=1, seq_len=80, max_samples=3)
    assert sorted(b.sample_count for b in by_samples.ranks[0]) == [2, 2, 3, 3]
    over = pack(pictures, ranks=1, seq_len=80, max_patches=8)
    assert over.accounting.over_cap == 9 and {b.sample_count for b in over.ranks[0]} == {1}


def test_optional_columns_of_some_samples_are_filled_to_full_length() -> None:
    samples = [
        sample(4, "bare", mode="sft"),  # which is not trained by advantages
        sample(
            3, "full", teacher_logprobs=[-1.0, -2.0, -3.0], rewards=0.5, temperatures=0.7, advantages=[1.0, 2.0, 3.0]
        ),
    ]
    (batch,) = pack(samples, ranks=1, seq_len=8, pad_to_multiple_of=8).ranks[0]
    assert batch["teacher_logprobs"].tolist() == [0, 0, 0, 0, -1, -2, -3, 0]
    assert batch["advantages"].tolist() == [0, 0, 0, 0, 1, 2, 3, 0]
    assert batch["temperatures"].tolist() == pytest.approx([1, 1, 1, 1, 0.7, 0.7, 0.7, 1])
    assert np.isnan(batch["rewards"]).tolist() == [True] * 4 + [False] * 3 + [True]


def test_advantages_that_only_some_of_the_samples_trained_by_them_have_are_refused() -> None:
    with pytest.raises(
        InvalidInput, match=r"samples 'bare': no advantages, which 1 other samples of the step have; .* of mode rl"
    ):
        pack([sample(4, "bare"), sample(4, "full", advantages=0.5)], ranks=1, seq_len=8)
    untrained = Sample(id="context", token_ids=[1, 2])
    assert len(pack([untrained, sample(4, "full", advantages=0.5)], ranks=1, seq_len=8).ranks) == 1


@pytest.mark.parametrize(
    ("column", "other_mode"),
    [("logprobs", "sft"), ("advantages", "sft"), ("teacher_logprobs", "rl"), ("teacher_topk_logprobs", "opd")],
)
def test_a_column_that_only_samples_of_other_modes_have_is_not_filled_where_it_is_needed(
    column: str, other_mode: str
) -> None:
    lacking = sample(4, "bare", mode="opd" if column.startswith("teacher") else "rl")
    values: dict[str, Any] = {column: -np.ones(4)}
    if column == "teacher_topk_logprobs":
        values = {column: -np.ones((4, 2)), "teacher_topk_ids": np.ones((4, 2), np.uint32)}
    having = sample(4, "full", mode=other_mode, **values)
    with pytest.raises(InvalidInput, match=f"samples 'bare': no {column}, which 1 other samples of the step have"):
        pack([lacking, having], ranks=1, seq_len=8)


def test_dummies_carry_every_column_of_the_step_wherever_its_samples_are() -> None:
    experts = np.full((6, 3, 2), 300, np.uint16)
    samples = [sample(6, "a", routed_experts=experts, advantages=1.0, logprobs=-np.ones(6))]
    step = pack(samples, ranks=3, seq_len=8, pad_to_multiple_of=4)
    columns = Samples.of(samples)
    for rank in step.ranks:
        received = RankPlan.from_bytes(rank.rank_plan.relative().to_bytes())
        (batch,) = fill(columns.take(rank.rank_plan.needs), received)
        assert tuple(batch) == tuple(rank[0]) == (*rank.rank_plan.columns, "position_ids")
        assert batch["routed_experts"].dtype == np.uint16
        assert batch["routed_experts"].shape == (batch.num_tokens, 3, 2)
        if batch.is_dummy:
            assert len(received.needs) == 0 and not batch["routed_experts"].any()


@pytest.mark.parametrize("rows_by", ["modality", "run"])
def test_dummies_carry_the_run_of_their_row_through_bytes_as_well(rows_by: Any) -> None:
    samples = [sample(8, "a", run="one"), picture(8, image(1), name="b", run="two"), sample(8, "c", run="two")]
    step = pack(samples, ranks=3, seq_len=8, rows_by=rows_by)
    for rank in step.ranks:
        again = fill(Samples.of(samples), RankPlan.from_bytes(rank.rank_plan.to_bytes()))
        assert [b.run for b in again] == [b.run for b in rank] == [rank[m].run for m in range(len(rank))]
    for row in zip(*step.ranks, strict=True):
        assert {b.run for b in row if b.is_dummy} <= {b.run for b in row if not b.is_dummy}


def test_every_micro_batch_of_a_step_has_the_same_columns() -> None:
    samples = [sample(8, f"s{i}", **({"teacher_logprobs": -np.ones(8)} if i == 0 else {})) for i in range(6)]
    step = pack(samples, ranks=3, seq_len=8)
    assert {tuple(b.columns) for b in batches_of(step)} == {
        ("token_ids", "loss_mask", "teacher_logprobs", "position_ids")
    }


def test_modes_share_a_micro_batch_through_weight_columns() -> None:
    samples = [
        sample(2, "a"),
        sample(2, "b", mode="sft"),
        sample(2, "c", mode="opd"),
        sample(2, "d", rl_weights=[0, 2]),
    ]
    (batch,) = pack(samples, ranks=1, seq_len=12, pad_to_multiple_of=12).ranks[0]
    assert batch["rl_weights"].tolist() == [1, 1, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0]
    assert batch["ce_weights"].tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    assert batch["ref_kl_weights"].tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0]
    plain = pack(samples[:1], ranks=1, seq_len=12)
    assert "rl_weights" not in plain.ranks[0][0]


def test_trained_samples_without_sampler_logprobs_among_others_that_have_them_are_named() -> None:
    have, lack = sample(3, "have", logprobs=[0.0, -1.0, -1.0]), sample(3, "lack")
    with pytest.raises(InvalidInput, match=r"'lack'.*no logprobs.*1 other"):
        pack([have, lack], ranks=1, seq_len=8)
    untrained = Sample(id="context", token_ids=[1, 2])
    other_mode = sample(3, "sft", mode="sft")
    step = pack([have, untrained, other_mode], ranks=1, seq_len=8)
    assert step.ranks[0][0]["logprobs"].tolist() == [0, -1, -1, 0, 0, 0, 0, 0]
    with pytest.raises(InvalidInput, match=r"'lack'.*no teacher_logprobs"):
        teacher = sample(3, "have", mode="opd", teacher_logprobs=[0.0, -1.0, -1.0])
        pack([teacher, sample(3, "lack", mode="opd")], ranks=1, seq_len=8)


def test_routed_experts_never_meet_samples_without_them() -> None:
    routed = [sample(4, f"r{i}", routed_experts=np.full((4, 2, 2), i + 1, np.uint8)) for i in range(2)]
    step = pack([*routed, sample(4, "plain")], ranks=1, seq_len=16, pad_to_multiple_of=16)
    by_ids = {b.segments.ids: b for b in step.ranks[0]}
    assert by_ids["r0", "r1"]["routed_experts"].shape == (16, 2, 2)
    assert by_ids["r0", "r1"]["routed_experts"][:, 0, 0].tolist() == [1] * 4 + [2] * 4 + [0] * 8
    assert "routed_experts" not in by_ids[("plain",)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"micro_batch_max_tokens": 65}, "micro_batch_max_tokens: 65 with seq_len 64.*long_rows=True"),
        ({"micro_batch_max_tokens": 0}, "micro_batch_max_tokens: 0"),
        ({"micro_batch_max_tokens": -1}, "micro_batch_max_tokens: -1"),
        ({"micro_batch_max_tokens": 8, "pad_to_multiple_of": 16}, "8 with pad_to_multiple_of 16"),
        ({"ranks": 0}, "ranks: 0"),
        ({"seq_len": 0}, "seq_len: 0"),
        ({"max_samples": 0}, "max_samples: 0"),
        ({"max_patches": -3}, "max_patches: -3"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of: 0"),
        ({"pad_id": -1}, "pad_id: -1"),
        ({"over_cap": "loose"}, "over_cap: 'loose'"),
        ({"rows_by": "rank"}, "rows_by: 'rank'"),
        ({"ranks": 2.0}, "ranks: 2.0"),
    ],
)
def test_settings_that_cannot_hold_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Packing(**{"ranks": 2, "seq_len": 64, **settings})


def test_rows_longer_than_a_sample_are_possible_when_asked_for() -> None:
    step = pack([sample(10) for _ in range(8)], ranks=2, seq_len=10, micro_batch_max_tokens=40, long_rows=True)
    assert [b.num_tokens for b in batches_of(step)] == [40, 40]
    assert step.accounting.efficiency == 1.0


@pytest.mark.parametrize("together", [("text",), ("text", "text"), ("text", "audio")])
def test_modalities_that_make_no_sense_together_are_refused(together: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"modalities\.together"):
        Modalities(together=together)


def test_a_hundred_thousand_samples_are_planned_within_two_seconds() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(8, 1, 100_000)), 1, 32_000).astype(np.int64)
    count = len(lengths)
    zeros = np.zeros(count, np.int64)
    facts = SampleFacts(
        lengths=lengths,
        kept=lengths,
        loss_tokens=lengths - 1,
        kept_loss_tokens=lengths - 1,
        term_tokens=np.zeros((count, 3), np.int64),
        patches=zeros,
        modality=zeros.astype(np.uint8),
        stub=zeros,
        stub_patches=zeros,
        has={},
        shapes={},
        ids=tuple(map(str, range(count))),
        group=("",) * count,
        run=("",) * count,
        mode=("rl",) * count,
    )
    started = time.process_time()
    made = plan(facts, Packing(ranks=64, seq_len=32_768))
    assert time.process_time() - started < 2.0
    made.accounting.check()
    assert sum(len(rank_plan.order) for rank_plan in made.rank_plans) == count


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


def test_the_costliest_micro_batch_of_a_row_goes_to_the_rank_with_the_least_so_far() -> None:
    # Two rows of bins that cannot be split: 9, 8 and 7, 5.
    step = pack([sample(n) for n in (9, 8, 7, 5)], ranks=2, seq_len=9)
    assert sorted(sorted(b.num_tokens for b in rank) for rank in step.ranks) == [[5, 9], [7, 8]]


def test_the_cost_decides_what_is_balanced() -> None:
    samples = [sample(40, "long"), *[sample(10, f"s{i}") for i in range(8)]]
    by_tokens = pack(samples, ranks=2, seq_len=100, cost=Cost(per_token=1.0, per_token_squared=0.0))
    assert sorted(rank[0].sample_tokens for rank in by_tokens.ranks) == [60, 60]
    by_squares = pack(samples, ranks=2, seq_len=100, cost=Cost(per_token=0.0, per_token_squared=1.0))
    assert sorted(rank[0].sample_tokens for rank in by_squares.ranks) == [40, 80]


def test_a_trained_sample_for_distillation_without_the_teachers_k_best_is_refused_beside_others() -> None:
    base: dict[str, Any] = {"mode": "opd", "token_ids": [1, 2], "loss_mask": [0, 1], "logprobs": [0, -1]}
    rows: dict[str, Any] = {"teacher_topk_ids": [[0], [5]], "teacher_topk_logprobs": [[0.0], [-1.0]]}
    with pytest.raises(InvalidInput, match="samples 'without': no teacher_topk_logprobs, which 1 other samples"):
        pack([Sample(id="with", **base, **rows), Sample(id="without", **base)], ranks=1, seq_len=8)
