"""What the plane itself spends: building a step, its longest turn meanwhile, a blocked producer, metadata, protocol.

Nothing here is compared with a rival; the targets are absolute. Work of one thread is given in CPU time, the best of
several rounds, with the wall time in the notes; turns of the loop, which are pauses for everybody else, in wall time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks import ROOT, data
from benchmarks.programs.inputs import CASES, make_groups
from benchmarks.programs.plane import SEQ_LEN, producer, rank, samples_of
from benchmarks.programs.serving import Crew
from benchmarks.protocol import protocol_time
from benchmarks.report import Row
from penstock.arrays import Sample
from penstock.client import client_transport, plane_transport
from penstock.client.plane import Plane
from penstock.errors import Overloaded
from penstock.frames import GroupMetadata, encode
from penstock.log import SqliteLog
from penstock.packing import Packing
from penstock.plane.engine import Engine
from penstock.plane.intake import Intake
from penstock.plane.loop import PlaneLoop
from penstock.plane.pipeline import Pipeline
from penstock.plane.settings import PlaneSettings, Replay, Target
from penstock.plane.step_builder import StepBuilder
from penstock.plane.workers import Workers
from penstock.protocol.messages import Buffer, Frames
from penstock.protocol.steps import Staged
from penstock.transport.interface import ClientTransport, Envelope
from tests.support.engines import DirectEngine

BLOCKED_S = 5.0


def rows(folder: Path, progress: Callable[[str], None], *, repeats: int = 5) -> list[Row]:
    progress("building steps")
    made = [_build_many(folder, repeats), _build_long(folder, repeats)]
    progress("a router-replay step, and the loop's turns meanwhile")
    made.append(longest_turn(folder, "router", rounds=2))
    progress("a producer that is blocked")
    made.append(blocked_producer(BLOCKED_S))
    progress("metadata alone")
    made += metadata_rows(folder)
    progress("the protocol with 1,024 ranks")
    seconds = protocol_time(1024, clock=time.process_time)
    return [*made, Row(name="protocol, 1,024 ranks, a step", ours=seconds * 1e3, unit="ms", target=25.0, bound="max")]


# ------------------------------------------------------------------ building


def _build_many(folder: Path, repeats: int) -> Row:
    groups = [(g.id, encode(samples_of(g))) for g in make_groups(CASES["fixed"], range(256), "many")]
    packing = Packing(ranks=64, seq_len=SEQ_LEN)
    return build_row("4,096 x 4k for 64 ranks: build a step", folder / "many", groups, packing, 400.0, repeats)


def _build_long(folder: Path, repeats: int) -> Row:
    rng = np.random.default_rng(0)
    groups = [(f"long-{number}", encode(_long_group(rng, f"long-{number}"))) for number in range(4)]
    packing = Packing(ranks=2, seq_len=32_768)
    return build_row("1.92 M tokens for 2 ranks: build a step", folder / "long", groups, packing, 22.0, repeats)


def build_row(
    name: str, folder: Path, groups: Sequence[tuple[str, bytes]], packing: Packing, target_ms: float, repeats: int
) -> Row:
    """From the draw until every rank's payload is gathered: planned, written down, built."""
    settings = PlaneSettings(
        packing=packing, target=Target(groups=len(groups)), replay=Replay(max_times_sampled=1000), retain_steps=1
    )
    log = SqliteLog(folder)
    engine = DirectEngine(settings, log)
    try:
        outcomes = [engine.put(group, group, frame) for group, frame in groups] + engine.flush()
        assert not [outcome for outcome in outcomes if outcome and outcome.error], "a group was refused"
        wall, cpu = [], []
        for step in range(1, repeats + 1):
            begin, begin_cpu = time.perf_counter(), time.process_time()
            staged = engine.plan_step(step)
            wall.append(time.perf_counter() - begin)
            cpu.append(time.process_time() - begin_cpu)
            assert isinstance(staged, Staged), staged
    finally:
        log.close()
    note = f"CPU time; wall time {min(wall) * 1e3:.1f} to {max(wall) * 1e3:.1f} ms"
    return Row(name=name, ours=min(cpu) * 1e3, unit="ms", target=target_ms, bound="max", note=note)


# ------------------------------------------------------------------ the loop's turns


class _TimedServer(PlaneLoop):
    """Knows its longest turn."""

    longest_s = 0.0
    longest_cpu_s = 0.0
    """Of the loop's own thread: what is not in it, the thread waited for the interpreter or for a core."""

    def turn(self, now: float) -> None:
        begin, begin_cpu = time.perf_counter(), time.thread_time()
        super().turn(now)
        self.longest_s = max(self.longest_s, time.perf_counter() - begin)
        self.longest_cpu_s = max(self.longest_cpu_s, time.thread_time() - begin_cpu)


@contextmanager
def _served(
    settings: PlaneSettings, folder: Path | None, pipeline: Callable[[Engine, Workers], Pipeline] | None = None
) -> Iterator[_TimedServer]:
    """A plane in a thread of this process, over tcp; without a folder it keeps everything in memory."""
    made = _TimedServer(settings, SqliteLog(folder), [plane_transport("tcp://127.0.0.1:*")], pipeline=pipeline)
    thread = threading.Thread(target=made.run, name="penstock-plane", daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.stop()
        thread.join()


def longest_turn(folder: Path, case: str, *, rounds: int) -> Row:
    """How long the loop that answers heartbeats was away, at most, while producers put and a step was built."""
    groups = CASES[case].groups
    settings = PlaneSettings(packing=Packing(ranks=2, seq_len=SEQ_LEN), target=Target(groups=groups), retain_steps=1)
    longest, cpu = [], []
    with Crew(producer, 2) as producers, Crew(rank, 2) as ranks, _served(settings, folder / "turns") as server:
        join = {"do": "join", "plane": "a", "url": server.urls[0], "world": 2}
        producers.ask(join)
        ranks.ask(join)
        for number in range(rounds):
            producers.ask({"do": "prepare", "case": case, "name": f"turns-{number}"})
            server.longest_s = server.longest_cpu_s = 0.0
            ranks.tell({"do": "take", "plane": "a"})
            producers.ask({"do": "put", "plane": "a"})
            ranks.answers()
            longest.append(server.longest_s * 1e3)
            cpu.append(server.longest_cpu_s * 1e3)
            ranks.ask({"do": "commit", "plane": "a"})
        producers.ask({"do": "leave", "plane": "a"})
        ranks.ask({"do": "leave", "plane": "a"})
    return Row(
        name="router replay 512 x 4k, 2 ranks: longest turn of the plane's loop",
        ours=min(longest),
        unit="ms",
        target=100.0,
        bound="max",
        note=f"the longest of each round {_list(longest)} ms; CPU of the loop's thread {_list(cpu)} ms",
    )


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.0f}" for value in values)


# ------------------------------------------------------------------ a blocked producer


class _CountingTransport:
    """Counts messages that carry a payload."""

    def __init__(self, transport: ClientTransport) -> None:
        self._transport = transport
        self.sends = 0

    def send(self, header: bytes, frames: Frames = ()) -> None:
        self.sends += any(len(frame) > 1000 for frame in frames)
        self._transport.send(header, frames)

    def receive(self, timeout_s: float) -> Envelope | None:
        return self._transport.receive(timeout_s)

    def wake(self) -> None:
        self._transport.wake()

    def close(self) -> None:
        self._transport.close()


class _CountingIntake(Intake):
    """Counts the frames it checks, body and all."""

    checks = 0

    def check(self, group: str, frame: Buffer) -> GroupMetadata:
        self.checks += 1
        return super().check(group, frame)


def blocked_producer(seconds: float) -> Row:
    """A group of 1.5 MB is put to a plane without room for it: how often it is sent, and how often opened."""
    rng = np.random.default_rng(0)
    frames = [(f"{name}", encode(_long_group(rng, name))) for name in ("first", "second")]
    size = len(frames[1][1])
    settings = PlaneSettings(
        packing=Packing(ranks=1, seq_len=32_768), target=Target(groups=100), max_held_bytes=size + size // 2
    )
    intakes: list[_CountingIntake] = []
    lines: list[_CountingTransport] = []

    def pipeline(engine: Engine, workers: Workers) -> Pipeline:
        intakes.append(_CountingIntake(engine.settings, engine.writer))
        return Pipeline(engine, intakes[0], StepBuilder(engine.settings.packing, engine.storage), workers)

    def connect() -> ClientTransport:
        lines.append(_CountingTransport(client_transport(server.urls[0])))
        return lines[-1]

    with _served(settings, None, pipeline=pipeline) as server, Plane(connect, url=server.urls[0]) as plane:
        plane.put_frame(*frames[0])
        sends, checks = sum(line.sends for line in lines), intakes[0].checks
        try:
            plane.put_frame(*frames[1], timeout=seconds)
        except Overloaded:
            sends, checks = sum(line.sends for line in lines) - sends, intakes[0].checks - checks
        else:
            raise AssertionError("there was room for a group that must wait")
    return Row(
        name=f"a producer blocked for {seconds:g} s with a group of {size / 1e6:.1f} MB: times it was sent or opened",
        ours=max(sends, checks),
        target=1.0,
        bound="max",
        note=f"sent {sends} times, opened {checks} times",
    )


def _long_group(rng: np.random.Generator, name: str) -> list[Sample]:
    """Sixteen answers of 15,000 tokens to a prompt of as many: 1.5 MB."""
    prompt = data.text(rng, 15_000)
    return [data.sample(rng, prompt, 15_000, f"{name}/{i}") for i in range(16)]


# ------------------------------------------------------------------ metadata alone


def metadata_rows(folder: Path, *, groups: int = 4096, ranks: int = 1024) -> list[Row]:
    """A plane that sees metadata and no frames, in a process of its own, whose memory is counted."""
    command = [sys.executable, "-m", "benchmarks.metadata_only", str(folder / "metadata"), str(groups), str(ranks)]
    found = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)
    what = f"metadata only: plan {groups * 16:,} samples for {ranks:,} ranks"
    note = f"CPU time; wall time {found['plan_s']:.2f} s"
    return [
        Row(name="metadata only: groups/s", ours=found["groups_per_s"], unit="/s", target=5000.0, bound="min"),
        Row(name=what, ours=found["cpu_s"], unit="s", target=1.3, bound="max", note=note),
        Row(name=f"{what}: memory", ours=found["peak_bytes"] / 1e6, unit="MB", target=200.0, bound="max"),
    ]
