"""Token export: the records, what is in them and what is not, restarts, limits, sampling."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.arrays import ImageSpan, Sample
from penstock.errors import Closed, ConfigError, InvalidInput, StorageError
from penstock.pack import MicroBatch, pack
from penstock.testing.exports import make_export, terms_of
from penstock.train.terms import Terms
from penstock.view import EveryKth, Export, First, Keep, NoExport, Record, TokenExporter, Worst
from penstock.view.folders import read_done
from penstock.view.jsonl import encode_line, parse_line


def sample(name: str, count: int, **more: Any) -> Sample:
    mask = [False] + [True] * (count - 1)
    return Sample(id=name, token_ids=range(count), loss_mask=mask, logprobs=[-0.5] * count, advantages=1.0, **more)


def batch_of(*samples: Sample, pad_to: int = 1) -> MicroBatch:
    return pack(
        samples, ranks=1, seq_len=64, micro_batch_max_tokens=4096, long_rows=True, pad_to_multiple_of=pad_to
    ).ranks[0][0]


def terms_for(batch: MicroBatch, **more: Any) -> Terms:
    return Terms(loss=np.zeros(batch.num_tokens), trainer_logprobs=np.full(batch.num_tokens, -0.25), **more)


def lines_of(folder: Path, step: int = 1, rank: int = 0) -> list[dict[str, Any]]:
    text = (folder / f"token_exports/step_{step}/rank_{rank}.jsonl").read_text()
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def export(folder: Path, *batches: MicroBatch, step: int = 1, **options: Any) -> None:
    with TokenExporter(folder, **options) as exporter:
        for batch in batches:
            exporter.write(step, batch, terms_for(batch), policy_version=7)
        exporter.close_step(step)


def test_a_record_has_the_documented_fields_in_order(tmp_path: Path) -> None:
    span = ImageSpan(hash="ab" * 32, grid=(1, 4, 4), offset=2, length=4, width=64, height=64)
    types = [0, 0, 1, 1, 1, 1, 0, 0]
    more = {"images": [span], "mm_token_type_ids": types, "rewards": 0.5}
    one = sample("s1", 8, group="g", prompt="sum 17", env="math", policy_version=5, **more)
    export(tmp_path, batch_of(one))
    (line,) = lines_of(tmp_path)
    facts = {name: line[name] for name in list(line)[:18]}
    assert facts == {
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
        "policy_version": 5,
        "staleness": 2,
        "rule": None,
        "images": [{"hash": "ab" * 32, "offset": 2, "length": 4, "media_type": "", "width": 64, "height": 64}],
        "columns": None,
    }
    assert list(line)[18:] == [
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
        facts={"step": 1},
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
        facts={"step": 1},
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
    from penstock.train.loss import Dppo, Ipo, Loss, PpoClip, RefKl
    from penstock.train.modes import ByMode

    losses: dict[str, Loss] = {
        "ipo": ByMode(rl=Ipo(kl_tau=0.0)),
        "ppo": ByMode(rl=PpoClip()),
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


def test_each_rank_has_its_own_file_and_stable_comes_with_the_last(tmp_path: Path) -> None:
    batch = batch_of(sample("a", 5))
    marker = tmp_path / "token_exports/step_1/STABLE"
    exporters = [TokenExporter(tmp_path, rank=rank, world=3) for rank in range(3)]
    for exporter in exporters:
        exporter.write(1, batch, terms_for(batch))
    for exporter in (exporters[2], exporters[0]):
        exporter.close_step(1)
        exporter.flush()
        assert not marker.exists()
    exporters[1].close_step(1)
    exporters[1].flush()
    assert marker.read_bytes() == b""
    assert sorted(Export(tmp_path).step(1).files()) == [0, 1, 2]
    for exporter in exporters:
        exporter.close()


def test_with_a_barrier_close_step_returns_when_the_step_is_stable(tmp_path: Path) -> None:
    barrier = threading.Barrier(2)
    batch = batch_of(sample("a", 5))
    seen = []

    def rank(number: int) -> None:
        with TokenExporter(tmp_path, rank=number, world=2, barrier=barrier.wait) as exporter:  # type: ignore[arg-type]
            exporter.write(1, batch, terms_for(batch))
            exporter.close_step(1)
            seen.append((tmp_path / "token_exports/step_1/STABLE").exists())

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True, True]


def test_nothing_is_visible_before_close_step(tmp_path: Path) -> None:
    batch = batch_of(sample("a", 5))
    exporter = TokenExporter(tmp_path)
    exporter.write(1, batch, terms_for(batch))
    exporter.flush()
    assert [path.name for path in (tmp_path / "token_exports/step_1").iterdir() if path.name[0] != "."] == []
    exporter.close()
    assert Export(tmp_path).steps() == []


def test_a_restart_takes_back_the_marker_and_keeps_the_finished_file_beside(tmp_path: Path) -> None:
    export(tmp_path, batch_of(sample("old", 5)), attempt="1")
    folder = tmp_path / "token_exports/step_1"
    before = (folder / "rank_0.jsonl").read_bytes()
    exporter = TokenExporter(tmp_path, attempt="2")
    batch = batch_of(sample("new", 5))
    exporter.write(1, batch, terms_for(batch))
    assert not (folder / "STABLE").exists() and (folder / "rank_0.jsonl").read_bytes() == before
    exporter.close_step(1)
    exporter.close()
    assert [record.label for record in Export(tmp_path).step(1).records()] == ["new"]
    assert (folder / "rank_0.jsonl.1").read_bytes() == before


def test_a_dummy_takes_back_the_marker_too(tmp_path: Path) -> None:
    """A rank may have nothing else in a step; what it said of it in an earlier attempt must not stand."""
    step = pack([sample("a", 5)], ranks=2, seq_len=8)
    for rank, own in enumerate(step.ranks):
        export(tmp_path, *own, rank=rank, world=2)
    (dummy,) = step.ranks[1]
    assert dummy.is_dummy and len(Export(tmp_path).steps()) == 1
    with TokenExporter(tmp_path, rank=1, world=2) as exporter:
        exporter.write(1, dummy, terms_for(dummy))
        assert Export(tmp_path).steps() == []


def test_a_rank_of_an_attempt_before_does_not_complete_a_step(tmp_path: Path) -> None:
    batch = batch_of(sample("a", 5))
    for rank in range(2):
        export(tmp_path, batch, rank=rank, world=2, attempt="1")
    assert [step.number for step in Export(tmp_path).steps()] == [1]
    export(tmp_path, batch, rank=0, world=2, attempt="2")
    assert Export(tmp_path).steps() == []
    export(tmp_path, batch, rank=1, world=2, attempt="2")
    assert [step.number for step in Export(tmp_path).steps()] == [1]


def test_files_of_ranks_that_no_longer_exist_are_not_read(tmp_path: Path) -> None:
    for rank in range(3):
        export(tmp_path, batch_of(sample(f"old{rank}", 5)), rank=rank, world=3, attempt="1")
    export(tmp_path, batch_of(sample("new", 5)), rank=0, world=1, attempt="2")
    assert [record.label for record in Export(tmp_path).step(1).records()] == ["new"]


def test_a_run_step_that_spans_trainer_steps_survives_a_restart_between_them(tmp_path: Path) -> None:
    first, second = (batch_of(sample(name, 5, run="r")) for name in "ab")
    exporter = TokenExporter(tmp_path)
    exporter.write(4, first, terms_for(first), run_step=2)
    exporter.write(5, second, terms_for(second), run_step=2)
    exporter.close()  # as a crash leaves it, with one half-written record
    part = tmp_path / "r/token_exports/step_2/.rank_0.jsonl.part"
    part.write_bytes(part.read_bytes()[:-7])
    with TokenExporter(tmp_path) as exporter:
        exporter.write(5, second, terms_for(second), run_step=2)
        exporter.close_step(5, runs={"r": 2})
    records = list(Export(tmp_path).step(2, run="r").records())
    assert [(record.facts["step"], record.label) for record in records] == [(4, "a"), (5, "b")]
    assert [record.facts["export_step"] for record in records] == [2, 2]
    done = read_done(tmp_path / "r/token_exports/step_2", 0)
    assert done is not None and done.summary is not None and done.summary.records == 2


def test_runs_go_to_their_own_folders_and_every_rank_closes_all_of_them(tmp_path: Path) -> None:
    step = pack([sample("a", 5, run="x"), sample("b", 5, run="y")], ranks=2, seq_len=8)

    class Numbered:
        number = 3
        totals = step.totals

    for rank, own in enumerate(step.ranks):
        with TokenExporter(tmp_path, rank=rank, world=2) as exporter:
            for batch in own:
                exporter.write(Numbered(), batch, terms_for(batch))
            exporter.close_step(Numbered())
    export = Export(tmp_path)
    assert export.runs == ["x", "y"]
    for run, name in (("x", "a"), ("y", "b")):
        assert [record.label for record in export.step(3, run=run).records()] == [name]


def test_a_run_name_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    batch = batch_of(sample("a", 5, run="../up"))
    with TokenExporter(tmp_path / "in") as exporter, pytest.raises(ConfigError, match="cannot name a folder"):
        exporter.write(1, batch, terms_for(batch))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


@pytest.mark.parametrize(
    ("keep", "names"), [(EveryKth(2), "ace"), (First(2), "ab"), (Worst(2), "bd"), (Worst(9), "abcde")]
)
def test_sampling_keeps_what_it_says_and_counts_the_rest(tmp_path: Path, keep: Keep, names: str) -> None:
    worst = {"a": 0.1, "b": 5.0, "c": 0.2, "d": 0.3, "e": 0.3}
    with TokenExporter(tmp_path, keep=keep) as exporter:
        for name, value in worst.items():
            batch = batch_of(sample(name, 4))
            exporter.write(1, batch, terms_for(batch, mismatch_kl=np.array([99.0, 0, value, 0])))
        exporter.close_step(1)
    assert "".join(line["sample_id"] for line in lines_of(tmp_path)) == names
    done = read_done(tmp_path / "token_exports/step_1", 0)
    assert done is not None and (done.records, done.skipped) == (len(names), 5 - len(names))
    assert done.summary is not None and done.summary.records == 5  # the summary is of everything trained


def test_the_size_limit_stops_writing_and_says_how_many_were_left_out(tmp_path: Path) -> None:
    batch = batch_of(sample("a", 60))
    export(tmp_path, *[batch] * 20, max_bytes=10_000)
    done = read_done(tmp_path / "token_exports/step_1", 0)
    assert done is not None and done.records + done.skipped == 20 and done.skipped > 0
    assert 10_000 <= done.num_bytes < 14_000


def test_only_every_nth_step_is_exported(tmp_path: Path) -> None:
    batch = batch_of(sample("a", 5))
    with TokenExporter(tmp_path, every=3) as exporter:
        for step in range(1, 8):
            exporter.write(step, batch, terms_for(batch))
            exporter.close_step(step)
    assert [step.number for step in Export(tmp_path).steps()] == [3, 6]


def test_a_disabled_exporter_has_the_same_interface_and_does_nothing(tmp_path: Path) -> None:
    batch = batch_of(sample("a", 5))
    with NoExport() as exporter:
        exporter.write(1, batch, terms_for(batch), policy_version=1)
        exporter.close_step(1, metrics={})
        exporter.flush()
    public = {name for name in dir(TokenExporter) if name[0] != "_"}
    assert public <= set(dir(NoExport)) and list(tmp_path.iterdir()) == []


def test_what_fails_in_the_writer_is_raised_by_the_next_call(tmp_path: Path) -> None:
    batch = batch_of(sample("a", 5))
    exporter = TokenExporter(tmp_path)
    exporter.write(1, batch, terms_for(batch))
    exporter.flush()
    folder = tmp_path / "token_exports/step_1"
    (folder / "rank_0.jsonl").mkdir()  # nothing can be renamed onto a folder
    exporter.close_step(1)
    with pytest.raises(StorageError, match="token export"):
        exporter.flush()
    with pytest.raises(StorageError):
        exporter.write(2, batch, terms_for(batch))
    with pytest.raises(StorageError):
        exporter.close()
    assert not (folder / "STABLE").exists()


def test_writing_to_a_closed_step_or_exporter_is_an_error(tmp_path: Path) -> None:
    batch = batch_of(sample("a", 5))
    exporter = TokenExporter(tmp_path)
    exporter.close_step(1)
    with pytest.raises(InvalidInput, match="step 1 of run '' was closed"):
        exporter.write(1, batch, terms_for(batch))
    exporter.close()
    with pytest.raises(Closed):
        exporter.write(2, batch, terms_for(batch))


def test_later_changes_to_the_tensors_do_not_reach_the_export(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    batch = batch_of(sample("a", 5))
    logprobs = torch.full((1, 5), -0.5)
    with TokenExporter(tmp_path) as exporter:
        exporter.write(1, batch, Terms(loss=logprobs, trainer_logprobs=logprobs))
        logprobs.fill_(-9.0)
        batch["advantages"][:] = 9.0
        exporter.close_step(1)
    (line,) = lines_of(tmp_path)
    assert line["trainer_logprobs"] == [None] + [-0.5] * 4 and line["advantages"] == [1.0] * 5


def test_the_summary_of_markers_equals_the_summary_of_records(tmp_path: Path) -> None:
    from penstock.view.tally import Tally, tally

    make_export(tmp_path, steps=1, ranks=2, groups=5, size=2)
    step = Export(tmp_path).step(1)
    merged = Tally()
    for done in step.done().values():
        assert done.summary is not None
        merged.merge(done.summary)
    exact, read = merged.as_dict(), tally(step.records()).as_dict()
    for name in ("records", "tokens", "loss_tokens", "masked", "compared_tokens"):
        assert exact[name] == read[name]
    assert exact["mismatch_kl"] == pytest.approx(read["mismatch_kl"])
    assert exact["reward"] == pytest.approx(read["reward"])


def test_a_full_queue_makes_write_wait_and_loses_nothing(tmp_path: Path) -> None:
    batch = batch_of(*[sample(str(i), 30) for i in range(20)])
    rng = np.random.default_rng(0)
    with TokenExporter(tmp_path, queue_batches=1) as exporter:
        for _ in range(50):
            exporter.write(1, batch, terms_of(rng, batch))
        exporter.close_step(1)
    assert len(lines_of(tmp_path)) == 1000


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
