"""A run of real processes that are killed again and again, and what must be true of it afterwards.

One plane, two producers, four ranks. `kill -9` hits one of them at a random moment, and it is started again. In the
end every acknowledged group must be there, every group must be in exactly one trained step, and every rank must have
been given, each time, the very bytes that an uninterrupted plane makes of the same groups. `scripts/torture` runs it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import BinaryIO, Protocol

import msgspec

from penstock.arrays import Sample
from penstock.frames import encode
from penstock.log import Log, SqliteLog, State, open_existing
from penstock.plane.manifest import Manifest
from penstock.plane.segments import OWN
from penstock.plane.settings import PlaneSettings
from penstock.protocol.steps import Staged
from tests.support.engines import DirectEngine
from tests.support.forked import Forked
from tests.support.ports import free_port
from tests.support.processes import SENT, STORED, Notes, evaluation_of, group_of, settings

TRANSPORTS = ("direct", "tcp", "file")
"""`direct`: tcp, and bytes go straight to storage; over the others they pass the plane. `hosts.py`,
`object_torture.py` and `cluster_torture.py` have one more each."""
RANKS, PRODUCERS = 4, 2


@dataclass(slots=True, kw_only=True)
class Result:
    """What came out."""

    transport: str
    kills: Counter[str] = field(default_factory=Counter)
    """By kind of process."""
    steps: int = 0
    groups: int = 0
    evaluated: int = 0
    """Evaluation groups among what was acknowledged."""
    lost: int = 0
    """Groups that were acknowledged and are not in the log."""
    doubled: int = 0
    """Groups trained twice, or not at all, in the committed lineage."""
    mismatches: int = 0
    """Steps given to a rank that differ from those of an uninterrupted run, and evaluation groups that were altered."""
    detect_s: float = 0.0
    """The longest time from the death of a rank until every other rank had raised."""
    seconds: float = 0.0
    outages: dict[str, list[float]] = field(default_factory=dict)
    """By kind of fault, seconds. On a Ray cluster: from each kill until the ranks had taken two more steps. On hosts
    apart: the longest time without a committed step from the fault until the first one after its end."""
    lasted: dict[str, list[float]] = field(default_factory=dict)
    """By kind of fault, seconds until what was paused or cut was mended, or what was killed was started again."""
    first_steps: list[float] = field(default_factory=list)
    """For each plane that was started on the other host, seconds from its start to its first committed step."""
    fenced: int = 0
    """Planes that were taken for dead, came back, and ended by themselves because another one had the run."""
    late_rows: int = 0
    """Transactions of a plane in the database after a later plane had begun to write."""
    late_changes: int = 0
    """Objects that a plane wrote or deleted in the bucket after it was resumed, or a second after a later one had moved
    the marker."""
    balanced: bool = True
    stored: Counter[str] = field(default_factory=Counter)
    """Puts and steps whose bytes went straight to storage or came from there, by process."""
    sent: Counter[str] = field(default_factory=Counter)
    """Those whose bytes passed the plane."""
    plane_written: int = 0
    """Frames, of those still in storage at the end, that the plane itself wrote."""
    read_bytes: int = 0
    """From storage, by ranks: what each had read at each step, added up."""

    def check_ways(self) -> None:
        """Check that all bytes took the expected transport, else raise AssertionError."""
        is_direct = self.transport in ("direct", "hosts", "objects", "cluster")
        wrong = self.sent if is_direct else self.stored
        assert not wrong and (self.read_bytes > 0) is is_direct, f"{self.transport}: bytes went another way: {self}"
        assert (self.plane_written == 0) is is_direct, f"{self.transport}: written by another process: {self}"

    @property
    def good(self) -> bool:
        wrong = self.lost or self.doubled or self.mismatches or self.late_rows or self.late_changes
        return not wrong and self.balanced and self.steps > 0


def address(transport: str, folder: Path) -> str:
    if transport in ("direct", "tcp"):
        return f"tcp://127.0.0.1:{free_port()}"
    return f"file://{folder}/transport" if transport == "file" else f"{transport}://torture"


class Started(Protocol):
    """A process that was started here; `subprocess.Popen` is one."""

    def poll(self) -> int | None: ...
    def wait(self) -> int: ...
    def kill(self) -> None: ...
    def send_signal(self, sig: int) -> None: ...
    @property
    def pid(self) -> int: ...


class Run:
    """The processes, and the hand that kills them."""

    kinds: tuple[str, ...] = ("plane", "producer", "rank")
    patience_s = 120.0
    ranks = RANKS
    tail = 10
    """Steps that are trained after the last kill."""

    def __init__(self, folder: Path, transport: str, seed: int) -> None:
        self.folder, self.result = folder, Result(transport=transport)
        self._url, self._rng = address(transport, folder), Random(seed)
        self._names = [f"{kind}-0" for kind in self.kinds if kind not in ("producer", "rank")]
        self._names += [*(f"producer-{i}" for i in range(PRODUCERS)), *(f"rank-{i}" for i in range(self.ranks))]
        self._processes: dict[str, Started] = {}

    def start(self, name: str) -> None:
        kind, number = name.split("-")
        of = PRODUCERS if kind == "producer" else self.ranks
        words = [kind, str(self.place(name)), self._url, number, str(of), f"--parent={os.getpid()}"]
        words += self.options(name)
        with (self.folder / f"{name}.err").open("ab") as errors:
            self._processes[name] = self.launch(name, words, errors)

    def launch(self, name: str, words: list[str], errors: BinaryIO) -> Started:
        prefix = self.prefix(name)
        if not prefix:
            return Forked("tests.support.processes", words, stderr=errors.fileno(), stdout=errors.fileno())
        command = [*prefix, sys.executable, "-m", "tests.support.processes", *words]
        return subprocess.Popen(command, stderr=errors, stdout=errors)

    def prefix(self, name: str) -> list[str]:
        """What comes before the command of a process, as in `nsenter ...`."""
        return []

    def place(self, name: str) -> Path:
        """The folder of a process's notes."""
        return self.folder

    def options(self, name: str) -> list[str]:
        return [] if self.result.transport in ("direct", "ray") else ["--inline"]

    def kill(self, name: str) -> float:
        """Returns the moment of death."""
        process = self._processes[name]
        process.kill()
        process.wait()
        return time.monotonic()

    def go(self, kills: int, progress: Callable[[str], None], pause_s: float = 0.5) -> Result:
        began = time.monotonic()
        for name in self._names:
            self.start(name)
        try:
            for number in range(kills):
                self._kill_one(pause_s)
                progress(f"{self.result.transport}: {number + 1} of {kills} kills, step {self._step()}")
            self._finish()
        finally:
            for process in self._processes.values():
                process.send_signal(signal.SIGKILL)
                process.wait()
        self.end()
        self._judge()
        self.result.seconds = time.monotonic() - began
        return self.result

    def end(self) -> None:
        """End what is no process of ours."""

    def settings(self) -> PlaneSettings:
        """Of the run's plane."""
        return settings(self.ranks)

    @property
    def log_folder(self) -> Path:
        return self.folder / "run"

    def open_log(self) -> Log:
        """Open the run's log, once all processes have ended."""
        return open_existing(self.log_folder)

    # -------------------------------------------------------------- inside

    def _step(self) -> int:
        """The last step that any rank took."""
        taken = [int(w[1]) for rank in range(self.ranks) for w in Notes.read(self._notes(rank))[-3:] if w[0] == "step"]
        return max(taken, default=0)

    def _notes(self, rank: int) -> Path:
        return self.place(f"rank-{rank}") / f"rank{rank}.notes"

    def _noted(self, number: int) -> list[list[str]]:
        """What a producer noted."""
        return Notes.read(self.place(f"producer-{number}") / f"producer{number}.acked")

    def _kill_one(self, pause_s: float) -> None:
        """Wait until the run moves again, then a random moment, then kill."""
        self._await_step(self._step() + 1)
        time.sleep(self._rng.random() * pause_s)
        kind = self._rng.choice(self.kinds)
        name = self._rng.choice([name for name in self._names if name.startswith(kind)])
        raised = [len(self._raises(rank)) for rank in range(self.ranks)]
        died = self.kill(name)
        self.result.kills[kind] += 1
        if kind == "rank":
            self._await_raises(int(name.split("-")[1]), raised, died)
        self.start(name)

    def _raises(self, rank: int) -> list[float]:
        return [float(words[1]) for words in Notes.read(self._notes(rank)) if words[0] == "raised"]

    def _await_raises(self, dead: int, before: list[int], died: float) -> None:
        """How long it took until every other rank knew."""
        others = [rank for rank in range(self.ranks) if rank != dead]
        while any(len(self._raises(rank)) <= before[rank] for rank in others):
            self._check_alive()
            if time.monotonic() - died > self.patience_s:
                raise AssertionError(
                    f"rank {dead} died, and after {self.patience_s} s not every other rank had raised: {self.folder}"
                )
            time.sleep(0.02)
        took = max(self._raises(rank)[before[rank]] - died for rank in others)
        self.result.detect_s = max(self.result.detect_s, took)

    def _await_step(self, step: int) -> None:
        deadline = time.monotonic() + self.patience_s
        while self._step() < step:
            self._check_alive()
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"no step {step} within {self.patience_s} s, the last was {self._step()}: {self.folder}"
                )
            time.sleep(0.02)

    def _check_alive(self) -> None:
        for name, process in self._processes.items():
            if process.poll() not in (None, -signal.SIGKILL, 0):
                raise AssertionError(f"{name} ended by itself: {(self.folder / f'{name}.err').read_text()[-3000:]}")

    def _finish(self) -> None:
        last = self._step() + self.tail
        for folder in {self.place(f"rank-{rank}") for rank in range(self.ranks)}:
            (folder / ".last").write_text(str(last))
            os.replace(folder / ".last", folder / "last")  # noqa: PTH105
        deadline = time.monotonic() + self.patience_s
        while not any(w[0] == "done" for rank in range(self.ranks) for w in Notes.read(self._notes(rank))[-3:]):
            self._check_alive()
            if time.monotonic() > deadline:
                raise AssertionError(f"not finished in time, at step {self._step()} of {last}: {self.folder}")
            time.sleep(0.02)
        self.result.steps = last

    def _judge(self) -> None:
        """Compare with what an uninterrupted plane makes of the same groups."""
        result, log = self.result, self.open_log()
        engine = DirectEngine(self.settings(), log)
        evaluated = {row.id: row.location for row in log.groups_in(State.EVALUATION)}
        names = {row.op: row.id for row in log.groups() if row.id not in evaluated}
        result.groups, result.evaluated = len(names), len(evaluated)
        acked = {w[0] for n in range(PRODUCERS) for w in self._noted(n)}
        result.lost = len({name for name in acked if name[0] == "g"} - set(names.values()))
        result.lost += len({name for name in acked if name[0] == "e"} - set(evaluated))
        result.balanced = engine.ledger.balanced
        trained = Counter(
            names[op]
            for step, _, manifest, _ in log.steps()
            if step < engine.next_step
            for op in msgspec.msgpack.decode(manifest, type=Manifest).groups
        )
        expected = [names[op] for op in sorted(names)][: 2 * (engine.next_step - 1)]
        result.doubled = sum((trained - Counter(expected)).values()) + sum((Counter(expected) - trained).values())
        given = [(rank, int(w[1]), w[2].split()[0]) for rank in range(self.ranks) for w in self._steps_of(rank)]
        digests = uninterrupted([names[op] for op in sorted(names)], result.steps, self.ranks)
        result.mismatches = sum(digests[step - 1][rank] != digest for rank, step, digest in given)
        result.mismatches += sum(
            bytes(engine.storage.read(row.location)[0]) != encode(_content_of(row.id))
            for row in log.groups()
            if row.location
        )
        self._count_ways()
        writers = {segment.name: segment.writer for segment in log.segments()}
        found = (writers.get(row.location.partition(":")[0]) for row in log.groups() if row.location)
        result.plane_written = sum(writer == OWN for writer in found)
        log.close()

    def _steps_of(self, rank: int) -> list[list[str]]:
        return [words for words in Notes.read(self._notes(rank)) if words[0] == "step"]

    def _count_ways(self) -> None:
        for number in range(PRODUCERS):
            for words in self._noted(number):
                (self.result.stored if words[1] == STORED else self.result.sent)[f"producer-{number}"] += 1
        for rank in range(self.ranks):
            for words in self._steps_of(rank):
                way = words[2].split()[1]
                (self.result.sent if way == SENT else self.result.stored)[f"rank-{rank}"] += 1
                self.result.read_bytes += 0 if way == SENT else int(way)


def _content_of(name: str) -> list[Sample]:
    return (group_of if name[0] == "g" else evaluation_of)(int(name[1:]))


def uninterrupted(names: list[str], steps: int, ranks: int = RANKS) -> list[list[str]]:
    """Each step's digests by rank, from a plane that nothing happens to."""
    engine = DirectEngine(settings(ranks), SqliteLog(None))
    digests: list[list[str]] = []
    waiting = iter(names)
    while len(digests) < steps:
        made = engine.plan_step(len(digests) + 1)
        if isinstance(made, Staged):
            digests.append(made.digests)
            engine.commit(made.step, None)
        else:
            name = next(waiting)
            assert engine.put(0, name, encode(group_of(int(name[1:])))) is None
            assert engine.flush()[0].error is None
    engine.log.close()
    return digests


def torture(
    folder: Path, transport: str, *, kills: int, seed: int = 0, progress: Callable[[str], None] = lambda _: None
) -> Result:
    """Kill a run's processes `kills` times. Keeps the folder if anything was wrong."""
    folder.mkdir(parents=True)
    result = Run(folder, transport, seed).go(kills, progress)
    result.check_ways()
    if result.good:
        shutil.rmtree(folder)
    return result
