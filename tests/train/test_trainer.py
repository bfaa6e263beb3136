"""The reference trainer: resume is exact, fake data needs no plane, checkpoints are whole or absent."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.capture import Trajectory, Turn
from penstock.client import Step
from penstock.client import open as open_plane
from penstock.convert import Group, make_group
from penstock.demo.tasks import make_task, model_of, standardized
from penstock.errors import CorruptFile, InvalidInput
from penstock.packing import MicroBatch, Packing
from penstock.plane import Target
from penstock.train import checkpoint
from penstock.train.checkpoint import Weights
from penstock.train.model import check_vocabulary
from penstock.train.run_config import FakeConfig, OptimizerConfig, TaskConfig, TrainConfig
from penstock.train.terms import Terms
from penstock.train.trainer import Trainer, train

pytestmark = pytest.mark.deep


class Recorder:
    """Keeps what every step was made of."""

    def __init__(self) -> None:
        self.steps: dict[int, list[tuple[str, tuple[str, ...]]]] = {}
        self.flushed: list[int] = []
        """The last step before each checkpoint."""

    def write(self, step: Step, batch: MicroBatch, terms: Terms, *, policy_version: int) -> None:
        assert policy_version == step.number - 1 and terms.loss.shape[-1] == batch.num_tokens
        self.steps.setdefault(step.number, []).append((batch.digest, batch.segments.ids))

    def close_step(self, step: Step) -> None:
        assert step.number in self.steps

    def flush(self) -> None:
        self.flushed.append(max(self.steps, default=0))

    def close(self) -> None:
        return None


def recorded_groups(count: int) -> list[Group]:
    """Groups as workers would have generated them; the same every time."""
    task, rng = make_task(TaskConfig(), Path()), random.Random(5)
    groups = []
    for i in range(count):
        prompt = task.prompt(rng)
        rollouts = []
        for _ in range(4):
            tokens = [rng.randrange(2, 12) for _ in range(rng.randint(1, 5))]
            turns = [task.turn(prompt), Turn(tokens, logprobs=[-rng.random() - 0.5 for _ in tokens])]
            rollouts.append(Trajectory(turns=turns, reward=task.reward(prompt, tokens), env=task.name))
        groups.append(make_group(rollouts, id=f"g{i}", policy_version=0, advantage=standardized))
    return groups


def config_of(folder: Path, **changes: object) -> TrainConfig:
    config = TrainConfig(
        folder=str(folder),
        packing=Packing(ranks=1, seq_len=16, micro_batch_max_tokens=32, long_rows=True),
        target=Target(groups=2),
        checkpoint_every=3,
        model=model_of("reverse"),
        optimizer=OptimizerConfig(lr=1e-2),
    )
    return replace(config, **changes)  # type: ignore[arg-type]


def run(folder: Path, steps: int, groups: list[Group]) -> tuple[Recorder, dict[str, torch.Tensor]]:
    """Train to `steps` on the groups; continues where the folder's last run stopped."""
    recorder = Recorder()
    url = f"ipc://{folder}/s"
    with open_plane(
        folder / "plane",
        ranks=1,
        seq_len=16,
        micro_batch_max_tokens=32,
        groups_per_step=2,
        run="demo",
        long_rows=True,
        listen=[url],
    ) as plane:
        for group in groups:
            plane.put(group)
        train(config_of(folder, max_steps=steps), rank=0, url=url, observer=recorder)
        assert plane.ledger.balanced
    latest = Weights(folder / "weights")
    state = latest.load(latest.latest())
    assert state is not None and latest.latest() == steps
    return recorder, state


def test_a_run_that_was_stopped_continues_as_if_it_had_not_been(tmp_path: Path) -> None:
    groups = recorded_groups(24)
    whole, weights = run(tmp_path / "a", 12, groups)
    first, _ = run(tmp_path / "b", 6, groups)
    second, resumed = run(tmp_path / "b", 12, groups)
    assert sorted(second.steps) == list(range(7, 13))
    assert {**first.steps, **second.steps} == whole.steps
    assert set(whole.flushed) == {3, 6, 9, 12}  # before each checkpoint
    assert weights.keys() == resumed.keys()
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)


def test_steps_after_the_last_checkpoint_are_served_and_trained_again_identically(tmp_path: Path) -> None:
    groups = recorded_groups(16)
    whole, weights = run(tmp_path / "a", 8, groups)
    run(tmp_path / "b", 5, groups)
    folder = tmp_path / "b" / "checkpoints"
    assert checkpoint.steps(folder)[-1] == 5
    for path in folder.glob("step_00000005/*"):  # the trainer died before this one was written
        path.unlink()
    (folder / "step_00000005").rmdir()
    again, resumed = run(tmp_path / "b", 8, groups)
    assert sorted(again.steps) == [4, 5, 6, 7, 8]
    assert again.steps == {step: whole.steps[step] for step in again.steps}
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)


def test_fake_data_trains_without_a_plane(tmp_path: Path) -> None:
    config = config_of(
        tmp_path, packing=Packing(ranks=1, seq_len=8), fake=FakeConfig(batch_size=2, micro_batches=3), max_steps=3
    )
    recorder = Recorder()
    train(config, rank=0, url="", observer=recorder)
    assert [len(batches) for batches in recorder.steps.values()] == [3, 3, 3]
    assert all(len(ids) == 2 for batches in recorder.steps.values() for _, ids in batches)


def test_a_token_without_an_embedding_is_named_before_the_forward_pass() -> None:
    samples = [ps.Sample(id=name, token_ids=ids, loss_mask=[0, 1]) for name, ids in (("a", [1, 2]), ("b", [3, 12]))]
    batch = ps.pack(samples, ranks=1, seq_len=8).ranks[0][0]
    check_vocabulary(batch, 13)
    with pytest.raises(InvalidInput, match=r"sample 'b'.token_ids: id 12 for a model of 12 tokens"):
        check_vocabulary(batch, 12)


def test_a_kept_id_beyond_the_vocabulary_names_its_sample() -> None:
    sets: list[list[list[int]]] = [[[], [2, 5]], [[], [2, 3, 40]]]
    samples = [
        ps.Sample(id=name, token_ids=[1, 2], loss_mask=[0, 1], sampling_mask=own)
        for name, own in zip("ab", sets, strict=True)
    ]
    (batch,) = ps.pack(samples, ranks=1, seq_len=8).ranks[0]
    check_vocabulary(batch, 41)
    with pytest.raises(InvalidInput, match=r"sample 'b'.sampling_mask: id 40 for a model of 40 tokens"):
        check_vocabulary(batch, 40)


def test_an_id_of_a_teacher_beyond_the_vocabulary_names_its_sample() -> None:
    known: dict[str, Any] = {"teacher_topk_logprobs": -np.ones((2, 3))}
    samples = [
        ps.Sample(id=name, token_ids=[1, 2], loss_mask=[0, 1], teacher_topk_ids=[[0, 0, 0], ids], **known)
        for name, ids in (("a", [1, 2, 3]), ("b", [4, 50, 5]))
    ]
    (batch,) = ps.pack(samples, ranks=1, seq_len=8).ranks[0]
    check_vocabulary(batch, 51)
    with pytest.raises(InvalidInput, match=r"sample 'b'.teacher_topk_ids: id 50 for a model of 50 tokens"):
        check_vocabulary(batch, 50)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(config_of(tmp_path / "a"), 0)
    checkpoint.save(tmp_path / "c", 3, trainer.model, trainer.optimizer, writes=True)
    other = replace(model_of("reverse"), config={**model_of("reverse").config, "hidden_size": 32})
    wrong = Trainer(config_of(tmp_path / "b", model=other), 0)
    with pytest.raises(CorruptFile, match="another model"):
        checkpoint.restore(tmp_path / "c", 3, wrong.model, wrong.optimizer)
    trainer.close()
    wrong.close()


def test_published_weights_appear_whole_and_old_ones_go(tmp_path: Path) -> None:
    weights = Weights(tmp_path, keep=2)
    assert weights.latest() == -1
    for version in range(5):
        weights.publish(version, {"w": torch.full((3,), float(version))})
    (tmp_path / "v00000009.123.part").write_bytes(b"half")
    assert weights.versions() == [3, 4]
    state = weights.load(4)
    assert state is not None and state["w"].tolist() == [4.0, 4.0, 4.0]
    assert weights.load(0) is None
