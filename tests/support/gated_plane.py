"""A plane whose worker threads wait at gates or fail, as a test asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import penstock as ps
from penstock.client.source import Source, Step
from penstock.frames import GroupMetadata
from penstock.log import SqliteLog
from penstock.packing import Packing
from penstock.plane.engine import Engine
from penstock.plane.intake import Incoming, Intake
from penstock.plane.loop import PlaneLoop
from penstock.plane.pipeline import Pipeline
from penstock.plane.settings import PlaneSettings, Target
from penstock.plane.step_builder import Builder, Place, PlannedStep, Ready, StepBuilder
from penstock.plane.workers import Workers
from penstock.protocol.steps import Staged
from penstock.protocol.timeouts import Timeouts
from penstock.storage import MemoryStorage, Storage, Writer
from penstock.transport.memory import MemoryPlane
from tests.support.groups import named_group
from tests.support.pace import pace, stretched

PATIENCE_S = 60.0
RANKS = 2
QUICK = stretched(Timeouts(heartbeat_s=0.1, peer_s=0.5, delivery_s=2.0, plane_s=0.5, resend_s=0.1), pace())
SLOW = replace(QUICK, peer_s=PATIENCE_S, delivery_s=PATIENCE_S, plane_s=PATIENCE_S)
"""For tests in which no deadline may pass, however busy the machine is."""


@dataclass(slots=True)
class Gate:
    """Work that stops here until it is let through."""

    reached: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def passed(self) -> None:
        self.reached.set()
        assert self.released.wait(PATIENCE_S)


@dataclass(slots=True)
class Trying:
    """A builder that can be made slow, and to fail."""

    inner: Builder
    plan_gate: Gate | None = None
    build_gate: Gate | None = None
    part_gate: Gate | None = None
    """Between the samples of the first rank and those of the others."""
    whole_gate: Gate | None = None
    """Between the samples of all ranks, passed on as they were ready, and the step as a whole."""
    failing: str = ""
    """What planning raises, if anything."""
    blamed: str = ""
    """A group that nothing can be planned with."""

    def plan(self, metadata: Sequence[GroupMetadata], oldest_version: int = 0) -> PlannedStep:
        failing = self.failing  # what is changed while this waits at the gate is for the next one
        if self.plan_gate is not None:
            self.plan_gate.passed()
        if failing or self.blamed in {group.group for group in metadata}:
            raise RuntimeError(failing or "odd")
        return self.inner.plan(metadata, oldest_version)

    def unpackable(self, metadata: Sequence[GroupMetadata]) -> dict[int, str]:
        return {i: "it is odd" for i, group in enumerate(metadata) if group.group == self.blamed}

    def build(
        self, step: int, planned: PlannedStep, groups: Sequence[Place], inline: Collection[int], ready: Ready
    ) -> Staged:
        if self.build_gate is not None:
            self.build_gate.passed()
        built = self.inner.build(step, planned, groups, inline, ready)
        if self.part_gate is not None:
            ready(replace(built, payloads=[built.payloads[0], *[None] * (len(built.payloads) - 1)]))
            self.part_gate.passed()
        if self.whole_gate is not None:
            ready(built)
            self.whole_gate.passed()
        return built


class SlowIntake(Intake):
    """Checks and keeps nothing until it is let."""

    def __init__(self, settings: PlaneSettings, writer: Writer, gate: Gate) -> None:
        super().__init__(settings, writer)
        self.gate = gate

    def take(self, batch: Sequence[Incoming]) -> None:
        self.gate.passed()
        super().take(batch)


class SlowSweeper(MemoryStorage):
    """Deletes nothing until it is let."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate

    def delete(self, names: Iterable[str]) -> None:
        self.gate.passed()
        super().delete(names)


def settings_of(timeouts: Timeouts = QUICK) -> PlaneSettings:
    return PlaneSettings(
        packing=Packing(ranks=RANKS, seq_len=64), target=Target(groups=2), timeouts=timeouts, untrained_groups="accept"
    )


@contextmanager
def served(
    make: Callable[[Engine, Workers], Pipeline], storage: Storage | None = None, timeouts: Timeouts = QUICK
) -> Iterator[tuple[ps.Plane, PlaneLoop]]:
    """A plane in a thread, as `ps.open` makes it, with a pipeline of the test's."""
    memory = MemoryPlane()
    server = PlaneLoop(settings_of(timeouts), SqliteLog(None), [memory], pipeline=make, storage=storage)
    memory.last_words = server.last_words
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    with ps.Plane(memory.connect, url="memory:", timeouts=timeouts, server=server, thread=thread) as plane:
        yield plane, server


@contextmanager
def trying(timeouts: Timeouts = QUICK) -> Iterator[tuple[ps.Plane, PlaneLoop, Trying]]:
    made: list[Trying] = []

    def make(engine: Engine, workers: Workers) -> Pipeline:
        made.append(Trying(StepBuilder(engine.settings.packing, engine.storage)))
        return Pipeline(engine, Intake(engine.settings, engine.writer), made[0], workers)

    with served(make, timeouts=timeouts) as (plane, server):
        yield plane, server, made[0]


@contextmanager
def sources(plane: ps.Plane) -> Iterator[list[Future[Step]]]:
    """Every rank, asking for its first step."""
    found = [plane.source(rank, world=RANKS) for rank in range(RANKS)]
    with ThreadPoolExecutor(RANKS) as pool:
        yield [pool.submit(_first_step, source) for source in found]
    for source in found:
        source.close()


def _first_step(source: Source) -> Step:
    return source.step()


def ids_of(steps: list[Future[Step]]) -> set[str]:
    return {
        name
        for step in steps
        for batch in step.result(PATIENCE_S)
        if not batch.is_dummy
        for name in batch.segments.ids
        if name
    }


def live_on(plane: ps.Plane, *, puts: bool = True) -> None:
    """Longer than anybody may be silent: everything that does not need the slow work is answered all the time."""
    until, count = time.monotonic() + 3 * QUICK.plane_s, 0
    while time.monotonic() < until:
        asked = time.monotonic()
        count += 1
        if puts:
            assert plane.put(named_group(f"meanwhile {count}"), timeout=0)
        assert plane.status()["missing"] == []
        assert time.monotonic() - asked < QUICK.plane_s
        threading.Event().wait(QUICK.heartbeat_s)  # not to fill the table
    assert count > 5
