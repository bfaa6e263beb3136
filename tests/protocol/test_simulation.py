"""Whole runs under every fault at once, in simulated time; a failing seed is in the message and can be run alone."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from penstock.arrays import Sample
from penstock.arrays.digests import sample_digests
from penstock.frames import decode, encode
from penstock.plane.engine import Engine
from penstock.plane.intake import Incoming, Intake
from penstock.plane.pipeline import Pipeline
from penstock.plane.step_builder import StepBuilder
from penstock.plane.workers import Workers
from penstock.protocol.messages import Buffer, Frames
from tests.support.plain_groups import run_of_group
from tests.support.simulation import Simulation, main

pytestmark = pytest.mark.deep

FIRST, PLAIN_SEEDS, REAL_SEEDS, PARTS = 60, 80, 32, 8
MORE_SEEDS = 720
"""Seeds before the first are run by `test_session_phases.py`; `scripts/explore` runs new ones."""
FURTHER = (149, 159, 174, 196)
"""Reach each line of the package that 160 seeds from the first on reach, and the first 80 of them do not."""


class RealIntake(Intake):
    """Makes real samples of a group's name."""

    def names_of(self, frame: Buffer) -> tuple[str, str]:
        return super().names_of(_frame(frame))

    def take(self, batch: Sequence[Incoming]) -> None:
        for group in batch:
            group.frame = _frame(group.frame)
        super().take(batch)


def real_pipeline(engine: Engine, workers: Workers) -> Pipeline:
    """Plans, packs and encodes real samples."""
    builder = StepBuilder(engine.settings.packing, engine.storage)
    return Pipeline(engine, RealIntake(engine.settings, engine.writer), builder, workers)


def real_digests(frames: Frames) -> list[bytes]:
    return sample_digests(decode(frames[0])) if len(frames[0]) else []  # a rank may need no sample


def _frame(data: Buffer) -> bytes:
    name, samples, version = msgspec.msgpack.decode(data, type=tuple[str, int, int])
    rng = np.random.default_rng(int(name[1:]))
    made = [
        Sample.from_prompt(
            id=f"{name}/{i}",
            group=name,
            run=run_of_group(name),
            policy_version=version,
            prompt_ids=rng.integers(0, 1000, 3),
            completion_ids=rng.integers(0, 1000, 1 + i),
            completion_logprobs=-rng.random(1 + i).astype(np.float32),
        )
        for i in range(samples)
    ]
    return encode(made)


@pytest.mark.parametrize("part", range(PARTS))
def test_every_promise_holds_whatever_fails(part: int) -> None:
    for seed in (*range(FIRST + part, FIRST + PLAIN_SEEDS, PARTS), *FURTHER[part::PARTS]):
        Simulation(seed).run()


@pytest.mark.release
@pytest.mark.parametrize("part", range(PARTS))
def test_every_promise_holds_with_more_seeds(part: int) -> None:
    for seed in range(FIRST + PLAIN_SEEDS + part, FIRST + PLAIN_SEEDS + MORE_SEEDS, PARTS):
        Simulation(seed).run()


@pytest.mark.parametrize("part", range(PARTS))
def test_every_promise_holds_with_real_samples_and_packing(part: int) -> None:
    for seed in range(10_000 + part, 10_000 + REAL_SEEDS, PARTS):
        Simulation(seed, pipeline=real_pipeline, digests=real_digests).run()


def test_simulated_producers_wait_for_room_and_leave() -> None:
    runs = [Simulation(seed) for seed in range(10)]
    for run in runs:
        run.run()
    assert sum(run.oracle.waited > 0 for run in runs) > 2
    assert sum(run.oracle.num_left > 0 for run in runs) > 2


# Seeds that once failed, with what they found.
@pytest.mark.parametrize(
    "seed",
    [
        497,  # a rank waited for ever for a release that a restarted plane could not know it owed
        507,  # a commit was confirmed to a rank while the disk was full, and forgotten by a restart
        760,  # ranks of two sessions, told apart only by what they were told
        4942,  # two trainers that began at different steps, one after the other
    ],
)
def test_known_seeds(seed: int) -> None:
    Simulation(seed).run()


def test_a_seed_is_always_the_same_run() -> None:
    first: list[str] = []
    second: list[str] = []
    Simulation(17, note=first.append).run()
    Simulation(17, note=second.append).run()
    assert first == second
    assert first


def test_one_seed_can_be_run_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "3"]) == 0
    assert "the faults end" in capsys.readouterr().out
