"""Leased prompts under every fault at once, in simulated time. The message names a failing seed, to run it alone."""

from __future__ import annotations

import pytest

from tests.support.task_simulation import TaskSimulation

PARTS = 4


def test_every_prompt_is_trained_once_per_epoch_whatever_fails() -> None:
    for seed in range(30):
        TaskSimulation(seed).run()


@pytest.mark.deep
@pytest.mark.parametrize("part", range(PARTS))
def test_every_prompt_is_trained_once_per_epoch_in_many_more_runs(part: int) -> None:
    for seed in range(30 + part, 630, PARTS):
        TaskSimulation(seed).run()
