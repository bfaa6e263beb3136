"""Both sides of the protocol against each other, without a network: who hears what, and when."""

from __future__ import annotations

from random import Random

import pytest

from penstock.protocol.messages import Beat, Frames
from penstock.protocol.session import Phase
from penstock.protocol.steps import Staged
from tests.protocol.session_world import TIMES, Rank, World


def test_a_plane_that_restarts_does_not_wait_for_who_left() -> None:
    world = World()
    world.take(1)
    world.commit(1, 1)
    world.leave(1)
    world.start_plane()
    world.pass_time(TIMES.heartbeat_s * 2)
    stays = world.members[0]
    assert (stays.error, stays.rank_session.left) == (None, 1)
    world.commit(0, 1)  # what the other one had trained counts
    assert world.next_step == 2
    assert stays.rank_session.uncommitted == []
    world.pass_time(TIMES.peer_s * 3)
    assert stays.error is None


def test_a_step_that_one_received_and_left_is_not_given_to_the_others() -> None:
    world = World()
    world.take(1)
    for rank in (0, 1):
        world.commit(rank, 1)
    world.slow.add("rank0")
    world.take(2)  # rank 1 has it, rank 0 has not
    world.leave(1)
    for parcel in world.held:
        world.hand_over(*parcel)
    world.settle()
    world.pass_time(TIMES.heartbeat_s * 2)
    stays = world.members[0]
    assert (stays.arrived, stays.released, stays.rank_session.left) == ([1, 2], [1], 1)


def test_an_old_hello_of_who_left_does_not_bring_it_back() -> None:
    world = World()
    world.take(1)
    again = world.members[1].rank_session._say_hello(world.now)
    world.leave(1)
    world.start_plane()
    world.members[1].do(again)
    world.pass_time(TIMES.peer_s * 3)
    assert world.members[0].error is None


def test_who_leaves_before_all_have_joined_ends_the_wait_of_the_others() -> None:
    world = World(3)
    first, second, third = world.members
    world.start_plane()  # knows nobody; two say hello again, the third does not
    world.members = [Rank(world, 0), Rank(world, 1)]
    world.settle()
    world.leave(1)
    assert str(world.members[0].error) == "step 1: rank 1: left before all had joined"
    assert (first.error, second.error, third.error) == (None, None, None)


def one_waits_and_one_has_said_hello() -> tuple[World, Rank]:
    """Rank 0 has an answer of the plane and waits; rank 1, given, has none yet; a third never comes."""
    world = World(3)
    world.start_plane()
    world.members = [Rank(world, 0)]
    world.settle()
    early = Rank(world, 1)
    world.members.append(early)
    return world, early


def test_a_failure_before_the_first_answer_reaches_all() -> None:
    world, early = one_waits_and_one_has_said_hello()
    early.do(early.rank_session.fail(1, "no GPU", world.now))  # it has not heard of a session yet
    early.do(early.rank_session.leave())
    world.settle()
    assert str(world.members[0].error) == "step 1: rank 1: no GPU"


def test_a_failure_whose_hello_was_lost_reaches_all() -> None:
    world, early = one_waits_and_one_has_said_hello()
    world.up.clear()
    early.do(early.rank_session.fail(1, "no GPU", world.now))
    world.pass_time(2 * TIMES.resend_s)
    assert str(world.members[0].error) == str(early.error) == "step 1: rank 1: no GPU"


def test_a_rank_the_plane_cannot_reach_is_noticed_though_it_is_heard() -> None:
    world = World()
    world.take(1)
    world.pass_time(1.0)
    world.cut.add("rank1")
    began = world.now
    while world.members[0].error is None:
        world.pass_time(0.05)
    assert world.now - began < TIMES.peer_s + 4 * TIMES.heartbeat_s
    assert "rank 1: has not heard the plane for" in str(world.members[0].error)


def test_a_plane_that_stood_still_blames_nobody() -> None:
    world = World()
    world.take(1)
    world.pass_time(1.0)
    for _ in range(60):  # three seconds in which ranks speak and nobody answers
        world.now += 0.05
        for member in world.members:
            member.do(member.rank_session.on_tick(world.now))
    world.settle()
    world.pass_time(2.0)
    assert [member.error for member in world.members] == [None, None]


def test_a_step_on_a_slow_link_is_sent_once() -> None:
    world = World()
    world.slow.add("rank1")
    world.take(1)
    world.pass_time(2.0)
    assert sum(bool(frames[0]) for _, _, frames in world.held) == 1
    for parcel in world.held:
        world.hand_over(*parcel)
    world.settle()
    assert [member.released for member in world.members] == [[1], [1]]


def test_a_rank_that_fills_longer_than_a_delivery_may_take_is_not_late() -> None:
    world = World()
    slow = world.members[1]
    slow.fills = False
    world.take(1)
    world.pass_time(3 * TIMES.delivery_s)
    assert [member.error for member in world.members] == [None, None]
    assert slow.arrived == [1] and not slow.released
    assert world.members[0].rank_session.waiting_for == "rank 1 to fill step 1"
    slow.do(slow.rank_session.received(1, "1", world.now))
    world.settle()
    assert [member.released for member in world.members] == [[1], [1]]


@pytest.mark.parametrize("trouble", ["stopped", "altered"])
def test_a_rank_that_fills_no_more_is_late_or_silent(trouble: str) -> None:
    world = World()
    slow = world.members[1]
    slow.fills = False
    world.take(1)
    world.pass_time(TIMES.delivery_s)
    if trouble == "stopped":
        world.members.remove(slow)
        world.cut.add(slow.name)
        world.pass_time(TIMES.peer_s + TIMES.heartbeat_s)
        assert "rank 1: silent for" in str(world.members[0].error)
        return
    world.slow.add(slow.name)  # what it is sent again does not come
    slow.do(slow.rank_session.altered(1, world.now))
    world.settle()
    world.pass_time(TIMES.delivery_s + TIMES.heartbeat_s)
    assert "rank 1: did not acknowledge step 1" in str(world.members[0].error)


def test_a_step_that_is_lost_is_asked_for_as_soon_as_that_is_known() -> None:
    world = World()
    world.slow.add("rank1")
    world.take(1)
    for copies in (1, 2):
        world.held.clear()  # a connection broke
        world.pass_time(TIMES.resend_s * 1.5)
        assert [getattr(answer, "copies", 0) for _, answer, _ in world.held][:1] == [copies]
        for parcel in list(world.held):
            world.hand_over(*parcel)  # what follows it says so
        world.settle()
        assert sum(bool(frames[0]) for _, _, frames in world.held) == 1
        world.held = [parcel for parcel in world.held if parcel[2][0]]
    world.hand_over(*world.held[0])
    world.settle()
    assert [member.released for member in world.members] == [[1], [1]]


def test_samples_that_were_sent_to_a_rank_that_cannot_read_storage_and_lost_are_sent_again() -> None:
    world = World()
    rank = world.members[1]
    rank.fills = False
    world.plane._members[1, 0].direct = True
    world.take(1)
    assert rank.arrived == [1]
    world.cut.add("rank1")  # what the plane sends from now on is lost
    rank.do(rank.rank_session.damaged(1, "g", "not on this mount", world.now))
    world.settle()
    assert world.plane.serve_inline(world.plane.session, (1, 0)) == "rank 1"
    world.stage(1)
    world.cut.clear()
    rank.fills = True
    world.pass_time(1.0)
    assert rank.arrived == [1, 1]
    assert [member.released for member in world.members] == [[1], [1]]


# ------------------------------------------------------------------ killed while the session forms


def phase(world: World) -> Phase:
    return world.plane.phase


def forming(ranks: int, joined: int, *, step: int = 1) -> World:
    """Some ranks of a trainer have joined; then all of it is killed."""
    world = World(ranks)
    world.session = 0
    world.start_plane()
    world.members = [Rank(world, rank, step=step) for rank in range(joined)]
    world.settle()
    world.cut |= {member.name for member in world.members}
    world.members = []
    world.now += 0.05
    return world


@pytest.mark.parametrize(("ranks", "joined"), [(2, 1), (8, 4), (64, 63)])
def test_a_trainer_that_restarts_while_its_session_forms_never_meets_its_dead_self(ranks: int, joined: int) -> None:
    for seed in range(20):
        rng, world = Random(seed), forming(ranks, joined)
        order = list(range(ranks))
        rng.shuffle(order)
        for rank in order:  # within `peer_s`: those of the first life still count as joined
            world.now += rng.random() * TIMES.peer_s / ranks / 2
            world.members.append(Rank(world, rank, life="b"))
            world.settle()
        world.pass_time(TIMES.heartbeat_s * 2)
        assert [str(member.error) for member in world.members if member.error] == []
        assert phase(world) is Phase.RUNNING
        world.take(1)
        assert all(member.released == [1] for member in world.members)


def test_a_slow_restart_does_not_fail_because_of_the_dead() -> None:
    world = forming(2, 1)
    world.members = [Rank(world, 1, life="b")]  # both places are taken, one of them by a dead process
    world.settle()
    assert phase(world) is Phase.FORMING
    world.pass_time(TIMES.peer_s * 3)
    assert world.members[0].error is None
    world.members.append(Rank(world, 0, life="b"))
    world.settle()
    assert phase(world) is Phase.RUNNING


def test_the_dead_do_not_decide_where_a_restarted_trainer_resumes() -> None:
    world = forming(2, 1, step=5)
    for rank in (1, 0):
        world.members.append(Rank(world, rank, life="b", step=1))
        world.settle()
    world.pass_time(TIMES.heartbeat_s * 2)
    assert [member.error for member in world.members] == [None, None]
    assert phase(world) is Phase.RUNNING


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_trainer_is_refused_while_the_first_one_lives(ranks: int) -> None:
    world = World(ranks)  # with one rank the session runs, with the second one missing it forms
    world.session = 0
    world.start_plane()
    first = Rank(world, 0)
    world.members = [first]
    world.settle()
    second = Rank(world, 0, life="b")
    world.members.append(second)
    world.settle()
    assert "another process already joined as rank 0; stop one of the two" in str(second.error)
    world.pass_time(TIMES.peer_s * 2)
    assert first.error is None
    assert phase(world) is (Phase.RUNNING if ranks == 1 else Phase.FORMING)


def test_a_process_that_answers_no_probe_is_replaced_after_two_heartbeats() -> None:
    world = World(2)
    dead = world.members.pop(0)
    world.cut.add(dead.name)
    again = Rank(world, 0, life="b")
    world.members.append(again)
    world.settle()
    assert phase(world) is Phase.RUNNING
    # A beat of the dead process that was still on its way proves nothing: it was sent before the probe.
    world.do(world.plane.on_message(dead.name, Beat(session=world.session, number=99), world.now))
    world.settle()
    world.pass_time(TIMES.heartbeat_s * 2.2)
    assert "joined as this rank: it restarted" in str(world.members[0].error)
    assert again.error is None
    assert phase(world) is Phase.FORMING


def test_a_process_that_is_known_to_have_ended_is_replaced_at_once() -> None:
    world = World(1)
    world.cut.add(world.members.pop().name)
    world.gone = True
    again = Rank(world, 0, life="b")
    world.members.append(again)
    world.settle()
    assert phase(world) is Phase.RUNNING and again.error is None


def test_who_waited_for_a_place_does_not_take_it_from_another_that_lives() -> None:
    world = World(1)
    first = world.members[0]
    world.cut.add(first.name)  # it does not hear the probe
    waiting = Rank(world, 0, life="b")
    world.members.append(waiting)
    world.settle()
    world.leave(0)
    third = Rank(world, 0, life="c")
    world.members = [third, waiting]
    world.settle()
    world.pass_time(TIMES.heartbeat_s * 4)
    assert third.error is None and phase(world) is Phase.RUNNING
    assert "already joined as rank 0" in str(waiting.error)


def test_who_leaves_while_it_waits_for_a_place_does_not_get_it() -> None:
    world = World(1)
    world.cut.add(world.members[0].name)
    waiting = Rank(world, 0, life="b")
    world.members.append(waiting)
    world.settle()
    session = world.session
    world.leave(1)
    world.pass_time(TIMES.heartbeat_s * 3)
    assert world.session == session and phase(world) is Phase.RUNNING


def test_a_step_that_is_staged_rank_by_rank_reaches_each_rank_once() -> None:
    world = World(3)
    for member in world.members:
        member.do(member.rank_session.request(1, world.now))
    world.settle()
    payloads: list[Frames | None] = [None, None, None]
    for rank in (1, 0, 2):
        payloads[rank] = (b"payload",)
        staged = Staged(step=1, plans=[b"plan"] * 3, payloads=list(payloads), digests=["d"] * 3)
        assert not world.plane.is_staged(1)
        world.do(world.plane.stage(staged, world.now))
        world.settle()
        assert [len(member.released) for member in world.members] == ([1] * 3 if rank == 2 else [0] * 3)
    assert [member.arrived for member in world.members] == [[1], [1], [1]]
    assert world.plane.is_staged(1)
