"""What the plane decides, and that a plane that was killed decides the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.arrays import Sample
from penstock.errors import Conflict, CorruptFrame, DiskFull, InvalidInput, Overloaded
from penstock.frames import encode
from penstock.plane.settings import Replay, Target
from penstock.protocol.steps import Staged
from penstock.replay import Fifo, SamplesPerInsert, Uniform
from tests.support.engines import DirectEngine, damage_frame
from tests.support.groups import named_group
from tests.support.planes import OpenEngine, sqlite_of


def put(engine: DirectEngine, *names: str, **group: Any) -> None:
    """Put groups, which must all be accepted."""
    for name in names:
        assert engine.put(name, name, encode(named_group(name, **group))) is None
    assert [(o.ticket, o.error) for o in engine.flush()] == [(name, None) for name in names]


def plan(engine: DirectEngine) -> Staged:
    staged = engine.plan_step(engine.last_step + 1)
    assert isinstance(staged, Staged), staged
    return staged


def train(engine: DirectEngine, version: int | None = None) -> Staged:
    """Plan, deliver and commit a step."""
    staged = plan(engine)
    engine.received(staged.step)
    engine.commit(staged.step, version)
    return staged


# ------------------------------------------------------------------ groups in


def test_a_group_put_again_is_accepted_and_held_once(open_engine: OpenEngine) -> None:
    engine = open_engine()
    put(engine, "a")
    again = engine.put("t", "a", encode(named_group("a")))
    assert again is not None
    assert (again.error, again.duplicate) == (None, True)
    assert engine.ledger.accepted == engine.ledger.held == 2


def test_a_group_put_twice_before_it_is_written_is_acknowledged_only_then(open_engine: OpenEngine) -> None:
    engine = open_engine()
    frame = encode(named_group("a"))
    assert engine.put(1, "a", frame) is None
    assert engine.put(2, "a", frame) is None
    assert [(o.ticket, o.error, o.duplicate) for o in engine.flush()] == [(1, None, False), (2, None, True)]
    assert engine.ledger.accepted == 2


@pytest.mark.parametrize("flushed", [True, False])
def test_the_same_id_with_other_content_is_a_conflict(open_engine: OpenEngine, flushed: bool) -> None:
    engine = open_engine()
    engine.put(1, "a", encode(named_group("a")))
    if flushed:
        engine.flush()
    outcome = engine.put(2, "a", encode(named_group("a", tokens=8)))
    assert outcome is not None
    assert isinstance(outcome.error, Conflict)
    engine.flush()
    assert engine.ledger.accepted == 2


def test_a_group_is_known_for_as_long_as_the_run_lives(open_engine: OpenEngine) -> None:
    engine = open_engine(retain_steps=0)
    for i in range(6):
        put(engine, f"g{i}")
    for _ in range(3):
        train(engine)
    outcome = engine.put(1, "g0", encode(named_group("g0")))
    assert outcome is not None
    assert outcome.duplicate


@pytest.mark.parametrize(
    ("name", "frame", "error"),
    [
        ("a", b"", CorruptFrame),
        ("a", b"junk" * 50, CorruptFrame),
        ("a", encode(named_group("b")), InvalidInput),
        ("", encode(named_group("a")), InvalidInput),
        ("a", encode([]), InvalidInput),
        ("a", encode([*named_group("a"), *named_group("a")]), InvalidInput),
    ],
    ids=["empty", "junk", "other group", "no name", "no samples", "same sample twice"],
)
def test_what_is_no_group_is_refused(open_engine: OpenEngine, name: str, frame: bytes, error: type) -> None:
    engine = open_engine()
    outcome = engine.put(1, name, frame)
    assert outcome is not None
    assert isinstance(outcome.error, error)
    assert engine.flush() == []
    assert engine.ledger.accepted == 0


def test_beyond_the_bytes_that_may_wait_puts_are_refused_until_a_step_is_committed(open_engine: OpenEngine) -> None:
    size = len(encode(named_group("g0")))
    engine = open_engine(max_held_bytes=4 * size + size // 2)
    put(engine, "g0", "g1", "g2", "g3")
    outcome = engine.put(1, "g4", encode(named_group("g4")))
    assert outcome is not None
    assert isinstance(outcome.error, Overloaded)
    assert outcome.error.retry_after_s > 0
    assert engine.held_bytes <= engine.settings.max_held_bytes
    plan(engine)
    assert isinstance(engine.put(1, "g4", encode(named_group("g4"))).error, Overloaded)  # type: ignore[union-attr]
    engine.commit(1, None)
    put(engine, "g4", "g5")
    assert engine.held_bytes <= engine.settings.max_held_bytes


def test_a_group_that_can_never_fit_is_an_error_and_not_a_wait(open_engine: OpenEngine) -> None:
    outcome = open_engine(max_held_bytes=100).put(1, "a", encode(named_group("a", tokens=64)))
    assert outcome is not None
    assert isinstance(outcome.error, InvalidInput)


def test_a_limiter_that_holds_inserts_back_is_back_pressure(open_engine: OpenEngine) -> None:
    limiter = SamplesPerInsert(ratio=1.0, min_size=2, error_buffer=2.0, batch_size=2)
    engine = open_engine(replay=Replay(capacity=8, limiter=limiter, remover=Fifo(), max_times_sampled=1))
    accepted = 0
    for i in range(8):
        accepted += engine.put(i, f"g{i}", encode(named_group(f"g{i}"))) is None
    assert accepted == 4
    assert all(outcome.error is None for outcome in engine.flush())
    train(engine)
    assert engine.put(9, "g9", encode(named_group("g9"))) is None


def test_many_puts_are_one_transaction(open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine(tmp_path)
    count = 0

    def counted(statement: str) -> None:
        nonlocal count
        count += statement.startswith("COMMIT")

    sqlite_of(engine.log).set_trace_callback(counted)
    put(engine, *(f"g{i}" for i in range(64)))
    assert count == 1


# ------------------------------------------------------------------ steps out


def test_a_step_says_what_it_waits_for(open_engine: OpenEngine) -> None:
    engine = open_engine()
    assert engine.plan_step(1) == "generation: 0 of 2 groups"
    put(engine, "a")
    assert engine.plan_step(1) == "generation: 1 of 2 groups"


@pytest.mark.parametrize(
    ("target", "groups"),
    [(Target(samples=5), 3), (Target(samples=4), 2), (Target(tokens=13), 2), (Target(groups=4), 4)],
)
def test_a_step_is_full_by_groups_samples_or_tokens(open_engine: OpenEngine, target: Target, groups: int) -> None:
    engine = open_engine(target=target)
    for i in range(groups - 1):
        put(engine, f"g{i}")
    waiting = engine.plan_step(1)
    assert isinstance(waiting, str)
    assert waiting.startswith("generation")
    for i in range(groups - 1, 6):
        put(engine, f"g{i}")
    plan(engine)
    assert len(engine.state.steps[1].groups) == groups


def test_a_group_goes_through_every_state(open_engine: OpenEngine) -> None:
    engine = open_engine()
    ledger = engine.ledger
    put(engine, "a", "b")
    assert (ledger.held, ledger.scheduled) == (4, 0)
    plan(engine)
    assert (ledger.held, ledger.scheduled) == (0, 4)
    engine.received(1)
    assert (ledger.scheduled, ledger.delivered) == (0, 4)
    engine.commit(1, None)
    assert (ledger.delivered, ledger.committed) == (0, 4)
    assert engine.held_bytes == 0


def test_groups_too_stale_are_dropped_and_counted(open_engine: OpenEngine) -> None:
    engine = open_engine(replay=Replay(max_staleness=1))
    put(engine, "a", "b", "c", "d")
    train(engine, version=3)
    assert dict(engine.ledger.dropped) == {"stale": 4}
    put(engine, "late", policy_version=1)
    assert dict(engine.ledger.dropped) == {"stale": 6}
    assert engine.held_bytes == 0
    put(engine, "e", "f", policy_version=2)
    train(engine)
    assert engine.ledger.committed == 8


def test_a_group_pushed_out_after_its_use_is_committed_with_the_step_that_used_it(open_engine: OpenEngine) -> None:
    engine = open_engine(replay=Replay(capacity=2, remover=Fifo(), sampler=Uniform(), max_times_sampled=None))
    put(engine, "a", "b")
    plan(engine)
    put(engine, "c", "d")  # pushes out a and b, whose step is not trained yet
    assert (engine.ledger.scheduled, engine.ledger.held) == (4, 4)
    engine.received(1)
    engine.commit(1, None)
    assert (engine.ledger.committed, engine.ledger.held, engine.ledger.dropped.total()) == (4, 4, 0)
    assert engine.held_bytes == sum(
        engine.state.rows[op].size for op in (engine.state.by_id["c"], engine.state.by_id["d"])
    )
    engine.resume(2, 1)
    assert engine.stage_again(1).digests == list(engine.state.steps[1].digests)


def test_one_group_nothing_can_be_made_with_does_not_stop_the_others(open_engine: OpenEngine) -> None:
    engine = open_engine()
    put(engine, "a", "b", "c")
    damage_frame(engine, "a")
    plan(engine)
    assert (engine.ledger.quarantined, engine.ledger.scheduled) == (2, 4)
    assert engine.counts["groups_quarantined"] == 1


def test_a_group_that_does_not_go_with_the_others_is_set_aside(open_engine: OpenEngine) -> None:
    engine = open_engine()
    put(engine, "a")
    bare = Sample.from_prompt(id="c/0", group="c", prompt_ids=[1], completion_ids=[2, 3])  # no logprobs
    engine.put(1, "c", encode([bare]))
    engine.flush()
    put(engine, "b")
    plan(engine)
    assert (engine.ledger.quarantined, engine.ledger.scheduled) == (1, 4)


def test_quarantine_survives_a_restart(open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine(tmp_path)
    put(engine, "a", "b", "c", "d", "e")
    damage_frame(engine, "a")
    plan(engine)
    before = engine.ledger.as_dict()
    engine.log.close()
    again = open_engine(tmp_path)
    assert again.ledger.as_dict() == before
    assert again.stage_again(1).digests == list(engine.state.steps[1].digests)


# ------------------------------------------------------------------ the disk


def test_beyond_the_quota_puts_are_refused_and_steps_go_on(open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine(tmp_path, max_disk_bytes=2_000_000, retain_steps=0)
    accepted = 0
    while (outcome := engine.put(0, f"g{accepted}", encode(named_group(f"g{accepted}", tokens=20_000)))) is None:
        assert all(o.error is None for o in engine.flush())
        accepted += 1
        assert accepted < 100
    assert isinstance(outcome.error, DiskFull)
    assert "max_disk_bytes" in str(outcome.error)
    assert accepted >= 4
    train(engine)
    train(engine)
    put(engine, "after", tokens=20_000)


def test_a_failed_write_is_no_acknowledgement_and_leaves_no_trace(open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine(tmp_path)
    put(engine, "a", "b", "c", "d")
    sqlite_of(engine.log).execute("PRAGMA max_page_count=1")  # as large as it is now: SQLite reports a full disk
    for i in range(40):  # a transaction that needs more pages than there are
        engine.put(i, f"more-{i}", encode(named_group(f"more-{i}", samples=40)))
    assert all(isinstance(outcome.error, DiskFull) for outcome in engine.flush())
    assert engine.ledger.accepted == 8
    sqlite_of(engine.log).execute("PRAGMA max_page_count=1000000")
    put(engine, "big", tokens=60_000)
    assert engine.ledger.accepted == 10
    train(engine)
