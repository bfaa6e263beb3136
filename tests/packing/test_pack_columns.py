"""Columns and modes that only some samples of a step have: filled, refused, or kept apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.arrays import Sample, Samples
from penstock.errors import InvalidInput
from penstock.packing import RankPlan, fill, pack
from tests.packing.small_samples import batches_of, image, picture, sample


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


@pytest.mark.parametrize("rows_by", ["modality", "tenant"])
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


@pytest.mark.parametrize(
    ("lack", "column"),
    [
        ({"ref_kl_weights": [0.0, 0.5], "logprobs": [0, -1], "advantages": 1.0}, "teacher_logprobs"),
        ({"mode": "sft", "ref_kl_weights": [0.0, 1.0], "logprobs": [0, -1]}, "teacher_logprobs"),
        ({"mode": "sft", "rl_weights": [0.0, 1.0], "advantages": 1.0}, "logprobs"),
        ({"mode": "opd", "rl_weights": [0.0, 1.0], "logprobs": [0, -1], "teacher_logprobs": [0, -1]}, "advantages"),
    ],
)
def test_weights_of_a_term_need_its_columns_whatever_the_mode(lack: dict[str, Any], column: str) -> None:
    tokens: dict[str, Any] = {"token_ids": [1, 2], "loss_mask": [0, 1]}
    have = [
        Sample(id="rl", **tokens, logprobs=[0, -1], advantages=1.0),
        Sample(id="opd", **tokens, mode="opd", logprobs=[0, -1], teacher_logprobs=[0, -1]),
    ]
    with pytest.raises(InvalidInput, match=f"samples 'lack': no {column}, which . other samples of the step have"):
        pack([*have, Sample(id="lack", **tokens, **lack)], ranks=1, seq_len=8)
    without = {name: values for name, values in lack.items() if not name.endswith("_weights")}
    weights: dict[str, Any] = {name: [0.0, 0.0] for name in lack if name.endswith("_weights")}
    pack([*have, Sample(id="no weight", **tokens, **without, **weights)], ranks=1, seq_len=8)


def test_routed_experts_never_meet_samples_without_them() -> None:
    routed = [sample(4, f"r{i}", routed_experts=np.full((4, 2, 2), i + 1, np.uint8)) for i in range(2)]
    step = pack([*routed, sample(4, "plain")], ranks=1, seq_len=16, pad_to_multiple_of=16)
    by_ids = {b.segments.ids: b for b in step.ranks[0]}
    assert by_ids["r0", "r1"]["routed_experts"].shape == (16, 2, 2)
    assert by_ids["r0", "r1"]["routed_experts"][:, 0, 0].tolist() == [1] * 4 + [2] * 4 + [0] * 8
    assert "routed_experts" not in by_ids[("plain",)]


def test_a_trained_sample_for_distillation_without_the_teachers_k_best_is_refused_beside_others() -> None:
    base: dict[str, Any] = {"mode": "opd", "token_ids": [1, 2], "loss_mask": [0, 1], "logprobs": [0, -1]}
    rows: dict[str, Any] = {"teacher_topk_ids": [[0], [5]], "teacher_topk_logprobs": [[0.0], [-1.0]]}
    with pytest.raises(InvalidInput, match="samples 'without': no teacher_topk_logprobs, which 1 other samples"):
        pack([Sample(id="with", **base, **rows), Sample(id="without", **base)], ranks=1, seq_len=8)
