"""The reference trainer passes the conformance kit, on two real ranks that exchange gradients over gloo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from penstock.client import Step
from penstock.demo.tasks import REVERSE, model_of
from penstock.packing import PackedStep, Packing
from penstock.testing.trainer import check
from penstock.train.run_config import LossConfig, OptimizerConfig, TrainConfig
from penstock.train.trainer import Trainer
from tests.train.ranks import run_ranks

pytestmark = pytest.mark.process


class Looks:
    """In place of the optimizer: keeps the gradients it is given, and moves nothing."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.gradients: dict[str, torch.Tensor] = {}

    def step(self) -> None:
        self.gradients = {name: p.grad.clone() for name, p in self.model.named_parameters()}

    def zero_grad(self) -> None:
        self.model.zero_grad()


def trainer_of(folder: Path, rank: int, ranks: int) -> Trainer:
    config = TrainConfig(
        folder=str(folder),
        packing=Packing(ranks=ranks, seq_len=64, micro_batch_max_tokens=128, long_rows=True),
        model=model_of("reverse"),
        loss=LossConfig(entropy_bonus=0.01),
        optimizer=OptimizerConfig(max_grad_norm=1e9),  # no clipping
    )
    trainer = Trainer(config, rank)
    trainer.optimizer = Looks(trainer.model)
    return trainer


def checked(rank: int, note: Callable[[Any], Any], folder: str) -> None:
    """Every rank runs the same check; a step of one rank is trained alone by each, one of two ranks together."""
    distributed.init_process_group("gloo")
    alone = trainer_of(Path(folder) / f"alone-{rank}", 0, 1)
    together = trainer_of(Path(folder) / "together", rank, 2)

    def step_fn(step: PackedStep) -> tuple[float, dict[str, torch.Tensor]]:
        trainer, own = (alone, 0) if len(step.ranks) == 1 else (together, rank)
        part = step.ranks[own]
        received = Step(1, "", part.rank_plan, list(part))
        sums = trainer.train_step(received, [trainer._prepare(batch) for batch in received])
        return sums.metrics()["train/loss"], trainer.optimizer.gradients

    def with_bonus(columns: Any, logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        terms = alone._loss(columns, logprobs, entropy)
        bonus = torch.where(columns["loss_mask"], entropy, 0.0)
        return terms.loss - alone.config.loss.entropy_bonus * bonus

    report = check(step_fn, vocabulary=len(REVERSE), model=alone.model, loss=with_bonus, ranks=[2])
    note([str(report), report.ok])
    alone.close()
    together.close()
    distributed.destroy_process_group()


def test_the_reference_trainer_passes_on_two_ranks(tmp_path: Path) -> None:
    for text, ok in run_ranks(checked, tmp_path, str(tmp_path)):
        assert ok, text
