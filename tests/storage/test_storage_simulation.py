"""Whole runs that go straight to a storage that fails; a failing seed is in the message and can be run alone."""

from __future__ import annotations

import pytest

from tests.support.storage_simulation import StorageSimulation, main

pytestmark = pytest.mark.deep

FIRST, SEEDS, MORE_SEEDS, PARTS = 80, 40, 160, 8
"""Seeds before the first are run for a release, and by `test_everything_that_can_go_wrong_does` if it needs them."""
FURTHER = (123, 128, 129, 148, 149, 151, 153, 156, 159)
"""Reach each line of the package that the 80 seeds from the first on reach, and the first 40 of them do not."""


@pytest.mark.parametrize("part", range(PARTS))
def test_every_promise_holds_whatever_fails(part: int) -> None:
    for seed in (*range(FIRST + part, FIRST + SEEDS, PARTS), *FURTHER[part::PARTS]):
        StorageSimulation(seed).run()


@pytest.mark.release
@pytest.mark.parametrize("part", range(PARTS))
def test_every_promise_holds_with_more_seeds(part: int) -> None:
    for seed in (*range(part, FIRST, PARTS), *range(FIRST + SEEDS + part, FIRST + MORE_SEEDS, PARTS)):
        StorageSimulation(seed).run()


# Seeds that come where few others do.
@pytest.mark.parametrize(
    "seed",
    [
        280,  # a second client puts a group while it is being written
        297,  # the disk is full while damage is repaired
        328,  # a step cannot be planned, and its session hears why
        394,  # the disk is full while damage is repaired, and the next turn tries again
    ],
)
def test_rare_seeds(seed: int) -> None:
    StorageSimulation(seed).run()


def test_a_seed_is_always_the_same_run() -> None:
    runs: list[list[str]] = [[], []]
    for notes in runs:
        StorageSimulation(15, note=notes.append).run()
    assert runs[0] == runs[1]
    assert len(runs[0]) > 5


HAPPENINGS = [
    "storage is away",
    "is altered",
    "the power is cut",
    "s pass for the plane",
    "the plane is replaced",
    "an old plane ends: Fenced",
    "is rejected: Sealed",
    "is rejected: Unseen",
    "is rejected: InvalidInput",
    "lies about",
    "cannot write",
    "the operator restores",
    "the plane refuses",
    "the plane ends: StorageError",
    "not on this mount",
    "not what was put",
]


SHOWING = (156, 153, 81, 123)
"""In these seeds everything went wrong. If a change of the code made them others, more are tried."""


def test_everything_that_can_go_wrong_does() -> None:
    notes: list[str] = []
    missing = HAPPENINGS
    for seed in (*SHOWING, *range(FIRST)):
        StorageSimulation(seed, note=notes.append).run()
        missing = [words for words in missing if not any(words in note for note in notes)]
        notes.clear()
        if not missing:
            break
    assert not missing


def test_one_seed_can_be_run_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "3"]) == 0
    assert "the plane starts" in capsys.readouterr().out
