"""What was not measured is null: log-probabilities, ratios and KL of tokens nobody sampled, NaN and infinity."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.arrays import Sample
from penstock.errors import CorruptFile, InvalidInput
from penstock.packing import MicroBatch, pack
from penstock.train.terms import Terms
from penstock.view import Export, TokenExporter
from penstock.view.folders import Done, read_done, write_done
from penstock.view.library import Library, run_point
from penstock.view.parquet import ParquetFile
from tests.support.exports import make_export, terms_of

OF_SAMPLER = ("inference_logprobs", "mismatch_kl", "log_importance_ratio", "importance_ratio", "prob_delta")


def batch_of(*samples: Sample) -> MicroBatch:
    return pack(samples, ranks=1, seq_len=64, pad_to_multiple_of=32).ranks[0][0]


def chat(name: str, mode: str = "rl", **more: Any) -> Sample:
    """Four tokens of context, three sampled; the first of those is not trained, and the last was certain."""
    fields = {"logprobs": [0, 0, 0, 0, -0.5, -0.25, 0.0], "advantages": 1.0, **more}
    return Sample(id=name, mode=mode, token_ids=range(7), loss_mask=[0, 0, 0, 0, 0, 1, 1], **fields)


def exported(folder: Path, batch: MicroBatch, terms: Terms | None = None, **options: Any) -> dict[str, dict[str, Any]]:
    """The records of a micro-batch by sample, as plain lists."""
    with TokenExporter(folder, **options) as exporter:
        exporter.write(1, batch, terms or terms_of(np.random.default_rng(0), batch))
        exporter.close_step(1)
    if "file_format" in options:
        import pyarrow.parquet as pq

        rows = pq.read_table(folder / "token_exports/step_1/rank_0.parquet").to_pylist()
    else:
        text = (folder / "token_exports/step_1/rank_0.jsonl").read_text()
        rows = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    return {row["sample_id"]: row for row in rows}


@pytest.fixture(params=["jsonl", "parquet"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {} if request.param == "jsonl" else {"file_format": ParquetFile}


def test_tokens_that_were_not_sampled_have_no_numbers_of_the_sampler(tmp_path: Path, options: dict[str, Any]) -> None:
    row = exported(tmp_path, batch_of(chat("a")), **options)["a"]
    for name in OF_SAMPLER:
        assert [value is None for value in row[name]] == [True] * 4 + [False] * 3, name
    assert row["inference_logprobs"][4:] == [-0.5, -0.25, 0.0]  # a certain token is not a missing one
    kl = [value for value in row["mismatch_kl"] if value is not None]
    summary = Export(tmp_path).step(1).done()[0].summary
    assert summary is not None and summary.mismatch_kl is not None
    assert summary.mismatch_kl.count == 2 and summary.mismatch_kl.mean == pytest.approx(sum(kl[1:]) / 2)


def test_a_first_token_has_no_prediction(tmp_path: Path, options: dict[str, Any]) -> None:
    rows = exported(tmp_path, batch_of(chat("a"), chat("b")), **options)
    for row in rows.values():
        for name in ("trainer_logprobs", "entropy"):
            assert [value is None for value in row[name]] == [True] + [False] * 6


def test_samples_without_sampler_or_teacher_do_not_borrow_their_neighbours(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    taught = chat("taught", "opd", teacher_logprobs=[0, 0, 0, 0, 0, -0.75, -1.0])
    rows = exported(tmp_path, batch_of(chat("a"), taught, chat("written", "sft", logprobs=None)), **options)
    assert rows["taught"]["teacher_logprobs"] == [None] * 5 + [-0.75, -1.0]
    assert rows["a"].get("teacher_logprobs") is None and rows["written"].get("teacher_logprobs") is None
    for name in OF_SAMPLER:
        written = rows["written"][name]
        assert written is None or written == [None] * 7, name


def test_the_losses_we_ship_export_no_invented_numbers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from penstock import to_torch
    from penstock.train.logits import token_logprobs
    from penstock.train.loss import Dppo

    batch = batch_of(chat("a"), chat("b"))
    tensors = to_torch(batch)
    logits = torch.randn(*tensors["token_ids"].shape, 16, generator=torch.Generator().manual_seed(0))
    logprobs, entropy = token_logprobs(logits, tensors["token_ids"], tensors["sequence_lengths"])
    rows = exported(tmp_path, batch, Dppo()(tensors, logprobs, entropy))
    for row in rows.values():
        assert [value is None for value in row["mismatch_kl"]] == [True] * 4 + [False] * 3
        assert row["trainer_logprobs"][0] is None and row["entropy"][0] is None and None not in row["entropy"][1:]


def test_the_viewer_gets_null_for_tokens_that_were_not_sampled(tmp_path: Path) -> None:
    exported(tmp_path, batch_of(chat("a")))
    found = Library(exports={"x": Export(tmp_path)}).sample("x", "", 1, 0)
    record = json.loads(bytes(found["record"]))
    assert record["mismatch_kl"][:4] == [None] * 4 and record["inference_logprobs"][:4] == [None] * 4


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), np.float64("inf")])
def test_a_metric_that_is_no_number_is_null_and_the_step_is_shown(tmp_path: Path, value: float) -> None:
    batch = batch_of(chat("a"))
    with TokenExporter(tmp_path) as exporter:
        exporter.write(1, batch, terms_of(np.random.default_rng(0), batch))
        exporter.close_step(1, metrics={"grad_norm": value, "lr": np.float32(0.5), "n": 3})
    (step,) = Export(tmp_path).steps()
    assert step.done()[0].metrics == {"grad_norm": None, "lr": 0.5, "n": 3.0}
    assert run_point(step)["metrics"]["grad_norm"] is None
    json.loads((step.path / "rank_0.done").read_text(), parse_constant=pytest.fail)


def test_a_metric_that_cannot_be_a_number_is_refused_by_name(tmp_path: Path) -> None:
    with TokenExporter(tmp_path) as exporter, pytest.raises(InvalidInput, match=r"metrics\['loss'\]: None; give a num"):
        exporter.close_step(1, metrics={"loss": None})  # type: ignore[dict-item]


def test_rewards_and_thresholds_that_are_no_numbers_are_null(tmp_path: Path, options: dict[str, Any]) -> None:
    batch = batch_of(chat("a", rewards=math.nan), chat("b", rewards=1.0))
    batch["advantages"][1] = math.inf
    rules: dict[str, dict[str, float | str]] = {"": {"kind": "dppo", "high": math.inf, "low": math.nan}}
    terms = Terms(
        loss=np.full(batch.num_tokens, np.nan), trainer_logprobs=np.full(batch.num_tokens, -np.inf), rules=rules
    )
    rows = exported(tmp_path, batch, terms, **options)
    rule = rows["b"]["rule"]
    assert (json.loads(rule) if isinstance(rule, str) else rule) == {"kind": "dppo", "high": None, "low": None}
    assert rows["a"]["rewards"] in (None, [None] * 7) and rows["b"]["rewards"] == [1.0] * 7
    step = Export(tmp_path).step(1)
    labels = {record.label: record.fields["rule"] for record in step.records()}
    assert labels["a"] == {"kind": "dppo", "high": None, "low": None}
    point = run_point(step)
    assert point["reward"]["count"] == 1 and point["reward"]["mean"] == 1.0


@pytest.mark.parametrize("damage", [b"", b"{", b'{"rank": 0}', b'{"rank": 0, "world": 1, "attempt": ""}'])
def test_a_marker_that_cannot_be_read_is_an_error_and_not_a_missing_step(tmp_path: Path, damage: bytes) -> None:
    make_export(tmp_path, steps=1, ranks=2, groups=1, size=2)
    step = Export(tmp_path).step(1)
    (step.path / "rank_1.done").write_bytes(damage.replace(b": 0", b": 1"))
    with pytest.raises(CorruptFile, match=r"rank_1\.done: .*export the step again"):
        step.files()


def test_a_marker_that_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    for bad in (Done(rank=0, world=1, attempt=""), Done(rank=0, world=1, attempt="", file="../rank_0.jsonl")):
        with pytest.raises(CorruptFile, match=r"rank_0\.done: says rank 0, file"):
            write_done(tmp_path, bad)
    assert list(tmp_path.iterdir()) == [] and read_done(tmp_path, 0) is None
