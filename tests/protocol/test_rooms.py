"""Waiting lines, reservations and credit: random histories against a plain list, and the mistakes that were made."""

from __future__ import annotations

import time
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.rooms import MOST_CREDIT, MOST_OF_ONE, NOTHING, Amount, Rooms
from tests.support.reference_line import PlainLine

PEER_S = 4.0
CAPACITY, LIMIT = 4, 12
CLIENTS = ["a", "b", "c"]
TOO_LARGE = 99


class Table:
    """One table's room, as the engine knows it."""

    def __init__(self, capacity: int = CAPACITY, limit: int = LIMIT) -> None:
        self.capacity, self.limit = capacity, limit
        self.held: list[int] = []
        self.looks = 0

    def no_room(self, _table: str, size: int, reserved: Amount) -> str | None:
        self.looks += 1
        if size >= TOO_LARGE:
            return None
        groups, used = len(self.held) + reserved.groups, sum(self.held) + reserved.bytes
        return "full" if groups >= self.capacity or used + size > self.limit else ""

    def spare(self, reserved: Amount) -> Amount:
        return Amount(self.capacity - len(self.held) - reserved.groups, self.limit - sum(self.held) - reserved.bytes)


class Twins:
    """Rooms and the plain line, told the same."""

    def __init__(self) -> None:
        self.rooms, self.table, self.plain = Rooms(PEER_S), Table(), PlainLine(CAPACITY, LIMIT, PEER_S)
        self.now = 0.0
        self.offer(0.0)

    def ask(self, client: str, number: int, size: int) -> None:
        self.rooms.ask((client, number), "", size)
        self.plain.ask(client, number, size)

    def put(self, client: str, number: int, size: int) -> None:
        ticket = (client, number)
        beside = self.rooms.claim(ticket, "")
        accepted = beside is not None and self.table.no_room("", size, beside) == ""
        if accepted:
            self.table.held.append(size)
            self.rooms.close(ticket)
        else:
            self.rooms.wait(ticket, "", size)
        assert accepted == self.plain.put(client, number, size)

    def give_up(self, client: str, number: int) -> None:
        self.rooms.close((client, number))
        self.plain.close(client, number)

    def trace(self, client: str, number: int) -> None:
        self.rooms.hear(client, number)
        self.plain.remind(client, number)

    def gone(self, client: str) -> None:
        self.rooms.gone(client)
        self.plain.gone(client)

    def train(self) -> None:
        self.table.held, self.plain.held = self.table.held[1:], self.plain.held[1:]

    def offer(self, seconds: float) -> list[object]:
        self.now += seconds
        granted, refused = self.rooms.offer(self.table, self.now)
        assert granted == self.plain.offer(seconds)
        assert all(self.rooms.is_waiting(ticket) for ticket, why in refused if why == "full")
        self.check()
        return list(granted)

    def check(self) -> None:
        assert self.table.held == self.plain.held
        assert self.rooms.num_waiting == len(self.plain.waiting())
        reserved = self.plain.reserved()
        assert self.rooms.reserved("") == (len(reserved), sum(waiter.size for waiter in reserved))
        assert len(self.table.held) + len(reserved) <= CAPACITY
        assert sum(self.table.held) + self.rooms.reserved("").bytes <= LIMIT
        if self.plain.waiting():
            assert self.rooms.credit(self.table) == NOTHING


@given(st.integers(0, 1 << 32))
def test_rooms_does_what_a_plain_list_would(seed: int) -> None:
    """Messages are lost, repeated and reordered, because clients say whatever they like."""
    rng, twins = Random(seed), Twins()
    sizes = {(client, number): rng.randrange(1, 6) for client in CLIENTS for number in range(6)}
    for _ in range(rng.randrange(120)):
        client, number = rng.choice(list(sizes))
        act = rng.choice(["ask", "ask", "ask", "put", "put", "give_up", "trace", "gone", "train", "offer", "offer"])
        if act in ("ask", "put"):
            getattr(twins, act)(client, number, sizes[client, number])
        elif act in ("give_up", "trace"):
            getattr(twins, act)(client, number)
        elif act == "gone":
            if rng.random() < 0.2:
                twins.gone(client)
        elif act == "train":
            twins.train()
        else:
            twins.offer(rng.choice([0.0, 0.0, 0.5, 0.75, 64.0]))
    for _ in range(200):  # all drains: those who are granted put, the others are silent and leave
        for client, number in twins.offer(0.5):  # type: ignore[misc]
            twins.put(client, number, sizes[client, number])
        twins.train()
        twins.offer(0.0)
    assert (twins.rooms.num_waiting, twins.rooms.reserved("")) == (0, NOTHING)


def full() -> tuple[Rooms, Table]:
    rooms, table = Rooms(PEER_S), Table(capacity=1)
    table.held.append(1)
    rooms.offer(table, 0.0)
    return rooms, table


# ------------------------------------------------------------------ waiters that are not there


def test_a_reminder_and_its_give_up_in_one_turn_leave_no_waiter() -> None:
    rooms, table = full()
    rooms.ask(("a", 1), "", 1)
    rooms.offer(table, 0.1)
    rooms.ask(("a", 1), "", 1)
    rooms.close(("a", 1))
    assert rooms.offer(table, 0.2) == ([], [])
    assert rooms.num_waiting == 0


def test_a_give_up_that_overtakes_its_ask_leaves_no_waiter() -> None:
    rooms, table = full()
    rooms.close(("a", 1))
    rooms.ask(("a", 1), "", 1)
    rooms.offer(table, 0.1)
    assert rooms.num_waiting == 0


def test_a_reminder_that_its_own_put_overtook_leaves_no_waiter_and_reserves_nothing() -> None:
    rooms, table = full()
    rooms.ask(("a", 1), "", 1)
    table.held.clear()
    assert rooms.offer(table, 0.1) == ([("a", 1)], [])
    assert rooms.claim(("a", 1), "") == NOTHING
    table.held.append(1)
    rooms.close(("a", 1))
    assert rooms.ask(("a", 1), "", 1)  # told to send, in case the answer to its put was lost
    assert rooms.offer(table, 0.2) == ([], [])
    assert (rooms.num_waiting, rooms.reserved("")) == (0, NOTHING)


def test_who_reminds_while_its_room_is_on_its_way_keeps_it_and_is_told_again() -> None:
    rooms, table = full()
    rooms.ask(("a", 1), "", 1)
    rooms.ask(("b", 1), "", 1)
    table.held.clear()
    assert rooms.offer(table, 0.1)[0] == [("a", 1)]
    assert rooms.ask(("a", 1), "", 1)
    assert rooms.offer(table, 0.2)[0] == []
    assert rooms.reserved("") == (1, 1)
    assert rooms.claim(("b", 1), "") is not None  # first in line, but the room is not its own
    assert table.no_room("", 1, rooms.reserved("")) == "full"


def test_a_put_sent_without_asking_does_not_pass_those_who_wait() -> None:
    rooms, table = full()
    rooms.ask(("a", 1), "", 1)
    table.held.clear()
    assert rooms.claim(("b", 1), "") is None
    rooms.wait(("b", 1), "", 1)
    assert rooms.offer(table, 0.1)[0] == [("a", 1)]
    assert rooms.is_waiting(("b", 1))


def test_a_client_that_falls_silent_leaves_the_line_within_peer_s() -> None:
    rooms, table = full()
    for number in range(64):
        rooms.ask(("dead", number), "", 1)
    rooms.ask(("live", 1), "", 1)
    table.held.clear()
    now, granted = 0.0, rooms.offer(table, 0.0)[0]
    assert granted == [("dead", 0)]
    while granted != [("live", 1)]:
        now += 0.5
        assert now <= PEER_S + 1.0
        rooms.ask(("live", 1), "", 1)
        granted = rooms.offer(table, now)[0]
    assert rooms.num_waiting == 0


def test_a_client_that_cannot_be_reached_leaves_at_once() -> None:
    rooms, table = full()
    for number in range(64):
        rooms.ask(("dead", number), "", 1)
    rooms.ask(("live", 1), "", 1)
    table.held.clear()
    assert rooms.offer(table, 0.1)[0] == [("dead", 0)]
    rooms.gone("dead")
    assert rooms.offer(table, 0.1)[0] == [("live", 1)]


def test_a_reservation_lasts_as_long_as_its_client_speaks_of_it() -> None:
    rooms, table = full()
    rooms.ask(("slow", 1), "", 1)
    rooms.ask(("next", 1), "", 1)
    table.held.clear()
    rooms.offer(table, 0.0)
    for turn in range(1000):
        rooms.hear("slow", 1)  # its put takes its time; a trace says so
        rooms.ask(("next", 1), "", 1)
        assert rooms.offer(table, float(turn))[0] == []
    assert rooms.claim(("slow", 1), "") == NOTHING


def test_a_plane_that_stood_still_does_not_take_clients_for_dead() -> None:
    rooms, table = full()
    rooms.ask(("a", 1), "", 1)
    rooms.offer(table, 1000.0)
    rooms.offer(table, 2000.0)
    assert rooms.num_waiting == 1


def test_a_reservation_that_did_not_hold_waits_first() -> None:
    rooms, table = full()
    rooms.ask(("a", 1), "", 1)
    rooms.ask(("b", 1), "", 1)
    table.held.clear()
    rooms.offer(table, 0.1)
    table.held.append(1)  # whatever it was
    assert table.no_room("", 1, rooms.claim(("a", 1), "") or NOTHING) == "full"
    rooms.wait(("a", 1), "", 1)
    table.held.clear()
    assert rooms.offer(table, 0.2)[0] == [("a", 1)]


# ------------------------------------------------------------------ many


def test_a_client_that_asks_five_thousand_times_takes_a_thousand_places() -> None:
    rooms, table = full()
    for number in range(5000):
        rooms.ask(("greedy", number), "", 1)
    rooms.ask(("b", 1), "", 1)
    _, refused = rooms.offer(table, 0.1)
    assert rooms.num_waiting == MOST_OF_ONE + 1
    assert sum(why == "too many puts wait for room" for _, why in refused) == 5000 - MOST_OF_ONE
    assert table.looks == 1


def test_one_look_at_a_table_per_turn_however_many_wait() -> None:
    rooms, table = full()
    for client in range(60):
        for number in range(1000):
            rooms.ask((client, number), "", 1)
    rooms.offer(table, 0.1)
    before, began = table.looks, time.process_time()
    for _ in range(1000):
        rooms.offer(table, 0.1)
        rooms.close((0, 0))
        rooms.claim(("b", 1), "")
    assert table.looks == before + 1000
    assert time.process_time() - began < 1.0  # a scan of the line would take a hundred times as long


def test_a_group_that_will_never_fit_is_sent_for_and_reserves_nothing() -> None:
    rooms, table = full()
    rooms.ask(("a", 1), "", TOO_LARGE)
    assert rooms.offer(table, 0.1)[0] == [("a", 1)]
    assert rooms.reserved("") == NOTHING


def test_an_ask_that_does_not_wait_is_answered_and_takes_no_place() -> None:
    rooms, table = full()
    rooms.ask(("a", 1), "", 1, waits=False)
    assert rooms.offer(table, 0.1) == ([], [(("a", 1), "full")])
    assert rooms.num_waiting == 0
    rooms.ask(("a", 1), "", 1, waits=False)  # the answer was lost
    assert rooms.offer(table, 0.2) == ([], [(("a", 1), "full")])


def test_how_long_the_first_has_waited() -> None:
    rooms, table = full()
    assert rooms.oldest_s == 0.0
    rooms.ask(("a", 1), "", 1)
    rooms.offer(table, 0.75)
    assert rooms.oldest_s == pytest.approx(0.75)


# ------------------------------------------------------------------ credit


def test_credit_is_a_part_of_the_free_room_and_none_while_somebody_waits() -> None:
    rooms, table = Rooms(PEER_S), Table(capacity=800, limit=8000)
    for client in range(10):
        rooms.hear(client)
    assert rooms.credit(table) == (20, 200)
    table.capacity = table.limit = 1 << 40
    rooms.offer(table, 0.0)
    assert rooms.credit(table) == MOST_CREDIT
    table.capacity = 1
    table.held.append(1)
    rooms.ask(("a", 1), "", 1)
    rooms.offer(table, 0.1)
    assert rooms.credit(table) == NOTHING


def test_a_small_table_gives_no_credit() -> None:
    rooms = Rooms(PEER_S)
    rooms.hear("a")
    assert rooms.credit(Table(capacity=3, limit=1 << 30)) == NOTHING
