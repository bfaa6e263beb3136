"""Leases: numbered decisions that survive restarts, a clock that does not, and renewals while a process lives."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest

from penstock.errors import InvalidInput, PenstockError
from penstock.frames import encode
from penstock.log import HandOut, ReturnLeases
from penstock.plane.lease_book import RETURNED, Lease
from penstock.plane.leases import LeaseClock, Leases
from penstock.protocol import MAX_LEASES, GiveBack, Renew
from tests.support.groups import named_group
from tests.support.planes import OpenEngine


def hand_out(*keys: str, kind: str = "prompt", lease_s: float = 10.0) -> HandOut:
    return HandOut(kind=kind, keys=keys, worker="w", lease_s=lease_s)


def open_keys(leases: Leases) -> dict[int, str]:
    return {number: lease.key for number, lease in leases._book.open.items()}


def test_leases_are_numbered_and_survive_restarts_with_and_without_a_snapshot(
    open_engine: OpenEngine, tmp_path: Path
) -> None:
    for snapshot_every in (1, 1 << 30):
        folder = tmp_path / str(snapshot_every)
        engine = open_engine(folder, ranks=1, snapshot_every=snapshot_every)
        assert engine.recorder.decide_all([hand_out("a", "b"), hand_out("c")]) == [1, 3]
        for name in "xy":
            engine.put(name, name, encode(named_group(name)))
        engine.flush()
        engine.recorder.decide_all([ReturnLeases(leases=(2,)), hand_out("b")])
        engine.plan_step(1)
        engine.commit(1, 7)
        engine.recorder.decide_all([hand_out("d")])
        before, op = engine.state.leases.save(), engine.state.op
        assert (engine.log.snapshot() is not None) == (snapshot_every == 1)
        engine.close()
        engine.log.close()
        again = open_engine(folder, ranks=1, snapshot_every=snapshot_every)
        assert again.state.leases.save() == before
        assert again.state.op == op
        assert [(lease.key, lease.version) for lease in before] == [("a", 0), ("c", 0), ("b", 0), ("d", 7)]
        assert again.state.leases.number_of("prompt", "b") == before[2].number
        again.recorder.decide_all([hand_out("e")])
        assert again.state.leases.number_of("prompt", "e") == op + 1


def test_a_lease_that_is_not_renewed_returns_and_one_that_is_stays(open_engine: OpenEngine) -> None:
    leases = Leases(open_engine().recorder)
    leases.turn(0.0)
    leases.decide(hand_out("a", "b"), lambda _: None)
    leases.turn(0.0)
    now = 0.0
    while now < 25:
        now += 1.0
        leases.on_renew(Renew(ticket=1, leases=(1,)), now)
        leases.turn(now)
    assert open_keys(leases) == {1: "a"}
    assert leases._recorder.counts["leases_expired"] == 1
    assert leases.on_renew(Renew(ticket=1, leases=(1, 2, 9)), now).cancelled == (
        (2, RETURNED),
        (9, "ended: it ran out, or its work was completed"),
    )


def test_a_plane_that_was_away_gives_every_lease_its_full_time(open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine(tmp_path)
    leases = Leases(engine.recorder)
    leases.turn(0.0)
    leases.decide(hand_out("a"), lambda _: None)
    leases.turn(0.0)
    leases.turn(1000.0)  # suspended for a while: the process may live, and its messages are still unread
    assert open_keys(leases) == {1: "a"}
    engine.close()
    engine.log.close()
    again = Leases(open_engine(tmp_path).recorder)
    for now in range(5000, 5015):
        assert open_keys(again) == ({1: "a"} if now <= 5010 else {})
        again.turn(float(now))
    assert open_keys(again) == {}


def test_what_is_returned_is_decided_once_and_all_of_a_turn_in_one_transaction(open_engine: OpenEngine) -> None:
    leases = Leases(open_engine().recorder)
    answers: list[PenstockError | None] = []
    leases.decide(hand_out("a", "b", "c"), answers.append)
    leases.turn(0.0)
    commits = leases._recorder.log.commits
    leases.on_give_back(GiveBack(ticket=1, leases=(1, 1, 99)), answers.append)
    leases.on_give_back(GiveBack(ticket=2, leases=(1, 2), reason="broken"), answers.append)
    leases.on_give_back(GiveBack(ticket=3, leases=(-5, 2**63)), answers.append)
    leases.decide(hand_out("d"), answers.append)
    leases.turn(0.1)
    assert answers == [None] * 5
    assert leases._recorder.log.commits == commits + 1
    assert set(open_keys(leases).values()) == {"c", "d"}
    assert leases._book.why_ended(2) == "broken"


def test_too_many_leases_in_one_message_are_rejected(open_engine: OpenEngine) -> None:
    leases, many = Leases(open_engine().recorder), tuple(range(MAX_LEASES + 1))
    with pytest.raises(InvalidInput, match="1,025 leases; name at most 1,024"):
        leases.on_renew(Renew(ticket=1, leases=many), 0.0)
    with pytest.raises(InvalidInput, match="1,025 leases"):
        leases.on_give_back(GiveBack(ticket=1, leases=many), lambda _: None)
    with pytest.raises(InvalidInput, match="reason: 3,000 characters"):
        leases.on_give_back(GiveBack(ticket=1, leases=(1,), reason="x" * 3000), lambda _: None)


def test_the_clock_agrees_with_a_plain_list() -> None:
    rng = random.Random(5)
    for _ in range(200):
        clock, leases, due, now = LeaseClock(), dict[int, Lease](), dict[int, float](), 0.0
        clock.ran_out(leases, now)
        for number in range(60):
            now += rng.random()
            lease = Lease(number, "column", str(number), "w", rng.choice([0.5, 2.0, 7.0]), 0)
            if rng.random() < 0.5:
                leases[number] = lease
                clock.renew(lease, now)
                due[number] = now + lease.lease_s
            for known in rng.sample(sorted(leases), min(2, len(leases))):
                if rng.random() < 0.5:
                    clock.renew(leases[known], now)
                    due[known] = now + leases[known].lease_s
                elif rng.random() < 0.3:
                    del leases[known], due[known]
            found = clock.ran_out(leases, now)
            assert sorted(found) == sorted(number for number, at in due.items() if at <= now)
            for known in found:
                if rng.random() < 0.8:  # else its return could not be written: it comes up again
                    del leases[known], due[known]
        assert len(clock._heap) == len(clock._due)


def test_work_that_kills_its_processes_is_named_in_the_log(
    open_engine: OpenEngine, caplog: pytest.LogCaptureFixture
) -> None:
    leases, now = Leases(open_engine().recorder), 0.0
    leases.turn(now)
    for _ in range(3):
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        leases.decide(hand_out("bad", lease_s=1.0), lambda _: None)
        leases.turn(now)
        now += 1.5
        leases.turn(now)
    (record,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
    assert "the lease on 'bad' ran out 3 times" in record.getMessage()
