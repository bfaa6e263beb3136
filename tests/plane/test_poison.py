"""No accepted input stops the plane: extreme numbers are rejected or fit, and a failed decision fails alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.arrays import Sample
from penstock.errors import Fenced, InvalidInput, LogAway, PenstockError, StepAborted
from penstock.frames import encode
from penstock.log import GroupRow, Log, Record, SqliteLog
from penstock.log.decision_records import Discard as Discarded
from penstock.packing import Packing
from penstock.plane.engine import Engine
from penstock.plane.intake import Intake
from penstock.plane.loop import PlaneLoop
from penstock.plane.pipeline import Pipeline
from penstock.plane.settings import PlaneSettings, Replay, Target
from penstock.plane.step_builder import PlannedStep, StepBuilder
from penstock.plane.workers import Inline, Workers
from penstock.protocol.lease_messages import (
    AddPrompts,
    AskFeedback,
    AttachValues,
    GiveBack,
    LeaseColumns,
    LeaseTasks,
    OfferPrompts,
    Renew,
)
from penstock.protocol.message_header import pack_message, read_from_plane
from penstock.protocol.messages import (
    Answers,
    Ask,
    AskGroups,
    AskRoom,
    Attach,
    Beat,
    Bye,
    Commit,
    Damaged,
    Discard,
    Fail,
    Frames,
    FromProducer,
    FromRank,
    GiveUp,
    Hello,
    OpenSegment,
    Peer,
    Put,
    Received,
    Rejected,
    Report,
    Request,
    SettleGroup,
    SetWeight,
    SignUrls,
    Trace,
)
from penstock.protocol.prompt_chunks import PromptChunk, list_digest
from penstock.protocol.steps import Staged
from penstock.replay import Fifo, Prioritized
from tests.support.fuzz_messages import RUN, Wire
from tests.support.groups import named_group
from tests.support.planes import OpenEngine, OpenPlane

CHUNK = PromptChunk(0, ("one",), (b"{}",))
HUGE = 2**53
"""The largest policy version."""


# ------------------------------------------------------------------ sums that do not fit 64 bits


@pytest.mark.deep
def test_any_number_of_groups_of_the_highest_version_make_a_step(open_engine: OpenEngine, tmp_path: Path) -> None:
    many = 1100  # times 2**53 is beyond 64 bits
    for life, groups in ((1, many), (2, 1)):
        engine = open_engine(tmp_path, target=Target(groups=groups), ranks=1, snapshot_every=1)
        for i in range(groups):
            name = f"{life}-{i}"
            engine.put(name, name, encode(named_group(name, samples=1, tokens=2, policy_version=HUGE)))
        assert all(outcome.error is None for outcome in engine.flush())
        assert isinstance(engine.plan_step(life), Staged)
        engine.commit(life, life)
        assert engine.log.snapshot() is not None
        engine.close()
        engine.log.close()


@pytest.mark.deep
def test_staleness_of_any_number_of_groups_is_counted(open_engine: OpenEngine, tmp_path: Path) -> None:
    many = 1100
    for step, groups in ((1, 1), (2, many)):
        engine = open_engine(tmp_path, target=Target(groups=groups), ranks=1, snapshot_every=1)
        for i in range(groups):
            name = f"{step}-{i}"
            engine.put(name, name, encode(named_group(name, samples=1, tokens=2, policy_version=0)))
        engine.flush()
        assert isinstance(engine.plan_step(step), Staged)
        engine.commit(step, HUGE)
        found = engine.tenant_tables.metrics()
        assert engine.counts["snapshots_skipped"] == 0
        engine.close()
        engine.log.close()
    assert HUGE / 3 < found["train/staleness_mean"] <= HUGE  # its sum ends at 2**63


@pytest.mark.parametrize("samples", [2**63, 2**32 + 1, -1, 1.5, True, 2**70])
def test_a_discard_beyond_bounds_is_rejected(open_plane: OpenPlane, samples: Any) -> None:
    plane = open_plane()
    with pytest.raises(InvalidInput, match="give a whole number from 0 to"):
        plane.discard("x", samples)
    assert plane.ledger.discarded == {}


def test_discards_of_an_earlier_version_do_not_end_the_plane(open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine(tmp_path, ranks=1, snapshot_every=1)
    for _ in range(3):
        engine.recorder.decide(Discarded(reason="x", samples=2**63))
    for name in "ab":
        engine.put(name, name, encode(named_group(name)))
    engine.flush()
    assert isinstance(engine.plan_step(1), Staged)
    engine.commit(1, None)
    assert engine.counts["snapshots_skipped"] == 0
    engine.close()
    engine.log.close()
    again = open_engine(tmp_path, ranks=1)
    assert again.ledger.discarded["x"] == 2**63 - 1


# ------------------------------------------------------------------ decisions that fail


class Oversized(StepBuilder):
    """Plans steps that cannot be written to the log."""

    failing = True

    def plan(self, metadata: Any, oldest_version: int = 0) -> PlannedStep:
        planned = super().plan(metadata, oldest_version)
        return replace(planned, loss_tokens=2**70) if self.failing else planned


def oversized_server(log: Log, wire: Wire) -> tuple[PlaneLoop, list[Oversized]]:
    builders: list[Oversized] = []

    def pipeline(engine: Engine, workers: Workers) -> Pipeline:
        builders.append(Oversized(engine.settings.packing, engine.storage))
        return Pipeline(engine, Intake(engine.settings, engine.writer), builders[0], workers)

    made = PlaneSettings(packing=Packing(ranks=1, seq_len=64), target=Target(groups=2), run=RUN)
    return PlaneLoop(made, log, [wire], workers=Inline(), pipeline=pipeline), builders


class Line:
    """Messages to a server, one turn each, and what it answered."""

    def __init__(self, server: PlaneLoop, wire: Wire) -> None:
        self.server, self.wire, self.now, self._tickets = server, wire, 1.0, 10
        self._run_id = bytes.fromhex(server.engine.log.run_id)

    def say(self, message: Any, *frames: bytes, peer: int = 0) -> None:
        if getattr(message, "ticket", 0) == 1:  # each its own: a repeated ticket is answered as before
            self._tickets += 1
            message = msgspec.structs.replace(message, ticket=self._tickets)
        self.wire.inbox.append((peer, pack_message(message, self._run_id), frames))
        self.turn()

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.now += 1.5
            self.server.turn(self.now)

    def put(self, *names: str) -> None:
        for name in names:
            self.say(Put(ticket=1, group=name), encode(named_group(name)), peer=9)


def hello(incarnation: str) -> Hello:
    return Hello(run=RUN, rank=0, world=1, replica=0, replicas=1, incarnation=incarnation, session=0, step=0)


def test_a_step_that_cannot_be_recorded_fails_for_its_ranks_only(caplog: pytest.LogCaptureFixture) -> None:
    wire = Wire()
    server, (builder,) = oversized_server(SqliteLog(None), wire)
    line = Line(server, wire)
    line.say(hello("one"), peer=1)
    line.put("a", "b")
    line.say(Request(session=0, step=1), peer=1)
    line.turn(3)
    failure = server.coordinator.failure
    assert failure is not None
    assert "step 1: the plane: cannot be built: OverflowError" in failure.reason
    assert "step 1 cannot be recorded" in caplog.text
    builder.failing = False
    line.say(hello("two"), peer=2)
    line.say(Request(session=0, step=1), peer=2)
    line.turn(3)
    assert wire.digests[2]  # the same step is delivered to the next session
    assert server.engine.ledger.balanced
    server._close()


def test_a_plane_that_was_fenced_still_ends(tmp_path: Path) -> None:
    wire, log = Wire(), SqliteLog(tmp_path)
    server, (builder,) = oversized_server(log, wire)
    builder.failing = False
    line = Line(server, wire)
    line.put("a", "b")
    with log.transaction():
        log.set_meta("epoch", log.epoch + 1)
    with pytest.raises(Fenced):
        line.turn(3)
    server._close()


def test_ranks_of_a_real_plane_are_told(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1)
    assert plane._server is not None
    plane._server._pipeline._builder = Oversized(plane._server.settings.packing, plane._server.engine.storage)
    for name in "ab":
        plane.put(named_group(name))
    with plane.source(0, prefetch=0) as source, pytest.raises(StepAborted, match="OverflowError"):
        source.step(timeout=30)
    assert plane.put(named_group("c"))


class FailingLog(SqliteLog):
    """A log in which one kind of query or write fails, as it would for a value that the database cannot hold."""

    failing = ""

    def metadata_of(self, ops: Sequence[int]) -> dict[int, bytes]:
        self._try("draw" if ops else "rebuild")
        return super().metadata_of(ops)

    def set_meta(self, name: str, value: int | str) -> None:
        self._try({"next_step": "commit", "session": "join"}.get(name, name))
        super().set_meta(name, value)

    def set_snapshot(self, op: int, data: bytes) -> None:
        self._try("snapshot")
        super().set_snapshot(op, data)

    def add_record(self, op: int, record: Record) -> None:
        self._try("decision")
        super().add_record(op, record)

    def add_groups(self, rows: Sequence[tuple[GroupRow, bytes]]) -> None:
        self._try("group")
        super().add_groups(rows)

    def _try(self, what: str) -> None:
        if what in self.failing.split(" and "):
            raise OverflowError("int too large")


class Answered(Wire):
    """Keeps why puts and decisions were rejected."""

    def __init__(self) -> None:
        super().__init__()
        self.rejected: list[str] = []

    def send(self, peer: Peer, header: bytes, frames: Frames = ()) -> bool:
        message = read_from_plane(header)
        answers = message.answers if isinstance(message, Answers) else (message,)
        self.rejected += [answer.reason for answer in answers if isinstance(answer, Rejected)]
        return super().send(peer, header, frames)


def trains(line: Line, wire: Wire, peer: int, log: FailingLog, failing: str = "") -> bool:
    """Join as the rank, take the next step and commit it while something fails. Returns whether it was committed."""
    step = line.server.engine.next_step
    log.failing = failing if failing != "commit" else ""  # to join sets where it begins, as a commit does
    line.say(hello(f"of peer {peer}"), peer=peer)
    line.say(Request(session=0, step=step), peer=peer)
    line.turn(3)
    log.failing = failing
    line.say(Received(session=0, step=step, digest=wire.digests.get(peer, "")), peer=peer)
    line.say(Commit(session=0, step=step), peer=peer)
    log.failing = ""
    return line.server.engine.next_step == step + 1


@pytest.mark.parametrize(
    ("failing", "counted"),
    [
        ("draw", {}),
        ("join", {"decisions_failed": 1}),
        ("commit", {"decisions_failed": 1}),
        ("snapshot", {"snapshots_skipped": 1}),
    ],
)
def test_what_fails_on_the_way_of_a_step_fails_for_its_ranks_only(
    tmp_path: Path, failing: str, counted: dict[str, int]
) -> None:
    wire, log = Wire(), FailingLog(tmp_path)
    made = PlaneSettings(packing=Packing(ranks=1, seq_len=64), target=Target(groups=2), run=RUN, snapshot_every=1)
    line = Line(PlaneLoop(made, log, [wire], workers=Inline()), wire)
    engine = line.server.engine
    line.put("a", "b", "c", "d")
    committed = trains(line, wire, 1, log, failing)
    assert committed is (failing == "snapshot")  # which concerns no rank
    failed = ("messages_failed", "decisions_failed", "snapshots_skipped")
    assert {name: engine.counts[name] for name in failed} == dict.fromkeys(failed, 0) | counted
    if failing in ("draw", "commit"):
        assert line.server.coordinator.failure is not None
        assert "OverflowError: int too large" in line.server.coordinator.failure.reason
    line.say(Bye(session=0), peer=1)
    assert trains(line, wire, 2, log)
    assert engine.ledger.balanced
    line.server._close()


def test_a_plane_whose_memory_cannot_be_rebuilt_ends_and_the_next_one_goes_on(tmp_path: Path) -> None:
    wire, log = Wire(), FailingLog(tmp_path)
    made = PlaneSettings(packing=Packing(ranks=1, seq_len=64), target=Target(groups=2), run=RUN)
    line = Line(PlaneLoop(made, log, [wire], workers=Inline()), wire)
    line.put("a", "b")
    with pytest.raises(LogAway, match=r"memory cannot be rebuilt from the log: OverflowError.*start the plane"):
        trains(line, wire, 1, log, "draw and rebuild")
    line.server._close()
    wire, log = Wire(), FailingLog(tmp_path)
    line = Line(PlaneLoop(made, log, [wire], workers=Inline()), wire)
    assert trains(line, wire, 1, log)
    line.server._close()


def test_a_put_or_a_decision_that_cannot_be_recorded_is_an_error_to_its_caller(tmp_path: Path) -> None:
    wire, log = Answered(), FailingLog(tmp_path)
    made = PlaneSettings(packing=Packing(ranks=1, seq_len=64), target=Target(groups=2), run=RUN)
    line = Line(PlaneLoop(made, log, [wire], workers=Inline()), wire)
    engine = line.server.engine
    log.failing = "decision"
    line.say(Discard(ticket=1, reason="x", samples=3), peer=9)
    log.failing = "group"
    line.put("a")
    line.turn(3)
    assert ["OverflowError: int too large" in reason for reason in wire.rejected] == [True, True]
    assert engine.ledger.discarded == {} and engine.ledger.as_dict()["accepted"] == 0
    log.failing = ""
    line.say(Discard(ticket=1, reason="x", samples=3), peer=9)
    line.put("a", "b")
    assert engine.ledger.discarded == {"x": 3} and engine.ledger.accepted == 4
    assert trains(line, wire, 1, log)
    line.server._close()


# ------------------------------------------------------------------ every field of every message

INTEGERS = (0, 1, -1, 2**31, 2**32, 2**32 + 1, HUGE, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-320, 1e-6, 1e6, 1e308, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "a", "a/0", "a\0b", "‮\x1b[31m", "x" * 70_000, "run", RUN)
BYTES = (b"", b"\0" * 16, b"x" * 70_000)
VALUES: dict[str, tuple[Any, ...]] = {
    "int": INTEGERS,
    "float": (*FLOATS, *INTEGERS[:4]),
    "str": TEXTS,
    "bytes": BYTES,
    "bool": (False, True),
    "dict": ({}, *({text[:2000]: value} for text in TEXTS for value in FLOATS)),
    "tuple": ((), INTEGERS, tuple(range(10_000))),
    "union": (None, *INTEGERS),
}
HONEST: dict[type[Any], Any] = {
    type(message): message
    for message in (
        hello("one"),
        Request(session=0, step=1),
        Received(session=0, step=1, digest=""),
        Commit(session=0, step=1, policy_version=1),
        Report(session=0, step=1, priorities={"a": 1.0}, metrics={"loss": 1.0}, number=1),
        Fail(session=0, step=1, reason="x"),
        Damaged(session=0, step=1, group="a", reason="x"),
        Beat(session=0, number=1),
        Bye(session=0),
        Attach(ticket=1, run=RUN),
        OpenSegment(ticket=1),
        SignUrls(ticket=1, method="PUT", names=("segments/3f9c21d07b6a4e58/000000",)),
        Put(ticket=1, group="extreme"),
        Trace(ticket=1, group="a", digest=b""),
        AskRoom(ticket=1, tenant="", size=100),
        GiveUp(ticket=1),
        Discard(ticket=1, reason="x", samples=1),
        SettleGroup(ticket=1, group="a", drop=False),
        SetWeight(ticket=1, tenant="", weight=1.0),
        Ask(ticket=1),
        AskGroups(ticket=1, groups=("a",)),
        LeaseColumns(ticket=1, column="rewards", groups=8, worker="w", lease_s=30.0),
        AttachValues(ticket=1, column="rewards", values={"a": {"a/0": 1.0}}, errors={"a": {"a/1": "late"}}),
        Renew(ticket=1, leases=(1,)),
        GiveBack(ticket=1, leases=(1,), reason="x"),
        OfferPrompts(
            ticket=1,
            list="a",
            digest=list_digest([CHUNK.digest]),
            count=1,
            chunks=(CHUNK.digest,),
            epochs=1,
            seed=1,
            shuffle=True,
            attempts=1,
            again=("stale",),
        ),
        AddPrompts(
            ticket=1,
            digest=list_digest([CHUNK.digest]),
            chunk=0,
            first=0,
            names=CHUNK.names,
            payloads=CHUNK.payloads,
        ),
        LeaseTasks(ticket=1, list="a", count=1, worker="w", lease_s=60.0),
        AskFeedback(ticket=1),
    )
}


def extremes(kind: type[Any]) -> dict[str, tuple[Any, ...]]:
    """The extreme values of each field, as they can be on the wire."""
    found = {}
    for field in msgspec.inspect.type_info(kind).fields:  # type: ignore[attr-defined]
        name = type(field.type).__name__.removesuffix("Type").lower()
        found[field.name] = VALUES[{"vartuple": "tuple"}.get(name, name)]
    return found


def test_every_message_of_a_client_is_tried() -> None:
    assert set(HONEST) == {*get_args(FromRank), *get_args(FromProducer), Attach}


def new_server(folder: Path, wire: Wire) -> PlaneLoop:
    replay = Replay(sampler=Prioritized(1.0), remover=Fifo(), max_times_sampled=3, capacity=1 << 16)
    made = PlaneSettings(
        packing=Packing(ranks=1, seq_len=64), target=Target(groups=2), run=RUN, replay=replay, snapshot_every=1
    )
    return PlaneLoop(made, SqliteLog(folder), [wire], workers=Inline())


def trains_on(folder: Path, life: str, messages: list[tuple[Any, tuple[bytes, ...]]]) -> None:
    """Send all of it as a stranger and as the rank. Both leave; an honest rank joins, gets a step and commits."""
    wire = Wire()
    line = Line(new_server(folder, wire), wire)
    engine = line.server.engine
    line.put("a", "b")
    line.say(hello(f"{life} first"), peer=1)
    for kind in (OfferPrompts, AddPrompts, OfferPrompts, LeaseTasks):  # so that there is a lease to name
        line.say(HONEST[kind], peer=9)
    for message, frames in messages:
        line.say(message, *frames, peer=9)
        line.say(message, *frames, peer=1)
    for run in list(engine.tenant_tables.members):  # what was shared is taken back, or its groups never come
        line.say(SetWeight(ticket=1, tenant=run, weight=0.0), peer=9)
    line.say(SetWeight(ticket=1, tenant="honest", weight=1.0), peer=9)
    for name in (f"{life}-{i}" for i in range(2)):
        line.say(Put(ticket=1, group=name), encode(named_group(name, run="honest")), peer=9)
    for peer in (9, 1):  # who has the place, or waits for it, leaves: it would be asked whether it lives
        line.say(Bye(session=0), peer=peer)
    line.say(hello(f"{life} last"), peer=2)
    step = engine.next_step
    line.say(Request(session=0, step=step), peer=2)
    line.turn(3)
    assert wire.digests.get(2), line.server.coordinator.failure or line.server.coordinator.waiting_for
    line.say(Received(session=0, step=step, digest=wire.digests[2]), peer=2)
    line.say(Commit(session=0, step=step), peer=2)
    assert engine.next_step == step + 1
    assert engine.ledger.balanced
    assert msgspec.json.encode(line.server.status())
    failed = ("messages_failed", "decisions_failed", "snapshots_skipped")
    assert {name: engine.counts[name] for name in failed} == dict.fromkeys(failed, 0)  # bounded where it entered
    line.server._close()


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Thousands of rejections say nothing in the output."""
    with caplog.at_level(logging.ERROR, "penstock"):
        yield


@pytest.mark.parametrize("kind", HONEST, ids=lambda kind: kind.__name__)
def test_an_extreme_value_in_any_field_stops_nothing(tmp_path: Path, kind: type[Any]) -> None:
    frames: tuple[bytes, ...] = (encode(named_group("extreme")),) if kind is Put else ()
    said = [
        (msgspec.structs.replace(HONEST[kind], **{name: value}), frames)
        for name, values in extremes(kind).items()
        for value in values
    ]
    trains_on(tmp_path, "one", said)
    trains_on(tmp_path, "two", [])
    trains_on(tmp_path, "three", said[-3:])


@st.composite
def anything(draw: st.DrawFn) -> tuple[Any, tuple[bytes, ...]]:
    kind = draw(st.sampled_from(list(HONEST)))
    fields = {name: draw(st.sampled_from(values)) for name, values in extremes(kind).items() if draw(st.booleans())}
    message = msgspec.structs.replace(HONEST[kind], **fields)
    return message, (extreme_frame(draw),) if kind is Put else ()


def extreme_frame(draw: st.DrawFn) -> bytes:
    """A group with extreme values in its columns, if it can be made at all."""
    number = st.sampled_from([0.0, 1.0, -1e38, 3.4e38, 1e-45])
    version = st.sampled_from([None, 0, 1, HUGE - 1, HUGE])
    length = draw(st.sampled_from([2, 3, 64]))
    try:
        sample = Sample(
            id=draw(st.sampled_from(["extreme/0", "\0", "x" * 500])),
            group="extreme",
            run=draw(st.sampled_from(["", "honest", "x" * 200])),
            policy_version=draw(version),
            token_ids=np.full(length, draw(st.sampled_from([0, 2**32 - 1])), np.uint32),
            loss_mask=np.arange(length) > 0,
            logprobs=np.full(length, draw(st.sampled_from([0.0, -1.0, -3.4e38])), np.float32),
            advantages=draw(number),
            rewards=draw(number),
            temperatures=draw(st.sampled_from([1.0, 1e-45, 3.4e38])),
        )
    except PenstockError:
        return encode(named_group("extreme"))
    return encode([sample])


@pytest.mark.deep
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(said=st.lists(anything(), max_size=20), later=st.lists(anything(), max_size=5))
def test_extreme_values_in_all_fields_stop_nothing(
    tmp_path_factory: pytest.TempPathFactory,
    said: list[tuple[Any, tuple[bytes, ...]]],
    later: list[tuple[Any, tuple[bytes, ...]]],
) -> None:
    folder = tmp_path_factory.mktemp("plane")
    trains_on(folder, "one", said)
    trains_on(folder, "two", later)
    trains_on(folder, "three", [])
