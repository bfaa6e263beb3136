"""A run with trees is the run without: the same losses, weights and exported tokens, and fewer tokens computed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.capture import Trajectory, Turn
from penstock.client import open as open_plane
from penstock.convert import Group, make_group
from penstock.demo.tasks import make_task, model_of, standardized
from penstock.errors import ConfigError
from penstock.packing import Packing
from penstock.plane import Target
from penstock.train.checkpoint import Weights
from penstock.train.loss import Sft
from penstock.train.run_config import OptimizerConfig, TaskConfig, TrainConfig
from penstock.train.trainer import Trainer, train
from penstock.view import Export, TokenExporter
from penstock.view.batch_records import BatchCopy
from penstock.view.run_files import Metrics

ABOUT_THE_ROW = {"export_sequence_idx", "micro_step", "micro_sequence_idx", "micro_batch_digest"}
"""What an export says of where a sample was computed: another row than without trees."""


def long_groups(count: int) -> list[Group]:
    task, rng = make_task(TaskConfig(preamble=33), Path()), random.Random(5)
    groups = []
    for i in range(count):
        prompt = task.prompt(rng)
        rollouts = []
        for _ in range(4):
            tokens = [rng.randrange(2, 12) for _ in range(rng.randint(1, 5))]
            turns = [task.turn(prompt), Turn(tokens, logprobs=[-rng.random() - 0.5 for _ in tokens], temperatures=0.9)]
            rollouts.append(Trajectory(turns=turns, reward=task.reward(prompt, tokens), env=task.name))
        groups.append(make_group(rollouts, id=f"g{i}", policy_version=0, advantage=standardized))
    return groups


def run(folder: Path, *, trees: bool, steps: int = 3) -> None:
    packing = Packing(ranks=1, seq_len=64, micro_batch_max_tokens=256, long_rows=True, trees=trees)
    config = TrainConfig(
        folder=str(folder),
        packing=packing,
        target=Target(groups=2),
        model=model_of("reverse"),
        optimizer=OptimizerConfig(lr=1e-3),
        max_steps=steps,
    )
    url = f"ipc://{folder}/s"
    settings = {"ranks": 1, "seq_len": 64, "micro_batch_max_tokens": 256, "long_rows": True, "trees": trees}
    with open_plane(folder / "plane", groups_per_step=2, run="demo", listen=[url], **settings) as plane:  # type: ignore[arg-type]
        for group in long_groups(2 * steps):
            plane.put(group)
        train(config, rank=0, url=url, observer=TokenExporter(folder))


def exported(folder: Path, step: int) -> dict[str, Any]:
    return {record.fields["sample_id"]: record for record in Export(folder).step(step).records()}


@pytest.mark.deep
def test_a_run_with_trees_exports_and_learns_what_a_plain_run_does(tmp_path: Path) -> None:
    run(tmp_path / "plain", trees=False)
    run(tmp_path / "trees", trees=True)
    for step in (1, 2, 3):
        plain, trees = (exported(tmp_path / name, step) for name in ("plain", "trees"))
        assert plain.keys() == trees.keys() and len(plain) == 8
        for name, wanted in plain.items():
            found = trees[name]
            assert found.fields.keys() == wanted.fields.keys()
            assert {n for n, value in wanted.fields.items() if found.fields[n] != value} <= ABOUT_THE_ROW
            assert found.columns.keys() == wanted.columns.keys()
            for column, values in wanted.columns.items():
                np.testing.assert_allclose(found.columns[column], values, rtol=0, atol=2e-5, err_msg=column)
    rows = [Metrics(tmp_path / name / "metrics.jsonl").read() for name in ("plain", "trees")]
    assert [r["perf/shared_tokens"] > 0 for r in rows[1]] == [True] * 3
    assert [r["perf/tokens"] for r in rows[0]] == [r["perf/tokens"] for r in rows[1]]
    assert [r["train/loss"] for r in rows[1]] == pytest.approx([r["train/loss"] for r in rows[0]], abs=1e-5)
    states = [Weights(tmp_path / name / "weights").load(3) for name in ("plain", "trees")]
    assert states[0] is not None and states[1] is not None
    for name, values in states[0].items():
        torch.testing.assert_close(states[1][name], values, rtol=0, atol=1e-4, msg=name)


def test_routed_experts_of_a_forest_are_exported_for_every_sample() -> None:
    rng = np.random.default_rng(0)
    prompt, experts = rng.integers(0, 9, 40), rng.integers(0, 4, (40, 2, 2), np.uint8)
    own = [rng.integers(0, 4, (3, 2, 2), np.uint8) for _ in range(3)]
    samples = [
        ps.Sample(
            id=str(i),
            group="g",
            token_ids=[*prompt, i, 1, 2],
            loss_mask=np.arange(43) > 39,
            routed_experts=np.concatenate([experts, mine]),
            mode="sft",
        )
        for i, mine in enumerate(own)
    ]
    (batch,) = ps.pack(samples, ranks=1, seq_len=256, trees=True).ranks[0]
    assert batch.forest is not None
    terms = Sft()(ps.to_torch(batch), torch.zeros(batch.num_tokens))
    for record in BatchCopy.of(batch, terms).records({}, None):
        wanted = np.concatenate([experts, own[int(record.fields["sample_id"])]])
        assert np.array_equal(record.columns["routed_experts"], wanted)


def test_a_trainer_without_trees_refuses_forests_before_it_trains(tmp_path: Path) -> None:
    samples = [s for group in long_groups(1) for s in group.samples]
    (batch,) = ps.pack(samples, ranks=1, seq_len=256, trees=True).ranks[0]
    assert batch.forest is not None
    trainer = Trainer(
        TrainConfig(folder=str(tmp_path), packing=Packing(ranks=1, seq_len=64), model=model_of("reverse")), 0
    )
    with pytest.raises(ConfigError, match=r"packing\.trees: false, but the plane sends samples that share tokens"):
        trainer._prepare(batch)
    trainer.close()


def test_a_model_that_cannot_branch_stops_a_trainer_with_trees_at_its_start(tmp_path: Path) -> None:
    from penstock.train.run_config import ModelConfig
    from tests.train.test_attention import TINY

    model = ModelConfig(family="mistral", config={**TINY, "sliding_window": 16})
    packing = Packing(ranks=1, seq_len=64, trees=True)
    with pytest.raises(ConfigError, match=r"set packing\.trees = false, or seq_len to at most 16"):
        Trainer(TrainConfig(folder=str(tmp_path), packing=packing, model=model), 0)
