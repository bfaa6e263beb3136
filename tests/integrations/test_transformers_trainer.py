"""`PlaneTrainer` with the real transformers: the reference trainer's losses, also after `kill -9` and resume."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed
from transformers import AttentionInterface, AutoModelForCausalLM, TrainerCallback, TrainingArguments
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import penstock as ps
from penstock.client import Step
from penstock.demo.tasks import REVERSE, model_of
from penstock.errors import ConfigError
from penstock.integrations.trainers.transformers_trainer import PlaneTrainer, last_checkpoint, step_of
from penstock.packing import PackedStep, Packing
from penstock.plane import Target
from penstock.testing.trainer import check
from penstock.train.checkpoint import Weights
from penstock.train.loss import Grpo
from penstock.train.model import build_model, check_packing
from penstock.train.run_config import LossConfig, OptimizerConfig, TrainConfig
from penstock.train.trainer import loss_of, train
from penstock.view.run_files import Metrics
from tests.train.ranks import run_ranks
from tests.train.test_trainer import recorded_groups
from tests.train.test_tree_runs import long_groups

pytestmark = pytest.mark.process

Note = Callable[[Any], Any]
STEPS, SAVED, DEATH = 8, 2, 5
"""Steps of a run; a checkpoint every so many; the step after which the first life ends."""
LOSS = LossConfig()


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    """The optimizer of the reference trainer."""
    settings = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "save_steps": SAVED,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.95,
        "optim": "adamw_torch",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(**{**settings, **changes})


def trainer_of(folder: Path, plane: str | ps.Plane, **changes: Any) -> PlaneTrainer:
    if "RANK" in os.environ:
        os.environ["LOCAL_RANK"] = os.environ["RANK"]  # as torchrun would
    more = {
        name: changes.pop(name)
        for name in ("loss", "publish", "observer", "callbacks", "first_step", "train_dataset", "compute_loss_func")
        if name in changes
    }
    return PlaneTrainer(
        changes.pop("model", None) or build_model(model_of("reverse")),
        arguments(folder, **changes),
        plane=plane,
        **{"loss": loss_of(LOSS), **more},
    )


class Killed(TrainerCallback):  # type: ignore[misc]
    """`kill -9` of this process, once a step is trained."""

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if state.global_step == DEATH:
            os.kill(os.getpid(), signal.SIGKILL)


def plane_life(rank: int, note: Note, folder: str, url: str, killed: bool) -> None:
    out = Path(folder)
    trainer = trainer_of(out, url, ddp_backend="gloo", callbacks=[Killed()] if killed else [])
    checkpoint = last_checkpoint(out)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(str(out / "final"))
    note([checkpoint, [(row["step"], row["loss"], row["train/reward"]) for row in trainer.state.log_history[:-1]]])
    distributed.destroy_process_group()


def reference_life(rank: int, note: Note, config: TrainConfig, url: str) -> None:
    train(config, rank=rank, url=url)
    note("done")


@pytest.mark.timeout(900)
def test_two_ranks_that_are_killed_and_resumed_train_as_the_reference_trainer_does(tmp_path: Path) -> None:
    config = TrainConfig(
        folder=str(tmp_path / "reference"),
        packing=Packing(ranks=2, seq_len=16, micro_batch_max_tokens=24, long_rows=True),
        target=Target(groups=2),
        max_steps=STEPS,
        model=model_of("reverse"),
        optimizer=OptimizerConfig(lr=1e-2),
        loss=LOSS,
    )
    settings: dict[str, Any] = {"ranks": 2, "seq_len": 16, "micro_batch_max_tokens": 24, "long_rows": True}
    settings |= {"groups_per_step": 2, "run": "demo"}
    urls = {name: f"ipc://{tmp_path}/{name}.s" for name in ("reference", "plane")}
    out = tmp_path / "out"
    with (
        ps.open(tmp_path / "a", listen=[urls["reference"]], **settings) as one,
        ps.open(tmp_path / "b", listen=[urls["plane"]], **settings) as two,
    ):
        for group in recorded_groups(2 * STEPS):
            one.put(group)
            two.put(group)
        assert run_ranks(reference_life, tmp_path, config, urls["reference"]) == ["done", "done"]
        for path in tmp_path.glob("rank-*.json"):
            path.unlink()
        assert run_ranks(plane_life, tmp_path, str(out), urls["plane"], True) == [None, None]
        assert last_checkpoint(out) == str(out / "checkpoint-4") and step_of(out / "checkpoint-4") == 4
        found = run_ranks(plane_life, tmp_path, str(out), urls["plane"], False)
        assert two.ledger.balanced and two.ledger.committed == one.ledger.committed == STEPS * 2 * 4
    (checkpoint, rows), (_, other) = found
    assert checkpoint == str(out / "checkpoint-4") and rows == other
    rows_of_reference = Metrics(tmp_path / "reference" / "metrics.jsonl").read()
    assert [row[0] for row in rows] == list(range(1, STEPS + 1))
    assert [row[1] for row in rows] == pytest.approx([row["train/loss"] for row in rows_of_reference], abs=1e-6)
    assert [row[2] for row in rows] == pytest.approx([row["train/reward"] for row in rows_of_reference], abs=1e-6)
    expected, trained = (
        Weights(tmp_path / "reference" / "weights").load(STEPS),
        load_file(out / "final" / "model.safetensors"),
    )
    assert expected is not None and trained.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(trained[name], values, rtol=0, atol=1e-5, msg=name)


def kit_checked(rank: int, note: Note, folder: str) -> None:
    """A step of one rank is trained alone by each, one of two ranks together."""
    trainer = trainer_of(Path(folder), "ipc://nobody", ddp_backend="gloo", loss=Grpo())
    wrapped = trainer.accelerator.prepare(trainer.model)

    def step_fn(step: PackedStep) -> tuple[float, dict[str, torch.Tensor]]:
        trainer.world = len(step.ranks)
        model, own = (trainer.model, 0) if trainer.world == 1 else (wrapped, rank)
        part = step.ranks[own]
        model.zero_grad()
        loss = trainer.training_step(model, Step(1, "", part.rank_plan, list(part)))
        distributed.all_reduce(loss)
        gradients = {
            n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in trainer.model.named_parameters()
        }
        return float(loss) / 2, gradients

    report = check(step_fn, vocabulary=len(REVERSE), model=trainer.model, loss=Grpo(), ranks=[2])
    note([str(report), report.ok])
    distributed.destroy_process_group()


@pytest.mark.timeout(600)
def test_it_passes_the_conformance_kit_on_two_ranks(tmp_path: Path) -> None:
    for text, ok in run_ranks(kit_checked, tmp_path, str(tmp_path)):
        assert ok, text


# ------------------------------------------------------------------ in one process


@pytest.fixture
def plane(tmp_path: Path) -> Any:
    with ps.open(tmp_path / "plane", ranks=1, seq_len=16, groups_per_step=2, trees=True) as opened:
        for group in recorded_groups(8):
            opened.put(group)
        yield opened


def test_weights_are_published_under_the_versions_that_the_plane_announces(plane: ps.Plane, tmp_path: Path) -> None:
    published: list[tuple[int, int]] = []

    def publish(model: Any, version: int) -> None:
        assert model.get_input_embeddings() is not None
        published.append((version, plane.policy_version))

    trainer_of(tmp_path / "out", plane, publish=publish, max_steps=3).train()
    assert published == [(0, 0), (1, 0), (2, 1), (3, 2)]
    assert plane.policy_version == 3
    trainer = trainer_of(tmp_path / "out", plane, publish=publish, max_steps=4)
    trainer.train(resume_from_checkpoint=True)
    assert published[-2:] == [(3, 3), (4, 3)] and trainer.state.global_step == 4


def test_without_a_checkpoint_training_begins_where_it_is_told_to(plane: ps.Plane, tmp_path: Path) -> None:
    digests: list[list[str]] = []

    class Look:
        def write(self, step: Step, batch: Any, terms: Any, *, policy_version: int) -> None:
            assert policy_version == step.number - 1

        def close_step(self, step: Step) -> None:
            digests[-1].append(step.digest)

        def flush(self) -> None: ...
        def close(self) -> None: ...

    for first, steps in ((1, 2), (1, 2), (None, 1), (2, 2)):
        digests.append([])
        trainer_of(
            tmp_path / "out", plane, first_step=first, max_steps=steps, observer=Look(), save_strategy="no"
        ).train()
    again, same, next_, second = digests
    assert again == same and next_[0] not in again and second == [again[1], next_[0]]


def test_an_export_is_on_disk_before_the_checkpoint_that_ends_it(plane: ps.Plane, tmp_path: Path) -> None:
    flushed: list[list[str]] = []

    class Exporter(ps.TokenExporter):
        def flush(self, timeout: float | None = None) -> None:
            super().flush(timeout)
            steps = sorted(
                path.name for path in (tmp_path / "token_exports").glob("step_*") if (path / "STABLE").exists()
            )
            flushed.append([*steps, *(path.name for path in (tmp_path / "out").glob("checkpoint-*"))])

    with Exporter(tmp_path) as exporter:
        trainer_of(tmp_path / "out", plane, max_steps=1, save_steps=1, observer=exporter).train()
    assert flushed[0] == ["step_1"]


def test_an_error_in_one_rank_ends_the_session_and_the_error_stays(plane: ps.Plane, tmp_path: Path) -> None:
    def loss(*_: Any) -> Any:
        raise ZeroDivisionError("here")

    with pytest.raises(ZeroDivisionError, match="here"):
        trainer_of(tmp_path / "out", plane, loss=loss).train()
    assert plane.ledger.committed == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps: 2"),
        ({"max_steps": -1}, "a plane has no epochs"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor: 0.1; it would have no effect: pass a loss="),
        ({"per_device_train_batch_size": 4}, "per_device_train_batch_size: 4; it would have no effect: the plane says"),
        ({"train_dataset": [{"input_ids": [1]}]}, "train_dataset: list; it would have no effect: steps come from the"),
        ({"compute_loss_func": print}, "compute_loss_func: builtin_function_or_method; it would have no effect: pass"),
    ],
)
def test_settings_that_would_train_something_else_are_refused(
    plane: ps.Plane, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        trainer_of(tmp_path, plane, **changes)


def test_a_checkpoint_that_was_not_written_to_its_end_is_passed_over(plane: ps.Plane, tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path / "out") is None
    trainer_of(tmp_path / "out", plane, max_steps=2).train()
    (tmp_path / "out" / "checkpoint-10").mkdir()
    assert last_checkpoint(tmp_path / "out") == str(tmp_path / "out" / "checkpoint-2")
    state = tmp_path / "out" / "checkpoint-2" / "trainer_state.json"
    state.write_text(state.read_text().replace("CommitSteps", "Other"))
    with pytest.raises(ConfigError, match="records no step of a plane"):
        trainer_of(tmp_path / "out", plane).train(resume_from_checkpoint=last_checkpoint(tmp_path / "out"))


# ------------------------------------------------------------------ settings have the effect that they have in Trainer


def stock_model(**changes: Any) -> Any:
    """The model of the other tests with transformers' own attention."""
    torch.manual_seed(0)
    config = build_model(model_of("reverse")).config
    for name, value in ({"attention_dropout": 0.0} | changes).items():
        setattr(config, name, value)
    return AutoModelForCausalLM.from_config(config, attn_implementation=changes.get("attention", "sdpa"))


def logged(trainer: PlaneTrainer) -> list[dict[str, Any]]:
    return [row for row in trainer.state.log_history if "loss" in row]


def test_the_models_attention_is_kept_where_it_keeps_samples_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    losses = []
    for attention in ("sdpa", "penstock_packed"):
        with ps.open("memory:", ranks=1, seq_len=16, groups_per_step=2) as plain:
            for group in recorded_groups(2):
                plain.put(group)
            trainer = trainer_of(tmp_path / attention, plain, model=stock_model(attention=attention), max_steps=1)
            assert trainer.model.config._attn_implementation == attention
            assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
            trainer.train()
            losses.append(logged(trainer)[0]["grad_norm"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def mixing(module: Any, query: Any, key: Any, value: Any, _mask: Any, **settings: Any) -> Any:
    """An attention that ignores where samples end."""
    return sdpa_attention_forward(module, query, key, value, None, **{**settings, "is_causal": True})


def test_attention_that_mixes_samples_is_replaced_with_a_warning(
    plane: ps.Plane, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    AttentionInterface.register("mixing", mixing)
    trainer = trainer_of(tmp_path / "out", plane, model=stock_model(attention="mixing"), max_steps=1)
    assert trainer.model.config._attn_implementation == "penstock_packed"
    (record,) = [record for record in caplog.records if record.name == "penstock.trainer"]
    said = "attention 'mixing' is replaced by 'penstock_packed', which keeps the samples of a row apart"
    assert said in record.message and "differ by" in record.message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixing_is_told_from_rounding_in_every_precision(dtype: torch.dtype) -> None:
    AttentionInterface.register("mixing", mixing)
    check_packing(stock_model().to(dtype), vocabulary=len(REVERSE))
    with pytest.raises(ConfigError, match="its attention mixes samples"):
        check_packing(stock_model(attention="mixing").to(dtype), vocabulary=len(REVERSE))


def test_trees_need_our_attention_and_it_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {"seq_len": 64, "micro_batch_max_tokens": 256, "long_rows": True, "trees": True}
    with ps.open("memory:", ranks=1, groups_per_step=2, **settings) as forests:
        for group in long_groups(4):
            forests.put(group)
        trainer_of(tmp_path / "out", forests, model=stock_model(), max_steps=2, save_strategy="no").train()
    records = [record.message for record in caplog.records if record.name == "penstock.trainer"]
    assert len(records) == 1 and "computes rows of samples that share tokens as trees" in records[0]


@pytest.mark.parametrize("attention", ["sdpa", "penstock_packed"])
def test_attention_dropout_has_an_effect(tmp_path: Path, attention: str) -> None:
    losses = []
    for dropout in (0.0, 0.5):
        with ps.open("memory:", ranks=1, seq_len=16, groups_per_step=2) as plain:
            for group in recorded_groups(2):
                plain.put(group)
            model = stock_model(attention=attention, attention_dropout=dropout)
            trainer = trainer_of(tmp_path / str(dropout), plain, model=model, max_steps=1, save_strategy="no")
            trainer.train()
            losses.append(logged(trainer)[0]["train/entropy"])
    assert losses[0] != losses[1]


def test_metrics_are_averaged_over_logging_steps_and_counts_are_those_of_the_plane(
    plane: ps.Plane, tmp_path: Path
) -> None:
    every = {"save_strategy": "no", "include_num_input_tokens_seen": "all", "max_steps": 4}
    single = trainer_of(tmp_path / "a", plane, learning_rate=0.0, logging_steps=1, **every)
    single.train()
    double = trainer_of(tmp_path / "b", plane, learning_rate=0.0, logging_steps=2, **every)
    found = double.train()
    pairs = list(zip(logged(single)[::2], logged(single)[1::2], strict=True))
    for row, (a, b) in zip(logged(double), pairs, strict=True):
        for name in ("loss", "train/loss", "train/reward", "train/entropy", "train/staleness"):
            assert row[name] == pytest.approx((a[name] + b[name]) / 2, abs=1e-6), name
        assert row["train/max_staleness"] == max(a["train/max_staleness"], b["train/max_staleness"])
    samples = plane.ledger.committed
    assert found.metrics["train_samples_per_second"] == pytest.approx(
        samples / found.metrics["train_runtime"], abs=1e-2
    )
    seen = [row["num_input_tokens_seen"] for row in logged(single)]
    assert seen == sorted(set(seen)) and seen[-1] > sum(group.loss_tokens for group in recorded_groups(8))


def test_epochs_go_on_after_a_resume_and_the_state_is_json(plane: ps.Plane, tmp_path: Path) -> None:
    out = tmp_path / "out"
    trainer_of(out, plane, max_steps=4, callbacks=[StopAt(2)]).train()
    trainer = trainer_of(out, plane, max_steps=4)
    trainer.train(resume_from_checkpoint=last_checkpoint(out))
    assert [row["epoch"] for row in logged(trainer)] == [0.25, 0.5, 0.75, 1.0]
    state = (out / "checkpoint-4" / "trainer_state.json").read_text()
    assert json.loads(state, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))["global_step"] == 4


class StopAt(TrainerCallback):  # type: ignore[misc]
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.step
