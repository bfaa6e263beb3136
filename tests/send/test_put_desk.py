"""A keeper takes a group in: checked, kept, copied, vouched for; and what it does when others do not answer."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from penstock.errors import InvalidInput
from penstock.send.keeper_events import CheckFrame, Event, ForgetNumbers, KeepFrame, ToClient, ToPeer, ToPlane
from penstock.send.keeper_messages import (
    Copied,
    CopyFrame,
    DropCopies,
    Enlist,
    Enlisted,
    KeeperAt,
    KeeperPulse,
    PutFacts,
)
from penstock.send.keeper_session import KeeperSession
from penstock.send.messages import Accepted, AskRoom, Attached, Missing, Pulse, Put, Rejected, Room, Trace
from penstock.send.put_desk import PutDesk
from penstock.send.timeouts import Timeouts

TIMES = Timeouts(heartbeat_s=1.0, peer_s=4.0, delivery_s=20.0, plane_s=10.0, resend_s=1.0)
FRAME, DIGEST = b"a frame", b"\x00" * 16
PUT = Put(ticket=7, group="g", digest=DIGEST)


@dataclass
class Disk:
    last: int = 0
    numbers: list[int] = field(default_factory=list)
    num_bytes: int = 0

    def __len__(self) -> int:
        return len(self.numbers)


def peer(name: str, node: str | None = None) -> KeeperAt:
    return KeeperAt(name=name, node=node or name, url=f"tcp://{name}")


def pulse(*names: str, number: int = 1) -> KeeperPulse:
    return KeeperPulse(epoch=1, number=number, peers=tuple(map(peer, names)), down=("keeper z (silent for 9.0 s)",))


def desk(*peers: str, copies: int = 2, quota: int | None = None, disk: Disk | None = None) -> PutDesk:
    """Of keeper "me", which has joined its plane."""
    about = Enlist(name="me", node="me", url="tcp://me", key=b"", incarnation="1", last=0, life=1)
    disk = Disk() if disk is None else disk
    session = KeeperSession(about, disk, timeouts=TIMES)
    session.start(0.0)
    attached = Attached(ticket=0, run_id=b"r" * 16, run="run", epoch=1, ranks=1, copies=copies)
    session.on_message(attached, (), 0.0)
    terms = Enlisted(
        epoch=1, copies=copies, is_shared=False, seq_len=64, max_tokens=1, max_bytes=1, max_samples=1, clients=()
    )
    session.on_message(terms, [b""], 0.0)
    session.on_message(pulse(*peers), (), 0.0)
    return PutDesk(session, name="me", used_bytes=lambda: disk.num_bytes, quota_bytes=quota)


def of(kind: type, events: list[Event]) -> list[Event]:
    return [event for event in events if isinstance(event, kind)]


def said(events: list[Event]) -> list[object]:
    """To clients."""
    return [event.message for event in events if isinstance(event, ToClient)]


def copied_to(events: list[Event]) -> list[tuple[str, int]]:
    return [(e.name, e.message.ticket) for e in events if isinstance(e, ToPeer) and isinstance(e.message, CopyFrame)]


def facts_of(events: list[Event]) -> PutFacts:
    (found,) = [e.message for e in events if isinstance(e, ToPlane) and isinstance(e.message, PutFacts)]
    return found


def kept(me: PutDesk, *, now: float = 0.0) -> list[Event]:
    """A put that is checked; what is to be done then."""
    (check,) = me.on_put("p", PUT, [FRAME], now)
    assert isinstance(check, CheckFrame)
    return me.checked(check.work, b"facts", b"", now)


def synced(me: PutDesk) -> tuple[int, int]:
    """A put that is synced here as number 12: its work, and the ticket of the copy that a peer is asked to make."""
    events = kept(me)
    (keep,) = of(KeepFrame, events)
    assert isinstance(keep, KeepFrame) and isinstance(keep.work, int)
    me.kept(keep.work, 12, 0.0)
    ((_, ticket),) = copied_to(events)
    return keep.work, ticket


def test_a_put_is_answered_when_all_copies_are_synced_and_the_plane_has_accepted() -> None:
    me = desk("a")
    events = kept(me)
    (keep,) = of(KeepFrame, events)
    ((name, ticket),) = copied_to(events)
    assert isinstance(keep, KeepFrame) and isinstance(keep.work, int)
    assert (name, me.kept(keep.work, 12, 0.1)) == ("a", [])
    facts = facts_of(me.on_copied(Copied(ticket=ticket, number=7), 0.2))
    assert (facts.group, facts.copies, facts.facts) == ("g", (("me", 12), ("a", 7)), b"facts")
    assert said(me.on_plane(Accepted(ticket=facts.ticket), 0.3)) == [Accepted(ticket=7)]
    assert me.num_puts == 0


def test_another_peer_is_chosen_when_one_cannot_or_does_not_answer() -> None:
    me = desk("a", "b", "c")
    ((first, ticket),) = copied_to(kept(me))
    ((second, _),) = copied_to(me.on_copied(Copied(ticket=ticket, error="its quota is full"), 0.1))
    assert second != first
    me._session.on_message(pulse("a", "b", "c", number=2), (), 4.0)
    assert [name for name, _ in copied_to(me.on_tick(4.2))] == [second]  # the same again: it is said to be up
    me._session.on_message(pulse(*{"a", "b", "c"} - {second}, number=3), (), 5.0)
    ((third, _),) = copied_to(me.on_tick(5.0))
    assert third not in (first, second)


def test_without_a_peer_nothing_is_kept_and_the_put_waits_with_names() -> None:
    me = desk("a")
    _, ticket = synced(me)
    ends = me.on_copied(Copied(ticket=ticket, error="full"), 0.1)
    assert of(ForgetNumbers, ends) == [ForgetNumbers((12,))]
    (answer,) = said(ends)
    assert isinstance(answer, Rejected)
    assert (answer.kind, answer.ticket) == ("Overloaded", 7)
    assert "2 copies are wanted" in answer.reason and "up: me, a; down: keeper z" in answer.reason


def test_copies_that_came_to_nothing_are_dropped_where_they_are() -> None:
    me = desk("a", "b", copies=3)
    events = kept(me)
    tickets = dict(copied_to(events))
    me.on_copied(Copied(ticket=tickets["a"], number=3), 0.0)
    ends = me.on_copied(Copied(ticket=tickets["b"], error="full"), 0.1)
    assert [(e.name, e.message) for e in ends if isinstance(e, ToPeer)] == [("a", DropCopies(numbers=(3,)))]
    (keep,) = of(KeepFrame, events)
    assert isinstance(keep, KeepFrame) and isinstance(keep.work, int)
    assert me.kept(keep.work, 12, 0.2) == [ForgetNumbers((12,))]  # synced after it was given up


def test_two_keepers_of_one_node_are_one_copy() -> None:
    me = desk(copies=3)
    twins = (peer("a", "n"), peer("b", "n"))
    me._session.on_message(KeeperPulse(epoch=1, number=2, peers=twins), (), 0.0)
    (answer,) = said(me.on_ask_room("p", AskRoom(ticket=7, run="", size=1), 0.0))
    assert isinstance(answer, Rejected) and "3 copies are wanted" in answer.reason


def test_a_plane_that_does_not_know_the_copies_any_more_has_them_kept_anew() -> None:
    me = desk("a")
    work, ticket = synced(me)
    facts = facts_of(me.on_copied(Copied(ticket=ticket, number=7), 0.0))
    again = me.on_plane(Missing(put=facts.ticket), 1.0)
    ((_, anew),) = copied_to(again)
    assert anew != ticket and of(KeepFrame, again)
    assert me.on_copied(Copied(ticket=ticket, number=7), 1.1) == []  # of the attempt before
    me.kept(work, 13, 1.1)
    second = facts_of(me.on_copied(Copied(ticket=anew, number=8), 1.2))
    assert (second.ticket, second.copies) == (facts.ticket, (("me", 13), ("a", 8)))


def test_a_group_that_is_put_twice_at_once_is_kept_once_and_other_content_is_a_conflict() -> None:
    me = desk("a")
    (check,) = me.on_put("p", PUT, [FRAME], 0.0)
    assert me.on_put("q", Put(ticket=9, group="g", digest=DIGEST), [FRAME], 0.0) == []
    (answer,) = said(me.on_put("r", Put(ticket=1, group="g", digest=b"\x01" * 16), [b"other"], 0.0))
    assert isinstance(answer, Rejected) and answer.kind == "Conflict"
    assert isinstance(check, CheckFrame)
    refused = said(me.refused(check.work, InvalidInput("bad")))
    assert [(message.ticket, message.kind) for message in refused if isinstance(message, Rejected)] == [
        (7, "InvalidInput"),
        (9, "InvalidInput"),
    ]


def test_a_trace_follows_a_put_under_way_and_misses_one_that_never_came() -> None:
    me = desk("a")
    trace = Trace(ticket=7, group="g", digest=DIGEST)
    assert said(me.on_trace("p", trace, [b""])) == [Missing(put=7)]
    me.on_put("p", PUT, [FRAME], 0.0)
    assert me.on_trace("p", trace, [b""]) == []
    (sign,) = said(me.on_trace("p", trace, ()))
    assert isinstance(sign, Pulse)


def test_room_is_asked_of_the_plane_under_a_ticket_of_its_own_and_the_quota_comes_first() -> None:
    disk = Disk()
    me = desk("a", quota=100, disk=disk)
    (ask,) = me.on_ask_room("p", AskRoom(ticket=7, run="x", size=60), 0.0)
    assert isinstance(ask, ToPlane) and isinstance(ask.message, AskRoom)
    assert said(me.on_plane(Room(ticket=ask.message.ticket), 0.1)) == [Room(ticket=7)]
    disk.num_bytes = 50
    (answer,) = said(me.on_ask_room("p", AskRoom(ticket=8, run="x", size=60), 0.0))
    assert isinstance(answer, Rejected) and "do not fit its quota of 100" in answer.reason


def test_a_plane_that_is_silent_too_long_ends_puts_and_keeps_what_it_may_have_accepted() -> None:
    me = desk("a")
    _, ticket = synced(me)
    facts = facts_of(me.on_copied(Copied(ticket=ticket, number=7), 0.0))
    assert facts_of(me.on_tick(1.5)) == facts  # said again
    ends = me.on_tick(10.5)
    (answer,) = said(ends)
    assert isinstance(answer, Rejected) and answer.kind == "PlaneLost"
    assert not of(ForgetNumbers, ends)


@pytest.mark.parametrize("before_joining", [True, False])
def test_nothing_is_taken_in_before_the_plane_has_taken_the_keeper_in(before_joining: bool) -> None:
    about = Enlist(name="me", node="me", url="tcp://me", key=b"", incarnation="1", last=0, life=1)
    session = KeeperSession(about, Disk(), timeouts=TIMES)
    session.start(0.0)
    me = PutDesk(session, name="me", used_bytes=lambda: 0, quota_bytes=None)
    asked = me.on_ask_room("p", AskRoom(ticket=7, run="", size=1), 0.0) if before_joining else []
    (answer,) = said(asked or me.on_put("p", PUT, [FRAME], 0.0))
    assert isinstance(answer, Rejected) and "has not joined its plane yet" in answer.reason
