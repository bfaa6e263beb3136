"""Durable puts: groups of 64 samples of 4 KiB, acknowledged when they are on disk, against raw SQLite and a raw sync.

Producers put one group after another, each waiting for its acknowledgement; the plane writes what several of them
put with one sync. The disk is part of the figure: the same run measures how fast it makes 256 KiB durable with
nothing of ours in between. Planes, raw SQLite and raw sync take turns, round by round; medians are compared, and the
notes carry the spread.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks import data
from benchmarks.disk import disk_folder
from benchmarks.report import Row
from penstock.arrays import Samples
from penstock.client.api import open as open_plane
from penstock.client.plane import Plane
from penstock.frames import encode
from penstock.server.plane_process import PlaneProcess
from penstock.server.watchdog import die_with_parent

SIZE = 64
"""Samples per group."""
THREADS = 4
PROCESSES = 2
ROUNDS = 5
_PROMPT, _COMPLETION = 200, 650
"""Tokens; 64 such samples encode to 256 KiB."""
_SERVE = ("--ranks=1", "--seq-len=2048", "--groups-per-step=65536")

Frames: TypeAlias = list[tuple[str, bytes]]
"""(group id, encoded group)."""


@dataclass(frozen=True, slots=True)
class Puts:
    """What producers saw."""

    acks: NDArray[np.float64]
    """Seconds from each put to its acknowledgement."""
    seconds: float
    """From the first put to the last acknowledgement."""
    cpu_s: float = 0.0
    """CPU seconds of this process meanwhile: what the disk and other programs do not change."""

    @property
    def samples_per_s(self) -> float:
        return SIZE * len(self.acks) / self.seconds


def run(*, full: bool, progress: Callable[[str], None], groups: int | None = None) -> list[Row]:
    count = ROUNDS * (groups or (640 if full else 160))
    progress(f"encoding {count} groups of {SIZE} samples")
    frames = make_frames("inside", count)
    size = len(frames[0][1])
    with ExitStack() as opened:
        folder = opened.enter_context(disk_folder())
        inside = opened.enter_context(open_plane(folder / "inside", ranks=1, seq_len=2048, groups_per_step=1 << 16))
        progress("a plane in a process of its own")
        served = opened.enter_context(_served(folder, count))
        disk = opened.enter_context(_RawDisk(folder, size))
        found = _take_turns(progress, lambda i: produce(inside, frames[i::ROUNDS], THREADS), served, disk, frames)
    sync, sqlite = (np.concatenate(times) for times in (disk.syncs, disk.commits))
    embedded, apart = found
    alone = SIZE / float(np.median(sqlite))
    return [
        *_rows(f"embedded, {THREADS} threads", embedded, alone, at_least=10_000),
        Row(
            name="embedded: samples per CPU second, producers and plane",
            ours=median(SIZE * len(puts.acks) / puts.cpu_s for puts in embedded),
            unit="/s",
            note="does not depend on the disk or on what else the machine does",
        ),
        *_rows(f"served, {PROCESSES} producer processes", apart, alone, at_least=5_000),
        Row(name=f"raw fdatasync of {size:,} B", ours=float(np.median(sync)) * 1e3, unit="ms", note=_spread(sync)),
        Row(name="raw SQLite commit of the same", ours=float(np.median(sqlite)) * 1e3, unit="ms", note=_spread(sqlite)),
    ]


def _rows(name: str, rounds: list[Puts], alone: float, *, at_least: float) -> list[Row]:
    rates = [puts.samples_per_s for puts in rounds]
    late = [float(np.percentile(puts.acks, 99)) * 1e3 for puts in rounds]
    return [
        Row(
            name=f"{name}: samples/s",
            ours=median(rates),
            rival=alone,
            rival_name="raw SQLite, a commit per group",
            ratio=median(rates) / alone,
            unit="/s",
            target=at_least,
            bound="min",
            note=f"{len(rounds)} rounds of {len(rounds[0].acks)} groups, {min(rates):,.0f} to {max(rates):,.0f}/s",
        ),
        Row(
            name=f"{name}: acknowledgement p99",
            ours=median(late),
            unit="ms",
            target=60.0,
            bound="max",
            note=f"the worst round {max(late):.1f}; all: {_spread(np.concatenate([p.acks for p in rounds]))}",
        ),
    ]


def _spread(times: NDArray[np.float64]) -> str:
    low, middle, late, high = np.percentile(times, [0, 50, 95, 99]) * 1e3
    return f"min {low:.1f}, median {middle:.1f}, p95 {late:.1f}, p99 {high:.1f} ms of {len(times)}"


def make_frames(name: str, count: int) -> Frames:
    """Groups of 64 samples that share a prompt, about 4 KiB each when encoded; all different, as ids are."""
    rng = np.random.default_rng(1)
    prompt = data.text(rng, _PROMPT)
    one = Samples.of([data.sample(rng, prompt, _COMPLETION, f"group/{i}") for i in range(SIZE)])
    made = []
    for number in range(count):
        group = f"{name}-{number}"
        text = {**one.text, "group": (group,) * SIZE, "id": tuple(f"{group}/{i}" for i in range(SIZE))}
        renamed = Samples(columns=one.columns, text=text, policy_versions=one.policy_versions)
        made.append((group, encode(renamed)))
    return made


# ------------------------------------------------------------------ ours


def _take_turns(
    progress: Callable[[str], None],
    embedded: Callable[[int], Puts],
    served: Callable[[], Puts],
    disk: _RawDisk,
    frames: Frames,
) -> tuple[list[Puts], list[Puts]]:
    """One round of each after the other. The first ones warm up and do not count."""
    inside, apart = [], []
    for number in range(ROUNDS):
        progress(f"round {number + 1} of {ROUNDS}")
        inside.append(embedded(number))
        apart.append(served())
        disk.round(frames[number :: 4 * ROUNDS])
    disk.warmed_up()
    return inside[1:], apart[1:]


@contextmanager
def _served(folder: Path, count: int) -> Iterator[Callable[[], Puts]]:
    """Producers in processes of their own, which encode first and begin each round together."""
    spawn = multiprocessing.get_context("spawn")
    with PlaneProcess([str(folder / "served"), *_SERVE, f"--listen=ipc://{folder}/socket"]) as plane:
        pipes = [spawn.Pipe() for _ in range(PROCESSES)]
        workers = []
        for number, (_, pipe) in enumerate(pipes):
            given = (os.getpid(), plane.url, number, count // PROCESSES, pipe)
            workers.append(spawn.Process(target=_worker, args=given, daemon=True))
            workers[-1].start()
        for ours, _ in pipes:
            ours.recv_bytes()
        yield lambda: _round([ours for ours, _ in pipes])
        for worker in workers:
            worker.join()


def _round(pipes: list[Connection]) -> Puts:
    for pipe in pipes:
        pipe.send_bytes(b"go")
    begin = time.perf_counter()
    acks = np.concatenate([np.frombuffer(pipe.recv_bytes()) for pipe in pipes])
    return Puts(acks, time.perf_counter() - begin)


def _worker(parent: int, url: str, number: int, count: int, pipe: Connection) -> None:
    if not die_with_parent(parent, signal.SIGKILL):
        return
    frames = make_frames(f"worker-{number}", count)
    with open_plane(url) as plane:
        pipe.send_bytes(b"ready")
        for i in range(ROUNDS):
            pipe.recv_bytes()
            pipe.send_bytes(produce(plane, frames[i::ROUNDS], THREADS // PROCESSES).acks.tobytes())


def produce(plane: Plane, frames: Frames, threads: int) -> Puts:
    """Put all groups from several threads, each waiting for one acknowledgement before its next put."""
    acks: list[float] = []

    def put(mine: Frames) -> None:
        for group, frame in mine:
            begin = time.perf_counter()
            plane.put_frame(group, frame)
            acks.append(time.perf_counter() - begin)

    workers = [threading.Thread(target=put, args=(frames[i::threads],)) for i in range(threads)]
    begin, cpu = time.perf_counter(), time.process_time_ns()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(acks) == len(frames), "a put failed"
    return Puts(np.array(acks), time.perf_counter() - begin, (time.process_time_ns() - cpu) / 1e9)


# ------------------------------------------------------------------ the disk by itself


class _RawDisk:
    """The same bytes without us: appended to a file and synced, and inserted into SQLite with the log's settings."""

    def __init__(self, folder: Path, size: int) -> None:
        self._block, self._folder = os.urandom(size), folder
        self.syncs: list[NDArray[np.float64]] = []
        self.commits: list[NDArray[np.float64]] = []

    def __enter__(self) -> Self:
        self._file = (self._folder / "raw").open("wb", buffering=0)
        self._log = sqlite3.connect(self._folder / "raw.sqlite", isolation_level=None)
        for pragma in ("page_size=16384", "journal_mode=WAL", "synchronous=FULL"):
            self._log.execute(f"PRAGMA {pragma}")
        self._log.execute("CREATE TABLE groups (id TEXT PRIMARY KEY, frame BLOB)")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._log.close()

    def round(self, frames: Frames) -> None:
        """Sync and commit once for each of these groups."""
        syncs, commits = [], []
        for group, frame in frames:
            begin = time.perf_counter()
            self._file.write(self._block)
            os.fdatasync(self._file.fileno())
            middle = time.perf_counter()
            self._log.execute("INSERT INTO groups VALUES (?, ?)", (group, frame))
            syncs.append(middle - begin)
            commits.append(time.perf_counter() - middle)
        self.syncs.append(np.array(syncs))
        self.commits.append(np.array(commits))

    def warmed_up(self) -> None:
        """Leave the first round out."""
        del self.syncs[0], self.commits[0]
