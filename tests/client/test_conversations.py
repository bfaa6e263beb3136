"""An inbox: what one thread puts, the conversation that waits takes, once and in order."""

from __future__ import annotations

import asyncio
import threading

import pytest

from penstock.client.conversations import Inbox
from penstock.errors import Closed
from penstock.protocol import Answer, Room


def room(ticket: int) -> Answer:
    return Room(ticket=ticket, policy_version=None)


def test_a_thread_takes_every_answer_once_and_in_order_and_then_the_error() -> None:
    inbox, count = Inbox(), 3000

    def put() -> None:
        for ticket in range(count):
            inbox.put([(ticket, room(ticket))])
        inbox.put(error=Closed("the end"))

    other = threading.Thread(target=put)
    other.start()
    taken: list[int] = []
    with pytest.raises(Closed):
        while True:
            # Also without waiting, so that answers arrive between a wait that ran out and the look that follows it.
            taken += [ticket for ticket, _ in inbox.wait(len(taken) % 2 * 1.0).block()]
    other.join()
    assert taken == list(range(count))
    with pytest.raises(Closed):
        inbox.wait(1.0).block()


def test_a_wait_without_an_answer_ends_and_the_next_one_still_waits() -> None:
    inbox = Inbox()
    assert inbox.wait(0.0).block() == []
    inbox.put([(1, room(1))])
    inbox.put([(2, room(2))])
    assert [ticket for ticket, _ in inbox.wait(0.0).block()] == [1, 2]
    assert inbox.wait(0.01).block() == []


def test_a_thread_may_wait_after_a_task() -> None:
    inbox = Inbox()
    inbox.put([(1, room(1))])
    assert len(asyncio.run(inbox.suspend(1.0))) == 1
    assert inbox.wait(0.01).block() == []
    inbox.put([(2, room(2))])
    assert [ticket for ticket, _ in inbox.wait(1.0).block()] == [2]
