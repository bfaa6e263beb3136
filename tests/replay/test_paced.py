"""`Paced` says how many prompts may be handed out; it holds back neither puts nor samples."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.replay import Fifo, Limiter, MinSize, Paced, Queue, Replay, SamplesPerInsert, Table


@pytest.mark.parametrize(
    ("staleness", "version", "accepted", "running", "room"),
    [(0, 0, 0, 0, 8), (0, 0, 5, 3, 0), (2, 0, 0, 0, 24), (2, 3, 40, 6, 2), (1, 3, 99, 9, 0)],
)
def test_the_room_is_what_can_still_be_trained_in_time(
    staleness: int, version: int, accepted: int, running: int, room: int
) -> None:
    found = Paced(staleness).lease_room(version=version, groups_per_step=8, accepted=accepted, running=running)
    assert found == room


def test_steps_of_a_fractional_number_of_groups() -> None:
    assert Paced(1).lease_room(version=0, groups_per_step=2.75, accepted=0, running=0) == 5
    assert Paced(1).lease_room(version=2**53, groups_per_step=1e300, accepted=0, running=0) == 2**53


@pytest.mark.parametrize("limiter", [MinSize(), Queue(4), SamplesPerInsert(1.0, 4, 4.0)], ids=repr)
def test_other_limiters_bound_no_hand_outs(limiter: Limiter) -> None:
    assert limiter.lease_room(version=0, groups_per_step=1, accepted=10**9, running=10**9) is None


def test_puts_and_samples_do_not_wait_for_it() -> None:
    table = Table(capacity=4, limiter=Paced(0))
    for number in range(4):
        table.insert(number, None, timeout=0)
    assert not table.may_insert() and len(table.sample(3)) == 3  # the capacity still holds


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="counts every group as trained once"):
        Replay(limiter=Paced(1), max_times_sampled=2)
    with pytest.raises(ConfigError, match="dropped as stale"):
        Replay(limiter=Paced(3), max_staleness=2)
    with pytest.raises(ConfigError, match="max_staleness"):
        Paced(-1)
    assert Replay(limiter=Paced(3), max_staleness=3, remover=Fifo()).limiter == Paced(3)
