"""What the plane believes of its keepers: which facts count, which messages are too old, who is gone."""

from __future__ import annotations

import msgspec
import pytest

from penstock.send.copies import numbers_of, numbers_to_bytes
from penstock.send.effects import Send
from penstock.send.keeper_messages import Enlist, Enlisted, KeeperBeat, KeeperPulse
from penstock.send.messages import Refused, Unknown
from penstock.send.roster import Roster
from penstock.send.timeouts import Timeouts

TIMES = Timeouts(heartbeat_s=1.0, peer_s=4.0, keeper_s=20.0)
TERMS = Enlisted(epoch=1, copies=1, is_shared=False, seq_len=64, max_tokens=1, max_bytes=1, max_samples=1)


def roster(*, copies: int = 1, is_shared: bool = False) -> Roster:
    found = Roster(msgspec.structs.replace(TERMS, copies=copies, is_shared=is_shared), TIMES)
    found.tick(0.0)
    return found


def enlist(
    keepers: Roster,
    has: tuple[int, ...] = (),
    *,
    now: float = 0.0,
    name: str = "a.1",
    node: str = "a",
    life: int = 1,
    number: int = 1,
    last: int | None = None,
) -> list[Send]:
    """As a process of the keeper does it, with the numbers it has."""
    message = Enlist(
        name=name,
        node=node,
        url=f"tcp://{node}:{life}",
        key=b"",
        incarnation=f"{name}-{life}",
        last=max(has, default=0) if last is None else last,
        life=life,
        number=number,
    )
    return keepers.on_enlist(f"peer-{name}-{life}", message, [numbers_to_bytes(has)], now)


def beat(keepers: Roster, now: float, *, life: int = 1, forgot: int = 0) -> Send:
    message = KeeperBeat(incarnation=f"a.1-{life}", number=1, num_bytes=0, num_groups=0, forgot=forgot)
    (answer,) = keepers.on_beat(f"peer-a.1-{life}", message, now)
    return answer


def told_to_forget(sent: list[Send]) -> list[int]:
    (send,) = sent
    assert isinstance(send.message, Enlisted)
    return numbers_of(send.frames)


# ------------------------------------------------------------------ facts that count


def test_facts_of_a_number_from_before_its_keeper_enlisted_do_not_count() -> None:
    """That frame was perhaps just forgotten."""
    keepers = roster()
    assert told_to_forget(enlist(keepers, (1, 2), last=3)) == [1, 2]
    assert "number 3 of keeper a.1 is from before it enlisted" in keepers.fault_of([("a.1", 3)])
    assert keepers.fault_of([("a.1", 4)]) == ""


def test_facts_that_were_refused_once_do_not_count_when_they_come_again() -> None:
    """Their keeper was told to forget the frame, or will be: a second message of the same put must not be accepted."""
    keepers = roster()
    enlist(keepers)
    assert keepers.fault_of([("a.1", 1)]) == ""
    keepers.refuse([("a.1", 1)])
    assert keepers.fault_of([("a.1", 1)]) == "number 1 of keeper a.1 was refused before"
    assert keepers.fault_of([("a.1", 2)]) == ""
    pulse = beat(keepers, 1.0).message
    assert isinstance(pulse, KeeperPulse) and numbers_of([pulse.forget]) == [1]
    beat(keepers, 2.0, forgot=pulse.batch)  # it has forgotten it: the facts count even less
    assert keepers.fault_of([("a.1", 1)]) == "number 1 of keeper a.1 was refused before"


def test_a_copy_that_the_log_names_is_not_refused_by_facts_that_come_again() -> None:
    keepers = roster()
    enlist(keepers)
    keepers.add("a.1#1")
    keepers.refuse([("a.1", 1)])
    pulse = beat(keepers, 1.0).message
    assert isinstance(pulse, KeeperPulse) and numbers_of([pulse.forget]) == []
    assert keepers.missing("a.1#1") == ""


def test_a_keeper_that_enlists_anew_begins_with_no_number_refused() -> None:
    """Numbers from before do not count anyway; those that follow are new."""
    keepers = roster()
    enlist(keepers)
    keepers.refuse([("a.1", 1)])
    enlist(keepers, number=2, last=1)
    assert "from before it enlisted" in keepers.fault_of([("a.1", 1)])
    assert keepers.fault_of([("a.1", 2)]) == ""


def test_two_copies_on_one_node_are_not_two() -> None:
    keepers = roster(copies=2)
    enlist(keepers)
    enlist(keepers, name="a.2")
    assert keepers.fault_of([("a.1", 1), ("a.2", 1)]) == "kept on 1 nodes, 2 are wanted"
    enlist(keepers, name="b.1", node="b")
    assert keepers.fault_of([("a.1", 1), ("b.1", 1)]) == ""


# ------------------------------------------------------------------ messages that are too old


def test_an_enlist_that_comes_late_changes_nothing() -> None:
    """It names fewer frames than the keeper has by now: what is missing in it is not damaged, and a lower `last` would
    let old facts count again."""
    keepers = roster()
    enlist(keepers, (1,), number=1)
    enlist(keepers, (1, 2, 3), number=2)
    keepers.add("a.1#2")
    keepers.has_news = False
    assert enlist(keepers, (1,), number=1, last=2) == []
    assert not keepers.has_news
    assert keepers.lost("a.1#2") == keepers.missing("a.1#2") == ""
    assert "from before it enlisted" in keepers.fault_of([("a.1", 3)])


def test_an_enlist_that_comes_twice_is_answered_twice() -> None:
    """The first answer may have been lost."""
    keepers = roster()
    assert told_to_forget(enlist(keepers, (1,))) == told_to_forget(enlist(keepers, (1,))) == [1]


def test_a_process_whose_folder_another_one_has_opened_is_refused_in_words() -> None:
    keepers = roster()
    enlist(keepers, (1,), node="a", life=1)
    enlist(keepers, (1, 2), node="b", life=2)
    keepers.add("a.1#2")
    assert isinstance(beat(keepers, 1.0, life=1).message, Unknown)
    (send,) = enlist(keepers, (1,), node="a", life=1, number=9)
    assert isinstance(send.message, Refused)
    assert send.message.reason == "keeper a.1: another process has opened its folder since; end this one"
    (at,) = keepers.addresses(["a.1"])
    assert at.node == "b" and at.up
    assert keepers.lost("a.1#2") == ""


# ------------------------------------------------------------------ who is gone


def silent_for(keepers: Roster, seconds: int) -> None:
    for second in range(1, seconds + 1):
        keepers.tick(float(second))


@pytest.mark.parametrize("is_shared", [False, True])
def test_what_a_silent_keeper_had_is_lost_after_a_time_unless_its_folder_is_shared(is_shared: bool) -> None:
    keepers = roster(is_shared=is_shared)
    enlist(keepers)
    keepers.add("a.1#1")
    silent_for(keepers, 19)
    assert keepers.lost("a.1#1") == ""
    silent_for(keepers, 1000)
    assert keepers.lost("a.1#1") == ("" if is_shared else "keeper a.1: gone for 1000.0 s")
    how = "; its folder is shared: start `penstock keep` on it, on any node" if is_shared else ""
    assert keepers.missing("a.1#1") == f"keeper a.1 (silent for 1000.0 s{how})"


def test_a_shared_folder_that_is_served_again_has_what_it_had_but_for_what_is_damaged() -> None:
    keepers = roster(is_shared=True)
    enlist(keepers)
    keepers.add("a.1#1")
    keepers.add("a.1#2")
    silent_for(keepers, 100)
    enlist(keepers, (1,), now=101.0, node="b", life=2, last=2)
    assert keepers.missing("a.1#1") == ""
    assert keepers.lost("a.1#2") == "keeper a.1: its frame is damaged or gone"


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_keeper_that_had_nothing_is_no_more_when_it_is_silent(is_shared: bool) -> None:
    keepers = roster(is_shared=is_shared)
    enlist(keepers)
    silent_for(keepers, 30)
    assert keepers.fault_of([("a.1", 1)]) == "keeper a.1 has not enlisted"
