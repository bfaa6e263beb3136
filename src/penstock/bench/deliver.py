"""Handing a step to the ranks of one host: our carriers against raw ZeroMQ, raw shared memory, Ray and Python's queue.

A step of 64 MB goes to four processes, 16 MB each. The time is from the first send until the last process has read
every byte of its part and said so. Ways take turns, round by round, so that noise hits all alike; the minimum is
compared, and the notes carry the spread. Everything runs on the same cores, as it would on a trainer's host.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import util
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue
from pathlib import Path

import numpy as np

from penstock.bench.links import (
    PATIENCE_S,
    Link,
    OurLink,
    OurRankLink,
    QueueLink,
    QueueRankLink,
    RankLink,
    RawSharedLink,
    RawSharedRankLink,
    RawZmqLink,
    RawZmqRankLink,
    digest,
)
from penstock.bench.programs import Program, Wanted, WayFailed, started
from penstock.bench.report import Row, faster, skipped
from penstock.send.shared_memory import SEGMENTS
from penstock.serve.clients.api import client_carrier, plane_carrier
from penstock.serve.process.watchdog import die_with_parent

RANKS = 4
TCP, IPC, SHARED = "our tcp", "our ipc", "our shared memory"
RAW_TCP, RAW_IPC, RAW_SHARED, QUEUE = (
    "raw ZeroMQ tcp",
    "raw ZeroMQ ipc",
    "raw memcpy in /dev/shm",
    "multiprocessing.Queue",
)
_WAYS = (TCP, RAW_TCP, IPC, RAW_IPC, SHARED, RAW_SHARED, QUEUE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where a rank finds each way's other end."""

    urls: dict[str, str]
    folder: Path
    """Of the raw shared memory."""
    num_bytes: int
    """Per rank."""


def run(
    *,
    full: bool,
    progress: Callable[[str], None],
    rivals: str | None = None,
    num_bytes: int = 64_000_000,
    repeats: int | None = None,
) -> list[Row]:
    rounds = repeats or (25 if full else 9)
    frames = [np.random.default_rng(rank).bytes(num_bytes // RANKS) for rank in range(RANKS)]
    progress(f"starting {RANKS} ranks")
    with _ray_store(rivals, num_bytes) as store, _links(num_bytes // RANKS) as (links, call):
        large = _measure(links, call, frames, rounds, progress, f"a step of {num_bytes / 1e6:g} MB", store)
        empty = _measure(links, call, [b""] * RANKS, rounds * 8, progress, "an empty step")
    return [*_large_rows(large, num_bytes), _store_row(large[SHARED], store, num_bytes), *_empty_rows(empty)]


class _RayStore:
    """The object store in its own program, which takes its turn in every round; or why there is none."""

    def __init__(self, program: Program | None, why: str, num_bytes: int) -> None:
        self._program, self.why, self._num_bytes = program, why, num_bytes
        self.times: list[float] = []

    def round(self, *, counts: bool) -> None:
        if self._program is None or self.why:
            return
        try:
            took = self._program.round(ranks=RANKS, num_bytes=self._num_bytes)
        except WayFailed as error:
            self.why = str(error)
            return
        self.times += [took["seconds"]] if counts else []


@contextmanager
def _ray_store(rivals: str | None, num_bytes: int) -> Iterator[_RayStore]:
    python = rivals or (sys.executable if util.find_spec("ray") else None)
    absent = "ray is not installed; name an interpreter that has it with --rivals"
    wanted = {"store": Wanted(module="ray_store", python=python, absent=absent, needs="ray", alone=True)}
    with started(wanted, Path(tempfile.gettempdir())) as (programs, why):
        yield _RayStore(programs.get("store"), why.get("store", ""), num_bytes)


def _store_row(ours: list[float], store: _RayStore, num_bytes: int) -> Row:
    name, rival = f"{num_bytes / 1e6:g} MB to {RANKS} ranks: {SHARED}", "Ray object store"
    if store.why:
        return skipped(name, store.why, ours=min(ours) * 1e3, unit="ms", rival_name=rival, target=5.0)
    note = _spreads({SHARED: ours, rival: store.times}, SHARED, rival)
    return faster(name, min(ours), min(store.times), rival, target=5.0, note=note)


def _large_rows(times: dict[str, list[float]], num_bytes: int) -> list[Row]:
    name = f"{num_bytes / 1e6:g} MB to {RANKS} ranks"
    pairs = [
        (SHARED, TCP, None),
        (SHARED, IPC, None),  # raw memcpy itself is only about twice as fast as ipc: one copy instead of two
        (TCP, RAW_TCP, 0.8),
        (IPC, RAW_IPC, 0.8),
        (SHARED, RAW_SHARED, 0.9),
        (SHARED, QUEUE, None),
        (TCP, QUEUE, None),
    ]
    return [
        faster(
            f"{name}: {ours}",
            min(times[ours]),
            min(times[rival]),
            rival,
            target=target,
            note=f"{num_bytes / min(times[ours]) / 1e9:.2f} GB/s; {_spreads(times, ours, rival)}",
        )
        for ours, rival, target in pairs
    ]


def _empty_rows(times: dict[str, list[float]]) -> list[Row]:
    pairs = [(TCP, RAW_TCP), (IPC, RAW_IPC), (SHARED, RAW_SHARED)]
    return [
        faster(
            f"an empty step and its answers: {ours}",
            statistics.median(times[ours]),
            statistics.median(times[rival]),
            rival,
            note=f"medians; {_spreads(times, ours, rival)}",
        )
        for ours, rival in pairs
    ]


def _spreads(times: dict[str, list[float]], *names: str) -> str:
    def spread(name: str) -> str:
        low, middle, high = min(times[name]), statistics.median(times[name]), max(times[name])
        return f"{name} {low * 1e3:.2f} to {high * 1e3:.2f} ms, median {middle * 1e3:.2f}"

    return "; ".join(spread(name) for name in names)


def _measure(
    links: dict[str, Link],
    call: Callable[[str], None],
    frames: list[bytes],
    rounds: int,
    progress: Callable[[str], None],
    what: str,
    beside: _RayStore | None = None,
) -> dict[str, list[float]]:
    """Seconds of each way in each round; the first rounds, in which memory is mapped, do not count."""
    expected = [digest(frame) for frame in frames]
    times: dict[str, list[float]] = {name: [] for name in links}
    names = list(links)
    for number in range(-SEGMENTS, rounds):
        progress(f"{what}, round {max(number + 1, 0)} of {rounds}")
        names = [*names[1:], names[0]]  # nobody always comes after the one that leaves most behind
        for name in names:
            call(name)
            begin = time.perf_counter()
            got = links[name].step(frames)
            seconds = time.perf_counter() - begin
            assert got == expected, f"{name}: other bytes arrived than were sent"
            if number >= 0:
                times[name].append(seconds)
        if beside is not None:
            beside.round(counts=number >= 0)
    return times


@contextmanager
def _links(num_bytes: int) -> Iterator[tuple[dict[str, Link], Callable[[str], None]]]:
    """All ways, joined by the same four processes; and a call that makes these wait for a step by one of them."""
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        base = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-"))
        pipes = {name: [spawn.Pipe() for _ in range(RANKS)] for name in ("call", RAW_SHARED, QUEUE)}
        queues: list[Queue[bytes]] = [spawn.Queue() for _ in range(RANKS)]
        links = _plane_ends(base, {name: [one for one, _ in pairs] for name, pairs in pipes.items()}, queues, num_bytes)
        for link in links.values():
            stack.callback(link.close)
        shared = links[RAW_SHARED]
        assert isinstance(shared, RawSharedLink)
        places = Places(
            urls={name: _url(link) for name, link in links.items()}, folder=shared.folder, num_bytes=num_bytes
        )
        for rank in range(RANKS):
            ends = {name: pairs[rank][1] for name, pairs in pipes.items()}
            process = spawn.Process(target=_rank, args=(os.getpid(), rank, places, ends, queues[rank]), daemon=True)
            process.start()
            stack.callback(_end, process)

        def call(name: str) -> None:
            for one, _ in pipes["call"]:
                one.send_bytes(name.encode())
            for one, _ in pipes["call"]:
                assert one.poll(PATIENCE_S), f"{name}: a rank did not answer"
                one.recv_bytes()

        for one, _ in pipes["call"]:
            stack.callback(one.send_bytes, b"")
        for link in links.values():
            link.join()
        yield links, call


def _plane_ends(
    base: str, pipes: dict[str, list[Connection]], queues: list[Queue[bytes]], num_bytes: int
) -> dict[str, Link]:
    ends: dict[str, Link] = {
        TCP: OurLink(plane_carrier("tcp://127.0.0.1:*"), RANKS),
        IPC: OurLink(plane_carrier(f"ipc://{base}/our"), RANKS),
        SHARED: OurLink(plane_carrier(f"shm+ipc://{base}/shared"), RANKS),
        RAW_TCP: RawZmqLink("tcp://127.0.0.1:*", RANKS),
        RAW_IPC: RawZmqLink(f"ipc://{base}/raw", RANKS),
        RAW_SHARED: RawSharedLink(pipes[RAW_SHARED], num_bytes),
        QUEUE: QueueLink(pipes[QUEUE], queues),
    }
    return {name: ends[name] for name in _WAYS}


def _url(link: Link) -> str:
    if isinstance(link, OurLink):
        return link.carrier.url
    return link.url if isinstance(link, RawZmqLink) else ""


def _end(process: multiprocessing.process.BaseProcess) -> None:
    process.join(10)
    if process.is_alive():
        process.kill()
        process.join()


def _rank(parent: int, rank: int, places: Places, pipes: dict[str, Connection], queue: Queue[bytes]) -> None:
    """A rank's process: joins all ways, then takes a step by the way it is called for."""
    if not die_with_parent(parent, signal.SIGKILL):
        return
    ways: dict[str, RankLink] = {
        **{name: OurRankLink(client_carrier(places.urls[name]), rank) for name in (TCP, IPC, SHARED)},
        **{name: RawZmqRankLink(places.urls[name], rank) for name in (RAW_TCP, RAW_IPC)},
        RAW_SHARED: RawSharedRankLink(pipes[RAW_SHARED], places.folder, rank, places.num_bytes),
        QUEUE: QueueRankLink(pipes[QUEUE], queue),
    }
    for way in ways.values():
        way.join()
    while name := pipes["call"].recv_bytes().decode():
        pipes["call"].send_bytes(b"listening")
        ways[name].take()
    for way in ways.values():
        way.close()
