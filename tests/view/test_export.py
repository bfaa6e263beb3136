"""Token export: the records, what is in them and what is not."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.arrays import ImageSpan, Sample
from penstock.errors import InvalidInput
from penstock.packing import pack
from penstock.view import Record, TokenExporter
from penstock.view.folders import read_done
from penstock.view.jsonl import encode_line, parse_line
from tests.view.exporting import batch_of, export, lines_of, sample, terms_for


def test_a_record_has_the_documented_fields_in_order(tmp_path: Path) -> None:
    span = ImageSpan(hash="ab" * 32, grid=(1, 4, 4), offset=2, length=4, width=64, height=64)
    types = [0, 0, 1, 1, 1, 1, 0, 0]
    more = {"images": [span], "mm_token_type_ids": types, "rewards": 0.5}
    one = sample("s1", 8, group="g", prompt="sum 17", env="math", policy_version=5, **more)
    export(tmp_path, batch_of(one))
    (line,) = lines_of(tmp_path)
    fields = {name: line[name] for name in list(line)[:19]}
    assert fields == {
        "schema_version": 1,
        "step": 1,
        "export_step": 1,
        "rank": 0,
        "micro_step": 0,
        "micro_sequence_idx": 0,
        "export_sequence_idx": 0,
        "run_id": None,
        "env_name": "math",
        "training_mode": "rl",
        "sample_id": "s1",
        "group_id": "g",
        "prompt": "sum 17",
        "rollout": None,
        "policy_version": 5,
        "staleness": 2,
        "rule": None,
        "images": [
            {
                "hash": "ab" * 32,
                "grid": [1, 4, 4],
                "merge": 2,
                "offset": 2,
                "length": 4,
                "media_type": "",
                "width": 64,
                "height": 64,
                "num_bytes": 0,
            }
        ],
        "columns": None,
    }
    assert list(line)[19:] == [
        "token_ids",
        "loss_mask",
        "inference_logprobs",
        "advantages",
        "rewards",
        "mm_token_type_ids",
        "position_ids",
        "trainer_logprobs",
        "entropy",
        "mismatch_kl",
        "log_importance_ratio",
        "importance_ratio",
        "prob_delta",
        "loss",
        "is_masked",
        "is_masked_high",
        "is_masked_low",
    ]
    assert line["rewards"] == [0.5] * 8 and line["is_masked"] == [None] * 8 and line["loss_mask"][0] is False
    assert len({len(values) for name, values in line.items() if isinstance(values, list) and name != "images"}) == 1


def test_padding_dummies_and_samples_without_a_trained_token_are_not_written(tmp_path: Path) -> None:
    context = Sample(id="context", token_ids=[1, 2], loss_mask=[0, 0], logprobs=[0, 0], advantages=0.0)
    packed = pack([sample("a", 5), context, sample("b", 1), sample("c", 3)], ranks=1, seq_len=16, pad_to_multiple_of=16)
    (batch,) = packed.ranks[0]
    assert batch.padding == 5
    export(tmp_path, batch)
    lines = lines_of(tmp_path)
    order = list(batch.segments.ids)
    assert {line["sample_id"] for line in lines} == {"a", "c"}
    assert [line["micro_sequence_idx"] for line in lines] == [order.index(line["sample_id"]) for line in lines]
    assert [line["export_sequence_idx"] for line in lines] == [0, 1]
    assert {line["sample_id"]: len(line["token_ids"]) for line in lines} == {"a": 5, "c": 3}


def test_a_dummy_counts_as_a_micro_step_and_writes_nothing(tmp_path: Path) -> None:
    step = pack([sample("a", 5), sample("b", 4), sample("c", 4)], ranks=2, seq_len=5, micro_batch_max_tokens=5)
    ranks = [[batch.is_dummy for batch in rank] for rank in step.ranks]
    assert any(any(rank) for rank in ranks)
    for rank, own in enumerate(step.ranks):
        export(tmp_path, *own, rank=rank, world=2)
    lines = [*lines_of(tmp_path), *lines_of(tmp_path, rank=1)]
    assert {line["sample_id"] for line in lines} == {"a", "b", "c"}
    done = read_done(tmp_path / "token_exports/step_1", 1)
    assert done is not None and [batch.is_dummy for batch in done.micro_batches] == ranks[1]


@settings(max_examples=200)
@given(values=st.lists(st.floats(width=32) | st.sampled_from([math.nan, math.inf, -math.inf, 1e-45]), min_size=1))
def test_floats_read_back_bit_for_bit_and_nothing_else_is_written(values: list[float]) -> None:
    array = np.array(values, np.float32)
    record = Record(
        fields={"step": 1},
        columns={"token_ids": np.arange(len(values)), "loss_mask": np.ones(len(values), bool), "entropy": array},
    )
    line = encode_line(record)
    assert line.endswith(b"}\n") and line.count(b"\n") == 1
    decoded = json.loads(line, parse_constant=pytest.fail)["entropy"]
    assert [value is None for value in decoded] == (~np.isfinite(array)).tolist()
    finite = np.isfinite(array)
    back = parse_line(line).columns.get("entropy", np.full(len(array), np.nan, np.float32))
    assert (back[finite].view(np.uint32) == array[finite].view(np.uint32)).all() and np.isnan(back[~finite]).all()


def test_floats_are_written_as_short_as_they_can_be() -> None:
    values = np.array([0.1, -0.3333333, 1e-30, 16777216, 0.0], np.float32)
    record = Record(
        fields={"step": 1},
        columns={"token_ids": np.arange(5), "loss_mask": np.ones(5, bool), "entropy": values},
    )
    text = encode_line(record).split(b'"entropy":[')[1].split(b"]")[0].decode()
    assert [float(t) for t in text.split(",")] == [float(str(v)) for v in values]
    assert [len(t.lstrip("-0.")) for t in text.split(",")][:2] == [1, 7]


def test_names_that_could_break_a_line_are_escaped(tmp_path: Path) -> None:
    hostile = 'a"\u2028\u2029</script>\u202e'
    export(tmp_path, batch_of(sample("x", 3, env=hostile)))
    raw = (tmp_path / "token_exports/step_1/rank_0.jsonl").read_bytes()
    assert raw.isascii() and raw.count(b"\n") == 1
    assert lines_of(tmp_path)[0]["env_name"] == hostile


def test_misaligned_terms_raise_and_name_the_column(tmp_path: Path) -> None:
    batch = batch_of(sample("a", 5))
    with TokenExporter(tmp_path) as exporter, pytest.raises(InvalidInput, match="entropy: 4 values for 5 tokens"):
        exporter.write(1, batch, terms_for(batch, entropy=np.zeros(4)))


@pytest.mark.parametrize("name", ["rl", "opd", "sft", "mixed", "ipo", "ppo", "ref_kl"])
def test_exported_masks_are_the_masks_applied_in_every_mode(tmp_path: Path, name: str) -> None:
    """Through real tensors: a token is reported masked exactly where the policy gradient did not reach it."""
    torch = pytest.importorskip("torch")
    from penstock import to_torch
    from penstock.train.loss import ByMode, Dppo, Grpo, Ipo, Loss, RefKl

    losses: dict[str, Loss] = {
        "ipo": ByMode(rl=Ipo(kl_tau=0.0)),
        "ppo": ByMode(rl=Grpo()),
        "ref_kl": ByMode(ref_kl=RefKl(kl_tau=0.0)),
    }
    rng = np.random.default_rng(3)
    modes = {"mixed": ["rl", "opd", "sft"], "ref_kl": ["opd"], "ipo": ["rl"], "ppo": ["rl"]}.get(name, [name])
    samples = [
        Sample(
            id=f"{mode}{i}",
            mode=mode,
            token_ids=rng.integers(0, 99, 40),
            loss_mask=np.arange(40) > 9,
            logprobs=-rng.exponential(0.7, 40),
            advantages=rng.normal(size=40),
            teacher_logprobs=-rng.exponential(0.7, 40),
        )
        for i in range(3)
        for mode in modes
    ]
    batch = batch_of(*samples, pad_to=64)
    loss = losses.get(name) or ByMode(rl=Dppo(kl_tau=0.0))
    trainer = torch.tensor(-rng.exponential(0.7, batch.num_tokens), dtype=torch.float32, requires_grad=True)
    terms: Any = loss(to_torch(batch), trainer)
    terms.loss.sum().backward()
    with TokenExporter(tmp_path) as exporter:
        exporter.write(1, batch, terms)
        exporter.close_step(1)
    offsets = dict(zip(batch.segments.ids, batch.segments.offsets.tolist(), strict=True))
    masked = 0
    for line in lines_of(tmp_path):
        own = slice(offsets[line["sample_id"]], offsets[line["sample_id"]] + 40)
        if line["training_mode"] == "sft":
            assert line["is_masked"] == line["importance_ratio"] == [None] * 40 and line["rule"] is None
            continue
        slope = trainer.grad[own].numpy()
        trained, reported = np.array(line["loss_mask"]), np.array(line["is_masked"])
        if line["training_mode"] == "rl" or name == "ref_kl":
            assert (reported == (trained & (slope == 0))).all()
        assert reported.tolist() == terms.masked[own].tolist()
        assert line["is_masked_high"] == terms.masked_high[own].tolist()
        assert line["is_masked_low"] == terms.masked_low[own].tolist()
        sampled = np.array([value is not None for value in line["importance_ratio"]])
        assert sampled[trained].all()
        ratios = np.array(line["importance_ratio"], np.float32)[sampled]
        assert ratios.tolist() == terms.ratio[own].numpy()[sampled].tolist()
        assert line["rule"]["kind"] == {
            "rl": "dppo",
            "opd": "opd",
            "mixed": {"rl": "dppo"}.get(line["training_mode"], "opd"),
        }.get(name, name)
        masked += int(reported.sum())
    assert masked or name == "sft"


def test_samples_that_share_tokens_are_exported_as_without_trees(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    ids, experts = rng.integers(0, 99, 60), rng.integers(0, 9, (60, 2, 2), np.uint8)
    samples = [
        Sample(
            id=f"s{i}",
            token_ids=np.append(ids, rng.integers(0, 99, 5 + i)),
            loss_mask=np.arange(65 + i) > 50,
            logprobs=-rng.random(65 + i),
            advantages=float(i),
            routed_experts=np.concatenate([experts, rng.integers(0, 9, (5 + i, 2, 2), np.uint8)]),
        )
        for i in range(3)
    ]
    for trees in (False, True):
        (batch,) = pack(samples, ranks=1, seq_len=400, trees=trees).ranks[0]
        assert (batch.forest is not None) == trees
        export(tmp_path / str(trees), batch)
    plain, shared = (
        sorted(lines_of(tmp_path / str(t)), key=lambda line: str(line["sample_id"])) for t in (False, True)
    )
    for line in plain + shared:
        del line["micro_sequence_idx"], line["export_sequence_idx"]
    assert plain == shared and "routed_experts" in plain[0]
