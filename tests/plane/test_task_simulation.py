"""Leased prompts under every fault at once, in simulated time; a failing seed can be run alone."""

from __future__ import annotations

import pytest

from tests.support.task_simulation import ORDERS, TaskSimulation

FAST, SEEDS, MORE_SEEDS, PARTS = 10, 90, 630, 4
FURTHER = (108, 133, 137)
"""Reach each line of the package that 150 seeds reach, and the first 90 of them do not."""


def test_every_prompt_is_trained_once_per_epoch_whatever_fails() -> None:
    for seed in range(FAST):
        TaskSimulation(seed).run()


@pytest.mark.parametrize("order", ["pools", "thompson"])
def test_every_task_that_a_curriculum_draws_is_trained_once_whatever_fails(order: str) -> None:
    for seed in range(6):
        TaskSimulation(seed, ORDERS[order]).run()


@pytest.mark.deep
def test_every_prompt_is_trained_once_per_epoch_in_more_runs() -> None:
    for seed in (*range(FAST, SEEDS), *FURTHER):
        TaskSimulation(seed, list(ORDERS.values())[seed % 3]).run()


@pytest.mark.release
@pytest.mark.parametrize("part", range(PARTS))
def test_every_prompt_is_trained_once_per_epoch_in_many_more_runs(part: int) -> None:
    for seed in range(SEEDS + part, MORE_SEEDS, PARTS):
        TaskSimulation(seed, list(ORDERS.values())[seed % 3]).run()
