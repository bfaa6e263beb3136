"""Both sides of the protocol against each other, without a network: who hears what, and when."""

from __future__ import annotations

from collections import deque

import pytest

from penstock.errors import PenstockError
from penstock.send.coordinator import Coordinator
from penstock.send.effects import Effect, MemberLeft, Send, StepCommitted
from penstock.send.members import Place
from penstock.send.message_header import pack_message, read_from_client, read_from_plane
from penstock.send.messages import (
    Aborted,
    Attach,
    Attached,
    Bye,
    Fail,
    Frames,
    FromClient,
    FromPlane,
    FromRank,
    Hello,
    Refused,
    Request,
)
from penstock.send.rank_session import Arrived, Event, RankSession, Released
from penstock.send.retry import Failed, Out
from penstock.send.session import TRANSITIONS, Happened, ImpossibleTransition, Phase, Session
from penstock.send.steps import Staged
from penstock.send.timeouts import Timeouts
from penstock.testing.simulation import Simulation

TIMES = Timeouts(heartbeat_s=0.2, peer_s=1.0, delivery_s=3.0, plane_s=5.0, resend_s=0.2)


class Rank:
    """A rank session, and what came of it."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.name = world, f"rank{rank}"
        self.rank_session = RankSession(
            run="r", rank=rank, world=world.ranks, step=1, incarnation=self.name, timeouts=TIMES
        )
        self.arrived: list[int] = []
        self.fills = True
        """Whether it acknowledges what arrives at once."""
        self.released: list[int] = []
        self.error: PenstockError | None = None
        self.do(self.rank_session.start(world.now))

    def do(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Out):
                self.world.up.append((self.name, event.message))
            elif isinstance(event, Arrived):
                self.arrived.append(event.deliver.step)
                if self.fills:
                    self.do(self.rank_session.received(event.deliver.step, event.deliver.digest, self.world.now))
            elif isinstance(event, Released):
                self.released.append(event.step)
            elif isinstance(event, Failed):
                self.error = event.error


class World:
    """A coordinator and ranks. Messages arrive at once, in order, unless a test holds them."""

    def __init__(self, ranks: int = 2) -> None:
        self.now, self.ranks, self.epoch = 100.0, ranks, 0
        self.up: deque[tuple[object, FromClient]] = deque()
        self.down: deque[tuple[object, FromPlane, Frames]] = deque()
        self.left: dict[Place, int] = {}
        self.session, self.next_step, self.last_step = 0, 1, 0
        self.cut: set[object] = set()
        """Who is not reached by the plane."""
        self.held: list[tuple[object, FromPlane, Frames]] = []
        """Payloads, and what follows them, on a slow link."""
        self.slow: set[object] = set()
        self.start_plane()
        self.members = [Rank(self, rank) for rank in range(ranks)]
        self.settle()

    def start_plane(self) -> None:
        self.epoch += 1
        self.plane = Coordinator(
            run="r",
            ranks=self.ranks,
            epoch=self.epoch,
            session=self.session,
            next_step=self.next_step,
            last_step=self.last_step,
            left=self.left,
            timeouts=TIMES,
        )

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self.down.append((effect.peer, effect.message, effect.frames))
            elif isinstance(effect, MemberLeft):
                self.left[effect.rank, effect.replica] = effect.step
            elif isinstance(effect, StepCommitted):
                self.next_step = effect.step + 1
                self.do(self.plane.committed(effect.session, effect.step))

    def settle(self) -> None:
        """Until nobody has anything to say."""
        while self.up or self.down:
            if self.up:
                peer, message = self.up.popleft()
                said = read_from_client(pack_message(message))
                if isinstance(said, Attach):
                    attached = Attached(ticket=0, run_id=bytes(range(16)), run="r", epoch=self.epoch, ranks=self.ranks)
                    self.down.append((peer, attached, ()))
                    continue
                self.do(self.plane.on_message(peer, said, self.now))  # type: ignore[arg-type]
                self.session = self.plane.session
                continue
            to, answer, frames = self.down.popleft()
            if to in self.slow and frames:
                self.held.append((to, answer, frames))
            elif to not in self.cut:
                self.hand_over(to, answer, frames)

    def hand_over(self, to: object, answer: FromPlane, frames: Frames) -> None:
        rank = next(member for member in self.members if member.name == to)
        rank.do(rank.rank_session.on_message(read_from_plane(pack_message(answer)), frames, self.now))

    def stage(self, step: int) -> None:
        self.last_step = step
        frames = [[b"payload"] for _ in range(self.ranks)]
        plans = [b"plan"] * self.ranks
        staged = Staged(step=step, plans=plans, payloads=list(frames), digests=[f"{step}"] * self.ranks)
        self.do(self.plane.stage(staged, self.now))
        self.settle()

    def take(self, step: int) -> None:
        """Every rank asks for a step, and gets it."""
        for member in self.members:
            member.do(member.rank_session.request(step, self.now))
        self.settle()
        self.stage(step)

    def commit(self, rank: int, step: int) -> None:
        self.members[rank].do(self.members[rank].rank_session.commit(step, None, self.now))
        self.settle()

    def leave(self, rank: int) -> None:
        self.members[rank].do(self.members[rank].rank_session.leave())
        self.settle()

    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += 0.05
            for member in self.members:
                member.do(member.rank_session.on_tick(self.now))
            self.do(self.plane.on_tick(self.now))
            self.settle()


# ------------------------------------------------------------------ leaving


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


# ------------------------------------------------------------------ failing early


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


# ------------------------------------------------------------------ one way only


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


# ------------------------------------------------------------------ slow links


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


# ------------------------------------------------------------------ the table


def test_what_is_not_in_the_table_of_phases_cannot_happen() -> None:
    session = Session(run="r", ranks=1, epoch=1, number=1, next_step=1, last_step=0)
    for phase in Phase:
        for happened in Happened:
            session.phase = phase
            if (phase, happened) in TRANSITIONS:
                session.on(happened)
                assert session.phase is TRANSITIONS[phase, happened]
            else:
                with pytest.raises(ImpossibleTransition, match=f"{happened.value!r} while {phase.name}"):
                    session.on(happened)


def test_every_arrow_of_the_table_is_taken_by_some_run(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: set[tuple[Phase, Happened]] = set()
    go = Session.on

    def watched(self: Session, happened: Happened) -> None:
        taken.add((self.phase, happened))
        go(self, happened)

    monkeypatch.setattr(Session, "on", watched)
    for seed in range(60):
        Simulation(seed).run()
    for session, script in RARE:
        _act(Coordinator(run="r", ranks=3, epoch=2, session=session, timeouts=TIMES), script)
    assert set(TRANSITIONS) - taken == set()


def _hello(rank: int, session: int, step: int = 1) -> Hello:
    name = f"{rank} of {session}"
    return Hello(run="r", rank=rank, world=3, replica=0, replicas=1, incarnation=name, session=session, step=step)


FAR, BYE, FAIL = Request(session=0, step=99), Bye(session=0), Fail(session=0, step=1, reason="x")
NEW, OLD = [_hello(rank, 0) for rank in range(3)], [_hello(rank, 4) for rank in range(3)]
RARE: list[tuple[int, list[FromRank | float]]] = [
    (0, [NEW[0], 2.0]),
    (0, [NEW[0], BYE]),
    (0, [NEW[0], FAIL]),
    (0, [NEW[0], _hello(1, 0, step=2)]),
    (0, [NEW[0], NEW[1], BYE]),
    (0, [*NEW, FAR]),
    (4, [OLD[0], FAIL]),
    (4, [OLD[0], FAR]),
    (4, [OLD[0], OLD[1], BYE]),
    (4, [OLD[0], BYE]),
    (4, [OLD[0], NEW[1]]),
    (4, [OLD[0], 2.0]),
    (4, [NEW[0]]),
]
"""What seldom happens in a simulation: the session that an earlier plane served, and what is said then; a number is a
time that passes. What is not a hello is said by the process that spoke last."""


def _act(plane: Coordinator, script: list[FromRank | float]) -> None:
    peer, now = "", 0.0
    for act in script:
        if isinstance(act, float):
            for _ in range(int(act / 0.1)):
                now += 0.1
                plane.on_tick(now)
        else:
            peer = act.incarnation if isinstance(act, Hello) else peer
            plane.on_message(peer, act, now)


def test_a_request_far_ahead_ends_the_session_for_all() -> None:
    world = World()
    world.up.append(("rank1", Request(session=1, step=99)))
    world.settle()
    assert {str(member.error) for member in world.members} == {
        "step 99: rank 1: asks for step 99; the last one planned is 0"
    }


# ------------------------------------------------------------------ bounds


def test_what_is_remembered_of_ended_sessions_is_bounded_in_bytes() -> None:
    plane = Coordinator(run="r", ranks=1, epoch=1, timeouts=TIMES)
    for number in range(3000):
        hello = Hello(run="r", rank=0, world=1, replica=0, replicas=1, incarnation=f"{number:0200d}", session=0, step=1)
        plane.on_message(number, hello, 0.0)
        plane.fail("x" * 100_000)
    assert plane._tombstones.num_bytes <= 1 << 20
    again = plane.on_message("again", hello, 0.0)  # the last one is remembered
    assert isinstance(again[0], Send)
    assert isinstance(again[0].message, Aborted)


@pytest.mark.parametrize("field", ["run", "incarnation"])
def test_a_hello_with_a_name_of_megabytes_is_refused_and_not_kept(field: str) -> None:
    plane = Coordinator(run="r", ranks=1, epoch=1, timeouts=TIMES)
    name = "x" * (4 << 20)
    run, incarnation = (name, "i") if field == "run" else ("r", name)
    hello = Hello(run=run, rank=0, world=1, replica=0, replicas=1, incarnation=incarnation, session=0, step=1)
    [answer] = plane.on_message("peer", hello, 0.0)
    assert isinstance(answer, Send)
    assert isinstance(answer.message, Refused)
    assert f"{field}: 4,194,304 characters" in answer.message.reason
    assert len(answer.message.reason) < 200
    assert plane.session == 0
