"""Synthetic steps, to time a trainer without rollouts: fixed shapes, random tokens, no plane."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import numpy as np

from penstock.arrays import Sample
from penstock.client import Step
from penstock.packing import RankPlan, fill, pack
from penstock.train.run_config import TrainConfig


class FakeSource:
    """A stand-in for `Source`. Every step has `micro_batches` of `batch_size` full-length samples."""

    def __init__(self, config: TrainConfig, rank: int, vocabulary: int) -> None:
        assert config.fake is not None
        self._config, self._rank, self._vocabulary = config, rank, vocabulary
        self._number = 0

    def step(self, number: int | None = None, *, timeout: float | None = None) -> Step:
        self._number += 1
        fake, length = self._config.fake, self._config.packing.seq_len
        assert fake is not None
        rng = np.random.default_rng([self._config.seed, self._number])
        samples = [
            self._sample(rng, f"fake-{self._number}/{i}", length)
            for i in range(fake.batch_size * fake.micro_batches * self._config.ranks)
        ]
        step = pack(
            samples,
            ranks=self._config.ranks,
            seq_len=length,
            micro_batch_max_tokens=fake.batch_size * length,
            long_rows=True,
        )
        rank_plan: RankPlan = step.ranks[self._rank].rank_plan
        return Step(self._number, "", rank_plan, fill(step.ranks[self._rank].all_samples, rank_plan))

    def _sample(self, rng: np.random.Generator, name: str, length: int) -> Sample:
        mask = np.arange(length) >= max(1, length // 4)
        return Sample(
            id=name,
            token_ids=rng.integers(0, self._vocabulary, length),
            loss_mask=mask,
            logprobs=np.where(mask, -1.0, 0.0),
            advantages=float(rng.normal()),
            rewards=0.0,
        )

    def commit(self, step: Step, *, policy_version: int | None = None) -> None:
        """Does nothing: there is no plane."""

    def report(self, step: Step, *, priorities: Mapping[str, float] | None = None) -> None:
        """Does nothing: there is no plane."""

    def flush(self) -> None:
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None
