"""Groups in and steps out beside the loop: the loop goes on however long the work takes, and whatever it raises."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import xxhash

import penstock as ps
from penstock.arrays import Sample
from penstock.client.source import Source, Step
from penstock.errors import CorruptFrame, PenstockError
from penstock.log import SqliteLog
from penstock.plane.acceptance import Outcome
from penstock.plane.engine import Engine
from penstock.plane.intake import Intake
from penstock.plane.loop import PlaneLoop
from penstock.plane.pipeline import AlteredOnTheWay, Pipeline, pipeline_of
from penstock.plane.step_builder import StepBuilder
from penstock.plane.workers import Inline, Threads, Workers
from penstock.protocol import Ask, Status, pack_message, read_from_plane
from penstock.protocol.steps import Staged
from penstock.storage import MemoryStorage
from penstock.transport.memory import MemoryPlane
from tests.support.engines import DirectEngine, damage_frame
from tests.support.gated_plane import (
    PATIENCE_S,
    QUICK,
    RANKS,
    SLOW,
    Gate,
    SlowIntake,
    SlowSweeper,
    Trying,
    _first_step,
    ids_of,
    live_on,
    served,
    settings_of,
    sources,
    trying,
)
from tests.support.groups import named_group


@pytest.mark.deep
@pytest.mark.parametrize("gate", ["plan_gate", "build_gate"])
def test_nobody_is_declared_dead_while_a_step_is_made(gate: str) -> None:
    with trying() as (plane, server, builder):
        slow = Gate()
        setattr(builder, gate, slow)
        for name in "ab":
            plane.put(named_group(name))
        with sources(plane) as steps:
            assert slow.reached.wait(PATIENCE_S)
            live_on(plane)
            assert not any(step.done() for step in steps)
            slow.released.set()
            assert ids_of(steps) == {"a/0", "a/1", "b/0", "b/1"}
            assert plane.status()["session"] == 1  # nobody had to begin again
        assert server.failure is None


@pytest.mark.deep
def test_nobody_is_declared_dead_while_a_group_is_checked() -> None:
    slow = Gate()

    def make(engine: Engine, workers: Workers) -> Pipeline:
        intake = SlowIntake(engine.settings, engine.writer, slow)
        return Pipeline(engine, intake, StepBuilder(engine.settings.packing, engine.storage), workers)

    with served(make) as (plane, server), sources(plane) as steps, ThreadPoolExecutor(2) as pool:
        puts = [pool.submit(plane.put, named_group(name)) for name in "ab"]
        assert slow.reached.wait(PATIENCE_S)
        live_on(plane, puts=False)
        assert not any(put.done() for put in puts)
        slow.released.set()
        assert [put.result(PATIENCE_S) for put in puts] == [True, True]
        assert ids_of(steps) == {"a/0", "a/1", "b/0", "b/1"}
        assert server.failure is None


@pytest.mark.deep
def test_nobody_is_declared_dead_while_space_is_freeing() -> None:
    slow = Gate()
    with served(pipeline_of, SlowSweeper(slow)) as (plane, server):
        plane.put([Sample.from_prompt(id="odd/0", group="odd", prompt_ids=[1], completion_ids=[2, 3])])
        for name in "ab":
            plane.put(named_group(name))
        with sources(plane) as steps:
            assert ids_of(steps) == {"a/0", "a/1", "b/0", "b/1"}  # the odd one is set aside
            plane.settle("odd", drop=True)
            plane.put(named_group("c"))  # with the next decision its frame is given back
            assert slow.reached.wait(PATIENCE_S)
            live_on(plane)
            slow.released.set()
        assert server.failure is None


def test_an_error_in_planning_is_told_to_every_rank_and_the_plane_lives_on() -> None:
    with trying() as (plane, server, builder):
        builder.failing = "no idea"
        for name in "ab":
            plane.put(named_group(name))
        with sources(plane) as steps:
            for step in steps:
                with pytest.raises(PenstockError, match="cannot be built: RuntimeError: no idea"):
                    step.result(PATIENCE_S)
        assert plane.put(named_group("c"))
        builder.failing = ""
        with sources(plane) as steps:
            assert ids_of(steps) == {"a/0", "a/1", "b/0", "b/1"}
        assert server.failure is None
        assert plane.ledger.balanced


def test_a_rank_is_sent_its_samples_before_those_of_the_last_rank_are_gathered() -> None:
    with trying(SLOW) as (plane, server, builder):
        builder.part_gate = Gate()
        for name in "ab":
            plane.put(named_group(name))
        with sources(plane) as steps:
            assert builder.part_gate.reached.wait(PATIENCE_S)
            deadline = time.monotonic() + PATIENCE_S
            while "rank 1 to receive step 1" not in plane.status()["waiting_for"]:  # rank 0 has it
                assert time.monotonic() < deadline, plane.status()["waiting_for"]
                threading.Event().wait(QUICK.heartbeat_s / 4)
            assert not any(step.done() for step in steps)  # all ranks train it, or none does
            builder.part_gate.released.set()
            assert ids_of(steps) == {"a/0", "a/1", "b/0", "b/1"}
        assert server.failure is None


def test_what_failed_for_one_session_is_not_told_to_the_next() -> None:
    with trying() as (plane, server, builder):
        builder.failing, builder.plan_gate = "no idea", Gate()
        for name in "ab":
            plane.put(named_group(name))
        ranks = [plane.source(rank, world=RANKS) for rank in range(RANKS)]
        with ThreadPoolExecutor(RANKS) as pool:
            steps = [pool.submit(_first_step, source) for source in ranks]
            assert builder.plan_gate.reached.wait(PATIENCE_S)
            ranks[0].fail("it was told to")
            for step in steps:
                with pytest.raises(PenstockError, match="it was told to"):
                    step.result(PATIENCE_S)
        for source in ranks:
            source.close()
        builder.failing = ""
        with sources(plane) as steps:
            while plane.status()["session"] < 2 or plane.status()["missing"]:
                threading.Event().wait(QUICK.heartbeat_s)
            builder.plan_gate.released.set()
            assert ids_of(steps) == {"a/0", "a/1", "b/0", "b/1"}
        assert server.failure is None


def test_a_failure_that_nobody_was_told_is_not_told_to_the_next_session() -> None:
    engine = Engine(settings_of(), SqliteLog(None), MemoryStorage())
    workers = Inline()
    builder = Trying(StepBuilder(engine.settings.packing, engine.storage), failing="no idea")
    pipeline = Pipeline(engine, Intake(engine.settings, engine.writer), builder, workers)
    for name in "ab":
        frame = ps.encode(named_group(name))
        pipeline.put(name, name, xxhash.xxh3_128_digest(frame), frame)
    pipeline.collect()
    assert pipeline.step(1) == "step 1 to be planned"
    pipeline.collect()
    pipeline.begin_session()
    builder.failing = ""
    assert pipeline.step(1) == "step 1 to be planned"


def test_a_group_that_is_to_blame_is_set_aside_and_the_step_made_of_others() -> None:
    with trying() as (plane, _server, builder):
        builder.blamed = "a"
        for name in "abc":
            plane.put(named_group(name))
        with sources(plane) as steps:
            assert ids_of(steps) == {"b/0", "b/1", "c/0", "c/1"}
        assert (plane.ledger.quarantined, plane.ledger.balanced) == (2, True)


def test_a_damaged_frame_is_set_aside_and_the_step_is_planned_anew() -> None:
    with served(pipeline_of) as (plane, server):
        for name in "abc":
            plane.put(named_group(name))
        damage_frame(server.engine, "a")
        with sources(plane) as steps:
            assert ids_of(steps) == {"b/0", "b/1", "c/0", "c/1"}
        assert (plane.ledger.quarantined, plane.ledger.balanced) == (2, True)
        assert server.failure is None


def test_a_frame_altered_on_the_way_is_asked_for_again_and_the_others_of_its_batch_are_kept() -> None:
    engine = Engine(settings_of(), SqliteLog(None), MemoryStorage())
    workers = Inline()
    pipeline = pipeline_of(engine, workers)
    for name in "abc":
        frame = ps.encode(named_group(name))
        digest = xxhash.xxh3_128_digest(frame)
        assert pipeline.put(name, name, digest, frame if name != "b" else frame[:-1] + b"?") is None
    found = {outcome.ticket: outcome.error for outcome in pipeline.collect()}
    assert isinstance(found.pop("b"), AlteredOnTheWay)
    assert found == {"a": None, "c": None}
    frame = ps.encode(named_group("b"))
    assert pipeline.put("b", "b", xxhash.xxh3_128_digest(frame), frame) is None
    assert pipeline.collect() == [Outcome("b")]


def made_with(workers: Workers) -> tuple[list[Outcome], list[Staged]]:
    """What becomes of some groups, and the steps that are made of them."""
    engine = Engine(settings_of(), SqliteLog(None), MemoryStorage())
    pipeline = pipeline_of(engine, workers)
    outcomes: list[Outcome] = []
    steps: list[Staged] = []
    for name in ("a", "b", "a", "bad", "c", "d"):
        frame = ps.encode(named_group(name if name != "bad" else "other"))
        known = pipeline.put(len(outcomes), name, xxhash.xxh3_128_digest(frame), frame)
        outcomes += [known] if known is not None else _collected(pipeline, workers)
    while len(steps) < 2:
        found = pipeline.step(len(steps) + 1)
        if isinstance(found, Staged):
            pipeline.handed_over(found.step)
            steps.append(found)
        else:
            _wait(workers)
            workers.finish()
    workers.close()
    return outcomes, steps


def _collected(pipeline: Pipeline, workers: Workers) -> list[Outcome]:
    while not (found := pipeline.collect()):
        _wait(workers)
    return found


def _wait(workers: Workers) -> None:
    if isinstance(workers, Threads):
        assert select.select([workers.wake.descriptor], [], [], PATIENCE_S)[0]


def test_threads_and_no_threads_make_the_same_steps() -> None:
    (first, plain), (second, threaded) = made_with(Inline()), made_with(Threads())
    assert [(o.ticket, str(o.error), o.duplicate) for o in first] == [
        (o.ticket, str(o.error), o.duplicate) for o in second
    ]
    assert [o.duplicate for o in first] == [False, False, True, False, False, False]
    assert [o.error is not None for o in first] == [False, False, False, True, False, False]
    for a, b in zip(plain, threaded, strict=True):
        assert (a.plans, a.digests) == (b.plans, b.digests)
        assert [b"".join(payload or ()) for payload in a.payloads] == [
            b"".join(payload or ()) for payload in b.payloads
        ]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_step_whose_samples_went_out_as_they_were_ready_does_not_stay_in_memory(is_late: bool) -> None:
    with trying() as (plane, server, builder):
        gate = builder.whole_gate = Gate()
        if not is_late:
            gate.released.set()
        for name in "abcd":
            plane.put(named_group(name))
        ranks = [plane.source(rank, world=RANKS) for rank in range(RANKS)]
        with ThreadPoolExecutor(RANKS) as pool:
            first = list(pool.map(Source.step, ranks))
            assert gate.reached.wait(60)  # the parts may be there before the whole is asked for
            builder.whole_gate = None
            gate.released.set()
            for source, step in zip(ranks, first, strict=True):
                source.commit(step)
            assert [step.number for step in pool.map(Source.step, ranks)] == [2, 2]
        assert 1 not in server._pipeline._staged
        for source in ranks:
            source.close()


def test_a_step_behind_one_that_is_planned_anew_is_planned_anew_too() -> None:
    engine = DirectEngine(settings_of(), SqliteLog(None))
    for name in "abcdef":
        engine.put(name, name, ps.encode(named_group(name)))
    engine.flush()
    engine.plan_step(1)
    _make(engine, 2)  # nobody takes it: the ranks have failed meanwhile
    damage_frame(engine, "b")
    with pytest.raises(CorruptFrame, match=r"group 'b': .*; it was set aside, steps 1 to 2 are planned again"):
        engine.stage_again(1)
    for step in (1, 2):
        found = engine.stage_again(step)
        assert engine.last_step == step
        assert found.digests == list(engine.state.steps[step].digests)


def _make(engine: DirectEngine, step: int) -> None:
    """Until the step is built, and leave it there."""
    while True:
        engine.pipeline.step(step)
        if engine.last_step == step and engine.state.steps[step].digests:
            engine._workers.finish()
            return
        engine._workers.finish()


def test_ranks_that_rewind_to_a_damaged_step_get_no_step_of_an_earlier_plan() -> None:
    with served(pipeline_of) as (plane, server):
        for name in "abcdef":
            plane.put(named_group(name))
        with trained(plane, count=1) as found:
            assert found == {1: {"a/0", "a/1", "b/0", "b/1"}}
            while not server.coordinator.is_staged(2) or 1 in server._pipeline._staged:  # until it must be built again
                threading.Event().wait(QUICK.heartbeat_s)
        damage_frame(server.engine, "b")
        with pytest.raises(PenstockError, match=r"steps 1 to [23] are planned again"), trained(plane, count=2):
            pass
        with trained(plane, count=2) as found:
            assert found == {1: {"a/0", "a/1", "c/0", "c/1"}, 2: {"d/0", "d/1", "e/0", "e/1"}}
        assert plane.ledger.balanced
        assert server.failure is None


@contextmanager
def trained(plane: ps.Plane, *, count: int) -> Iterator[dict[int, set[str]]]:
    """The samples of the first steps, trained and committed; the one behind them is asked for ahead."""
    ranks = [plane.source(rank, world=RANKS, resume_step=1, prefetch=2) for rank in range(RANKS)]

    def train(source: Source) -> list[Step]:
        found = []
        for _ in range(count):
            found.append(source.step())
            source.commit(found[-1])
        source.flush()
        return found

    try:
        with ThreadPoolExecutor(RANKS) as pool:
            steps = [step for found in pool.map(train, ranks) for step in found]
        ids: dict[int, set[str]] = {}
        for step in steps:
            own = {name for batch in step if not batch.is_dummy for name in batch.segments.ids if name}
            ids[step.number] = ids.get(step.number, set()) | own
        yield ids
    finally:
        for source in ranks:
            source.close()


def test_a_result_that_came_between_two_turns_wakes_the_loop_once() -> None:
    """A turn without results does not look at the workers, so their call must end before it: the loop would not wait
    again."""
    workers, handled = Threads(), list[object]()
    loop = PlaneLoop(settings_of(), SqliteLog(None), [MemoryPlane()], workers=workers)
    workers.post(handled.append, "a result")
    workers.finish()  # an earlier turn has handled it, before its call was seen
    workers.wake.call()
    loop._wait()
    assert handled == ["a result"] and not select.select([workers.wake.descriptor], [], [], 0)[0]
    loop.turn(time.monotonic())
    workers.post(handled.append, "another")
    loop._wait()
    loop.turn(time.monotonic())
    assert handled == ["a result", "another"] and not select.select([workers.wake.descriptor], [], [], 0)[0]
    loop._close()


def test_what_arrived_while_the_log_was_slow_is_handled_at_once_afterwards() -> None:
    """It was taken off the socket, so no message announces it: the loop waited a quarter of a second for another."""
    memory, log = MemoryPlane(), SqliteLog(None)
    loop = PlaneLoop(settings_of(), log, [memory])
    client = memory.connect()
    client.send(pack_message(Ask(ticket=7), bytes.fromhex(log.run_id)))
    log.while_waiting()  # as a slow commit in PostgreSQL calls it
    assert client.receive(0) is None
    assert loop._patience_s() == 0.0
    loop.turn(time.monotonic())
    answer = client.receive(0)
    assert answer is not None and isinstance(found := read_from_plane(answer[0]), Status) and found.ticket == 7
    assert loop._patience_s() > 0.0
    loop._close()
