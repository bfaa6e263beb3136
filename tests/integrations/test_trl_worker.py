"""TRL's AsyncGRPOTrainer on a plane to which others put groups: every sample is trained once, over a resume too."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.packing import TreeRow

import penstock as ps
from penstock.errors import ConfigError, InvalidInput, StepAborted, WaitTimeout
from penstock.integrations.trainers.transformers_trainer import last_checkpoint
from penstock.integrations.trainers.trl_worker import Durable, Handed, Progress, check_carried
from penstock.testing.trl_cpu import NoTransfer, path_attention, trl_on_cpu
from tests.support.groups import named_group

pytestmark = pytest.mark.process

PER_STEP = 6
"""Samples of an optimizer step; a step of the plane has eight."""


class Recorder(Durable):
    """Writes down what TRL was given."""

    def __init__(self, plane: ps.Plane) -> None:
        super().__init__(None, plane=plane)
        self.given: list[tuple[int, int]] = []
        self.groups: list[int] = []

    def taken(self, handed: Handed) -> Any:
        sample = super().taken(handed)
        if sample is not None:
            self.given.append((handed.step, handed.index))
            self.groups.append(sample.group_id)
        return sample


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trl") / "model"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=32, eos_token_id=0, **sizes, **heads)).save_pretrained(folder)
    words = {"<eos>": 0, **{f"w{i}": i for i in range(1, 32)}}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "<eos>")), eos_token="<eos>").save_pretrained(
        folder
    )
    return folder


def trainer_of(
    model: Path, out: Path, worker: Durable, *, prompts: int = 1, callbacks: Any = (), **changes: Any
) -> Any:
    settings: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": PER_STEP,
        "token_budget": 0,
        "max_staleness": 99,
    }
    settings |= {"learning_rate": 1e-2, "save_steps": 1, "heartbeat_stale_after_s": 120, "bf16": False, "use_cpu": True}
    settings |= {"report_to": "none", "disable_tqdm": True}
    with trl_on_cpu():
        return AsyncGRPOTrainer(
            str(model),
            args=AsyncGRPOConfig(str(out), **{**settings, **changes}),
            train_dataset=Dataset.from_dict({"prompt": ["w1"] * prompts}),
            rollout_worker=worker,
            weight_transfer=NoTransfer(),
            callbacks=list(callbacks),
        )


def opened(folder: Path, groups: int = 12) -> ps.Plane:
    plane = ps.open(folder, ranks=1, seq_len=64, groups_per_step=2)
    for i in range(groups):
        samples = named_group(f"g{i}", samples=4, tokens=6 + i % 3)
        plane.put([s.replace(token_ids=s.token_ids % 32) for s in samples])
    return plane


def trained_weights(trainer: Any, folder: Path) -> dict[str, torch.Tensor]:
    trainer.save_model(str(folder))
    state: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return state


def test_a_resumed_run_trains_what_an_uninterrupted_one_trains(model: Path, tmp_path: Path) -> None:
    """Optimizer steps of six samples, steps of the plane of eight: the checkpoint lies within a step."""
    with opened(tmp_path / "a") as plane:
        worker = Recorder(plane)
        trainer = trainer_of(model, tmp_path / "once", worker, max_steps=6, weight_sync_steps=2)
        trainer.train()
        expected = trained_weights(trainer, tmp_path / "w1")
        everything, groups = worker.given, worker.groups
        assert everything[:9] == [(1, i) for i in range(8)] + [(2, 0)]
        assert plane.ledger.committed == 4 * 8 and plane.policy_version == 4  # 36 samples: four steps, and four
        assert worker.progress == Progress(step=4, samples=4, groups=9, version=4)
    with opened(tmp_path / "b") as plane:
        for steps, version in ((3, 2), (6, 3)):
            worker = Recorder(plane)
            trainer = trainer_of(model, tmp_path / "twice", worker, max_steps=steps, weight_sync_steps=2)
            begin = (last_checkpoint(tmp_path / "twice") is not None) * 3 * PER_STEP
            trainer.train(resume_from_checkpoint=last_checkpoint(tmp_path / "twice"))
            count = len(worker.given)
            assert worker.given == everything[begin : begin + count] and count >= 3 * PER_STEP
            assert worker.groups == groups[begin : begin + count]
            assert plane.policy_version >= version
        assert plane.ledger.committed == 4 * 8 and plane.ledger.balanced
    resumed = trained_weights(trainer, tmp_path / "w2")
    for name, values in expected.items():
        torch.testing.assert_close(resumed[name], values, rtol=0, atol=1e-6, msg=name)


def test_with_a_token_budget_a_resume_is_exact_too(model: Path, tmp_path: Path) -> None:
    """Optimizer steps of as many samples as fit. TRL drops the samples of one group, which are beyond the budget."""
    found = []
    for name, lives in (("once", (5,)), ("twice", (3, 5))):
        given: list[tuple[int, int]] = []
        saved = 0  # samples up to the last checkpoint
        with opened(tmp_path / name, groups=3) as plane:
            plane.put([s.replace(token_ids=s.token_ids % 32) for s in named_group("long", samples=2, tokens=50)])
            for i in range(10):
                samples = named_group(f"h{i}", samples=4, tokens=6 + i % 3)
                plane.put([s.replace(token_ids=s.token_ids % 32) for s in samples])
            for steps in lives:
                worker, out = Recorder(plane), tmp_path / f"out-{name}"
                trainer = trainer_of(model, out, worker, token_budget=40, max_steps=steps)
                trainer.train(resume_from_checkpoint=last_checkpoint(out))
                given = given[:saved] + worker.given
                rows = [row for row in trainer.state.log_history if "loss" in row]
                trained = round(sum(row["batch/samples_per_step"] for row in rows))
                dropped = sum(row.get("batch/dropped_oversize_total") or 0 for row in rows)
                saved = trained + round(dropped)
                position = sum(1 for step, _ in given[:saved] if step <= worker.progress.step) + worker.progress.samples
                assert position == saved and dropped == 2
        found.append((given[:saved], trained_weights(trainer, tmp_path / f"w-{name}")))
    (once, expected), (twice, resumed) = found
    assert once == twice
    for name, values in expected.items():
        torch.testing.assert_close(resumed[name], values, rtol=0, atol=1e-6, msg=name)


class StopAt(TrainerCallback):  # type: ignore[misc]
    """Ends training after a step, as an interrupted run would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def test_epochs_go_on_after_a_resume(model: Path, tmp_path: Path) -> None:
    """TRL ends an epoch when every prompt's group was collated, one micro-batch ahead: 24 samples of 8 groups of 4."""
    epoch = {"max_steps": -1, "num_train_epochs": 1, "num_generations": 4, "per_device_train_batch_size": 8}
    with opened(tmp_path / "a") as plane:
        trainer = trainer_of(model, tmp_path / "once", Durable(None, plane=plane), prompts=8, **epoch)
        trainer.train()
        assert (trainer.state.global_step, plane.ledger.committed) == (3, 24)
    with opened(tmp_path / "b") as plane:
        for stop in (2, 99):
            trainer = trainer_of(
                model, tmp_path / "twice", Durable(None, plane=plane), prompts=8, callbacks=[StopAt(stop)], **epoch
            )
            trainer.train(resume_from_checkpoint=last_checkpoint(tmp_path / "twice"))
        assert (trainer.state.global_step, plane.ledger.committed) == (3, 24)


# ------------------------------------------------------------------ what goes wrong is said


def test_a_worker_without_a_trainer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="started without a trainer"):
        Durable(None, plane=tmp_path / "a").start()


def test_a_checkpoint_without_a_position_is_refused() -> None:
    position = Durable(None, plane="ipc://nobody").position
    with pytest.raises(ConfigError, match="checkpoint of step 7: has no position"):
        position.on_train_begin(SimpleNamespace(), SimpleNamespace(stateful_callbacks={}, global_step=7))


def test_what_stops_the_worker_stops_training(model: Path, tmp_path: Path) -> None:
    with opened(tmp_path / "a", groups=2) as plane:
        trainer = trainer_of(model, tmp_path / "out", Durable(None, plane=plane), heartbeat_stale_after_s=1)
        with pytest.raises(WaitTimeout, match="waited for: generation: 0 of 2 groups"):
            trainer.train()
        plane.put([s.replace(advantages=np.arange(s.num_tokens)) for s in named_group("bad")])
        plane.put(named_group("also"))
        trainer = trainer_of(model, tmp_path / "out2", Durable(None, plane=plane))
        with pytest.raises((InvalidInput, StepAborted), match="within the sample"):
            trainer.train()


def sample(**changes: Any) -> ps.Sample:
    (first, *_) = named_group("g", tokens=4)
    return first.replace(
        **{"advantages": np.full(4, 0.5), "temperatures": np.ones(4), "rewards": np.ones(4), **changes}
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"logprobs": None}, "no logprobs"),
        ({"mode": "sft"}, "mode 'sft'"),
        ({"advantages": [0.0, 0.0, 1.0, 2.0]}, "from 1 to 2 within the sample"),
        ({"temperatures": np.full(4, 0.7)}, "sampled at 0.7, AsyncGRPOConfig has temperature=1"),
        ({"ce_weights": [0.0, 0.0, 1.0, 1.0]}, "ce_weights: AsyncGRPOTrainer cannot carry it"),
        ({"routed_experts": np.zeros((4, 1, 1), np.uint8)}, "routed_experts"),
        ({"sampling_mask": [[], [], [1, 22519], [33908]]}, "sampling_mask"),
    ],
)
def test_what_trl_would_train_as_something_else_is_refused(changes: dict[str, Any], said: str) -> None:
    check_carried(sample(), temperature=1.0)
    check_carried(sample(advantages=[9.0, 9.0, 1.0, 1.0], rl_weights=np.ones(4)), temperature=1.0)
    with pytest.raises(InvalidInput, match=said):
        check_carried(sample(**changes), temperature=1.0)
    (name,) = changes
    if name not in ("logprobs", "mode", "advantages"):
        check_carried(sample(**changes), temperature=1.0, drop=[name])


def test_a_sample_that_is_too_old_is_passed_over_and_counted() -> None:
    worker = Durable(None, plane="ipc://nobody")
    worker._args, worker.progress = (
        SimpleNamespace(max_staleness=1, temperature=1.0, token_budget=0),
        Progress(step=4, samples=1),
    )
    worker.update_model_version(5)
    for version, fresh in ((5, True), (4, True), (3, False), (None, True)):
        rollout = worker._rollout(sample(policy_version=version), 0)
        found = worker.taken(Handed(step=5, index=1, is_last=False, ends_group=False, sample=rollout))
        assert (found is rollout) == fresh
    assert worker.metrics_queue.get_nowait() == {"sample/dropped_stale_total": 1.0}
    worker._pass_by(3)
    assert worker.progress == Progress(step=4, samples=2, version=5) and not worker._handed


def test_attention_of_the_stand_in_is_that_of_the_samples_alone() -> None:
    row, ids = TreeRow(), [[1, 2, 3, 4], [1, 2, 3, 5, 6], [7, 8]]
    for tokens in ids:
        array = np.array(tokens)
        row.add(
            {
                "input_ids": array,
                "completion_mask": array * 0,
                "old_log_probs": array * 0.0,
                "advantage": 0.0,
                "group_id": 0,
            }
        )
    packed = row.pack()
    torch.manual_seed(0)
    table = torch.randn(3, 2, 9, 8, dtype=torch.float64)
    at = packed["input_ids"]
    tree = {name: values for name, values in packed.items() if name.startswith("tree_")}
    query, key, value = (part[:, at][None] for part in table)
    out, _ = path_attention(None, query, key, value, None, **tree)
    stands = list(zip(packed["position_ids"].tolist(), at.tolist(), strict=True))
    for tokens in ids:
        q, k, v = (part[:, tokens][None] for part in table)
        alone = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        torch.testing.assert_close(out[0, [stands.index(place) for place in enumerate(tokens)]], alone[0])
