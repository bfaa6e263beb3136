"""Two trainers at once, as real processes: the second one is refused, and one that restarts is not."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import pytest

import penstock as ps
from penstock.errors import PeerError
from penstock.log import is_gone, pid_space
from tests.support.groups import named_group
from tests.support.pace import eventually, pace
from tests.support.planes import FAST, OpenPlane

pytestmark = pytest.mark.process

SPAWN = multiprocessing.get_context("spawn")
PATIENCE_S = 60 * pace()


def train_until_killed(url: str, answers: Any) -> None:
    with ps.connect(url, rank=0, world=1, timeouts=FAST) as source:
        answers.put(source.step(timeout=PATIENCE_S).number)
        source.step(timeout=PATIENCE_S)


@pytest.fixture
def trainer(open_plane: OpenPlane) -> Any:
    """A plane, and a trainer that has taken its first step in a process of its own."""
    plane = open_plane(ranks=1, groups_per_step=1, listen=["tcp://127.0.0.1:*"])
    plane.put(named_group("a"))
    answers = SPAWN.SimpleQueue()
    process = SPAWN.Process(target=train_until_killed, args=(plane.url, answers), daemon=True)
    process.start()
    assert answers.get() == 1
    yield plane, process
    process.kill()
    process.join(PATIENCE_S)


def test_a_second_trainer_is_refused_with_pid_and_host_of_the_first(trainer: Any) -> None:
    plane, process = trainer
    words = rf"another process \(pid {process.pid} on .+\) already joined as rank 0; stop one of the two"
    with pytest.raises(PeerError, match=words), plane.source(0) as second:
        second.step(timeout=PATIENCE_S)
    assert process.is_alive()


def test_a_trainer_that_was_killed_and_restarted_gets_its_step_again(trainer: Any) -> None:
    plane, process = trainer
    process.kill()
    process.join(PATIENCE_S)
    with plane.source(0) as again:
        assert again.step(timeout=PATIENCE_S).number == 1


def test_a_pid_is_gone_when_its_process_was_waited_for() -> None:
    process = SPAWN.Process(target=print)
    process.start()
    assert process.pid is not None and not is_gone(pid_space(), os.getpid())
    process.join(PATIENCE_S)
    eventually(lambda: is_gone(pid_space(), process.pid or 0))
    assert not is_gone("elsewhere", process.pid)
