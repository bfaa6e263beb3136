"""Phases of a session: the table that says what may follow, and bounds on what is remembered."""

from __future__ import annotations

import pytest

from penstock.protocol.coordinator import Coordinator
from penstock.protocol.effects import Send
from penstock.protocol.messages import Aborted, Bye, Fail, FromRank, Hello, Refused, Request
from penstock.protocol.session import TRANSITIONS, Happened, ImpossibleTransition, Phase, Session
from tests.protocol.session_world import TIMES, World
from tests.support.simulation import Simulation


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


@pytest.mark.deep
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
    (0, [NEW[0], _hello(1, 0, step=2), NEW[2]]),
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
