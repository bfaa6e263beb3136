"""What only several ranks can show: they go on together or not at all, and sharded weights train like whole ones."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from penstock.capture import Trajectory, Turn
from penstock.client import Plane, connect
from penstock.client import open as open_plane
from penstock.convert import Group, make_group
from penstock.demo.tasks import ColorTask, model_of
from penstock.errors import MissingAsset, StepAborted
from penstock.packing import Packing
from penstock.plane import Target
from penstock.train import agree, checkpoint
from penstock.train.checkpoint import Weights
from penstock.train.run_config import ImagesConfig, OptimizerConfig, TrainConfig
from penstock.train.trainer import Trainer, train
from penstock.view.run_files import Metrics
from tests.train.ranks import CONTEXT, meet_at, meeting_port, run_ranks
from tests.train.test_trainer import recorded_groups

pytestmark = pytest.mark.process

Note = Callable[[Any], Any]


def test_one_process_alone_keeps_its_own_error() -> None:
    with pytest.raises(MissingAsset, match="gone"), agree(step=3):
        raise MissingAsset("gone")


def attempts(rank: int, note: Note, done: Any) -> None:
    distributed.init_process_group("gloo")
    spare = distributed.new_group()
    found: list[Any] = []

    def attempt(group: Any, timeout_s: float, act: Callable[[], object]) -> None:
        began, ready = time.monotonic(), False
        try:
            with agree(group, step=7, timeout_s=timeout_s):
                act()
            ready = True
        except BaseException as error:  # noqa: BLE001 - every error is the result
            found.append([type(error).__name__, str(error), repr(error.__cause__)])
        found[len(found) :] = [ready] if ready else []
        assert time.monotonic() - began < 30
        note(found)

    def fail(*ranks: int, error: Callable[[str], BaseException] = ValueError) -> Callable[[], None]:
        def act() -> None:
            if rank in ranks:
                raise error(f"what rank {rank} found ü" + "." * 5000)

        return act

    def told() -> None:
        raise (StepAborted("step 7: rank 1: by the plane", 7, 1) if rank == 0 else MissingAsset("no image"))

    for act in (fail(), fail(0), fail(1), fail(0, 1), told, fail(1, error=KeyboardInterrupt), fail()):
        attempt(None, 60.0, act)
    # Rank 1 says nothing: rank 0 gives up by itself. Then rank 1 dies, and rank 0 notices.
    if rank == 1:
        done.wait(60)
    else:
        attempt(None, 0.5, lambda: None)
        done.set()
    attempt(spare, 60.0, (lambda: os._exit(9)) if rank == 1 else (lambda: None))
    os._exit(0)  # rank 0 alone cannot close the groups


def test_every_rank_raises_the_words_of_the_one_that_failed(tmp_path: Path) -> None:
    done = CONTEXT.Event()
    first, second = run_ranks(attempts, tmp_path, done)
    assert first[0] is True and second[0] is True
    for index, culprit in ((1, 0), (2, 1), (3, 0)):
        kind, words, _ = first[index]
        assert kind == "StepAborted"
        assert words.startswith(f"step 7: rank {culprit}: ValueError: what rank {culprit} found ü...")
        assert second[index][:2] == [kind, words]
    assert "what rank 1 found" in second[3][2], "each rank keeps its own error as the cause"
    # What a rank found itself counts for more than what another one was told.
    assert first[4][:2] == second[4][:2] == ["StepAborted", "step 7: rank 1: MissingAsset: no image"]
    assert first[5][1].startswith("step 7: rank 1: KeyboardInterrupt") and second[5][0] == "KeyboardInterrupt"
    assert first[6] is True and second[6] is True, "after an error the group can be used further"
    assert first[7][0] == "StepAborted" and "did not report within 0.5 s" in first[7][1]
    assert first[8][0] == "StepAborted" and "a rank of [0, 1] died" in first[8][1]


def two_ranks(folder: Path, url: str, *, tokens: int) -> Plane:
    return open_plane(
        folder, ranks=2, seq_len=tokens, micro_batch_max_tokens=tokens, groups_per_step=2, run="demo", listen=[url]
    )


def image_groups(folder: Path, count: int) -> list[Group]:
    task, rng = ColorTask(folder), random.Random(3)
    groups = []
    for i in range(count):
        prompt = task.prompt(rng)
        turns = [task.turn(prompt), Turn([20, task.eos], logprobs=[-1.0, -1.0])]
        rollouts = [Trajectory(turns=turns, reward=float(j % 2), env=task.name) for j in range(4)]
        groups.append(make_group(rollouts, id=f"g{i}", policy_version=0, advantage=task.advantage))
    return groups


def train_with_images(rank: int, note: Note, config: TrainConfig, url: str, folders: list[str]) -> None:
    distributed.init_process_group("gloo")
    config = replace(config, folder=folders[rank])
    trainer, forwards = Trainer(config, rank), 0

    def count(*_: object) -> None:
        nonlocal forwards
        forwards += 1

    trainer.model.register_forward_pre_hook(count)
    with pytest.raises(StepAborted) as caught, connect(url, rank=rank, world=2, run="demo") as source:
        trainer.run(source)
    note([str(caught.value), forwards, trainer.done])
    trainer.close()
    distributed.destroy_process_group()


def test_a_rank_without_its_image_stops_all_ranks_before_their_forward_pass(tmp_path: Path) -> None:
    url = f"ipc://{tmp_path}/s"
    folders = [str(tmp_path / "has-images"), str(tmp_path / "has-none")]
    packing = Packing(ranks=2, seq_len=32)
    config = TrainConfig(packing=packing, target=Target(groups=2), model=model_of("color"), max_steps=2)
    with two_ranks(tmp_path / "plane", url, tokens=32) as plane:
        for group in image_groups(tmp_path / "has-images", 4):
            plane.put(group)
        first, second = run_ranks(train_with_images, tmp_path, config, url, folders)
        assert plane.ledger.committed == 0 and plane.ledger.balanced
    assert first == second
    words, forwards, done = first
    assert words.startswith("step 1: rank 1: MissingAsset: ")
    assert (forwards, done) == (0, 0)


def train_in_turn(rank: int, note: Note, runs: list[tuple[TrainConfig, str, int]]) -> None:
    """Several whole runs, one after the other; each meets at a port of its own."""
    for config, url, port in runs:
        meet_at(port)
        train(config, rank=rank, url=url)
    note("done")


def test_two_ranks_train_the_vision_tower_in_steps_that_end_with_text(tmp_path: Path) -> None:
    alone = TrainConfig(
        folder=str(tmp_path / "alone"),
        packing=Packing(ranks=1, seq_len=32),
        target=Target(groups=2),
        max_steps=3,
        model=model_of("color"),
        images=ImagesConfig(folder=str(tmp_path / "assets")),
        optimizer=OptimizerConfig(lr=1e-2),
    )
    together = replace(alone, folder=str(tmp_path / "together"), packing=Packing(ranks=2, seq_len=32))
    for config, world in ((alone, 1), (together, 2)):
        url = f"ipc://{tmp_path}/{world}.s"
        settings: dict[str, Any] = {"ranks": world, "seq_len": 32, "groups_per_step": 2, "run": "demo", "listen": [url]}
        with open_plane(tmp_path / f"plane {world}", **settings) as plane:
            for i, group in enumerate(image_groups(tmp_path, 2)):
                said = [Turn([1, 7, 8]), Turn([12, 13], logprobs=[-1.0, -0.5])]
                text = [Trajectory(turns=said, reward=float(j % 2)) for j in range(4)]
                plane.put(group)
                plane.put(make_group(text, id=f"text {i}", policy_version=0))
            plane.put(make_group(text, id="text alone", policy_version=0))
            plane.put(make_group(text, id="text again", policy_version=0))
            assert run_ranks(train_in_turn, tmp_path, [(config, url, meeting_port())], world=world) == ["done"] * world
    first, second = (Weights(tmp_path / name / "weights").load(3) for name in ("alone", "together"))
    assert first is not None and second is not None
    for name, values in first.items():
        torch.testing.assert_close(second[name], values, rtol=0, atol=1e-5, msg=name)


def test_sharded_ranks_train_resume_and_save_like_whole_ones(tmp_path: Path) -> None:
    whole = TrainConfig(
        folder=str(tmp_path / "ddp"),
        packing=Packing(ranks=2, seq_len=16),
        target=Target(groups=2),
        max_steps=6,
        checkpoint_every=2,
        model=model_of("reverse"),
        optimizer=OptimizerConfig(lr=1e-2),
    )
    model = replace(whole.model, sharding="fsdp")
    sharded = replace(whole, folder=str(tmp_path / "fsdp"), model=model)
    urls = {name: f"ipc://{tmp_path}/{name}.s" for name in ("ddp", "fsdp")}
    with (
        two_ranks(tmp_path / "a", urls["ddp"], tokens=16) as first,
        two_ranks(tmp_path / "b", urls["fsdp"], tokens=16) as second,
    ):
        for group in recorded_groups(12):
            first.put(group)
            second.put(group)
        runs = [
            (whole, urls["ddp"], meeting_port()),
            (replace(sharded, max_steps=2), urls["fsdp"], meeting_port()),
            (replace(sharded, max_steps=4), urls["fsdp"], meeting_port()),  # from its checkpoint
            (replace(whole, folder=sharded.folder), urls["fsdp"], meeting_port()),  # and whole again
        ]
        assert run_ranks(train_in_turn, tmp_path, runs) == ["done", "done"]
        assert first.ledger.balanced and first.ledger.committed == second.ledger.committed == 6 * 2 * 4
    states = [Weights(tmp_path / name / "weights").load(6) for name in urls]
    assert states[0] is not None and states[1] is not None and states[0].keys() == states[1].keys()
    for name, values in states[0].items():
        torch.testing.assert_close(states[1][name], values, rtol=0, atol=1e-5, msg=name)
    assert [checkpoint.steps(tmp_path / name / "checkpoints") for name in urls] == [[2, 4, 6]] * 2
    losses = [[row["train/loss"] for row in Metrics(tmp_path / name / "metrics.jsonl").read()] for name in urls]
    assert len(losses[0]) == 6 and losses[1] == pytest.approx(losses[0], abs=1e-5)
