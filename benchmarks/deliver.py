"""Handing a step to the ranks of one host: our sockets against raw ZeroMQ and Python's queue.

A step of 64 MB goes to four processes, 16 MB each. The time is from the first send until the last process has read
every byte of its part and confirmed it. Systems take turns, round by round, so that noise hits all alike. The minimum
is compared, and the notes carry the spread. Everything runs on the same cores, as it would on a trainer's host.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue

import numpy as np

from benchmarks.links import (
    PATIENCE_S,
    Link,
    OurLink,
    OurRankLink,
    QueueLink,
    QueueRankLink,
    RankLink,
    RawZmqLink,
    RawZmqRankLink,
    digest,
)
from benchmarks.report import Row, Spread, faster
from penstock.client import client_transport, plane_transport
from penstock.server.watchdog import die_with_parent

RANKS = 4
TCP, IPC = "our tcp", "our ipc"
RAW_TCP, RAW_IPC, QUEUE = "raw ZeroMQ tcp", "raw ZeroMQ ipc", "multiprocessing.Queue"
_WAYS = (TCP, RAW_TCP, IPC, RAW_IPC, QUEUE)
_WARM_UP = 4
"""Rounds that do not count: memory is mapped in them."""


def run(
    *,
    full: bool,
    progress: Callable[[str], None],
    num_bytes: int = 64_000_000,
    repeats: int | None = None,
) -> list[Row]:
    rounds = repeats or (25 if full else 9)
    frames = [np.random.default_rng(rank).bytes(num_bytes // RANKS) for rank in range(RANKS)]
    progress(f"starting {RANKS} ranks")
    with _links() as (links, call):
        large = _measure(links, call, frames, rounds, progress, f"a step of {num_bytes / 1e6:g} MB")
        empty = _measure(links, call, [b""] * RANKS, rounds * 8, progress, "an empty step")
    return [*_large_rows(large, num_bytes), *_empty_rows(empty)]


def _large_rows(times: dict[str, list[float]], num_bytes: int) -> list[Row]:
    name = f"{num_bytes / 1e6:g} MB to {RANKS} ranks"
    pairs = [
        (TCP, RAW_TCP, 0.8),
        (IPC, RAW_IPC, 0.8),
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
    pairs = [(TCP, RAW_TCP), (IPC, RAW_IPC)]
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
    return "; ".join(f"{name} {Spread.of(times[name])}" for name in names)


def _measure(
    links: dict[str, Link],
    call: Callable[[str], None],
    frames: list[bytes],
    rounds: int,
    progress: Callable[[str], None],
    what: str,
) -> dict[str, list[float]]:
    """Measure the seconds of each system in each round. The first rounds do not count."""
    expected = [digest(frame) for frame in frames]
    times: dict[str, list[float]] = {name: [] for name in links}
    names = list(links)
    for number in range(-_WARM_UP, rounds):
        progress(f"{what}, round {max(number + 1, 0)} of {rounds}")
        names = [*names[1:], names[0]]  # rotate, so that none always follows the one that leaves most memory behind
        for name in names:
            call(name)
            begin = time.perf_counter()
            got = links[name].step(frames)
            seconds = time.perf_counter() - begin
            assert got == expected, f"{name}: other bytes arrived than were sent"
            if number >= 0:
                times[name].append(seconds)
    return times


@contextmanager
def _links() -> Iterator[tuple[dict[str, Link], Callable[[str], None]]]:
    """Open all systems in the same four processes. Yields them and a call that has the ranks wait for a step."""
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        base = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-"))
        pipes = {name: [spawn.Pipe() for _ in range(RANKS)] for name in ("call", QUEUE)}
        queues: list[Queue[bytes]] = [spawn.Queue() for _ in range(RANKS)]
        links = _plane_ends(base, [one for one, _ in pipes[QUEUE]], queues)
        for link in links.values():
            stack.callback(link.close)
        urls = {name: _url(link) for name, link in links.items()}
        for rank in range(RANKS):
            ends = {name: pairs[rank][1] for name, pairs in pipes.items()}
            process = spawn.Process(target=_rank, args=(os.getpid(), rank, urls, ends, queues[rank]), daemon=True)
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


def _plane_ends(base: str, pipes: list[Connection], queues: list[Queue[bytes]]) -> dict[str, Link]:
    ends: dict[str, Link] = {
        TCP: OurLink(plane_transport("tcp://127.0.0.1:*"), RANKS),
        IPC: OurLink(plane_transport(f"ipc://{base}/our"), RANKS),
        RAW_TCP: RawZmqLink("tcp://127.0.0.1:*", RANKS),
        RAW_IPC: RawZmqLink(f"ipc://{base}/raw", RANKS),
        QUEUE: QueueLink(pipes, queues),
    }
    return {name: ends[name] for name in _WAYS}


def _url(link: Link) -> str:
    if isinstance(link, OurLink):
        return link.transport.url
    return link.url if isinstance(link, RawZmqLink) else ""


def _end(process: multiprocessing.process.BaseProcess) -> None:
    process.join(10)
    if process.is_alive():
        process.kill()
        process.join()


def _rank(parent: int, rank: int, urls: dict[str, str], pipes: dict[str, Connection], queue: Queue[bytes]) -> None:
    """Run a rank's process: join all systems, then take each step through the requested one."""
    if not die_with_parent(parent, signal.SIGKILL):
        return
    systems: dict[str, RankLink] = {
        **{name: OurRankLink(client_transport(urls[name]), rank) for name in (TCP, IPC)},
        **{name: RawZmqRankLink(urls[name], rank) for name in (RAW_TCP, RAW_IPC)},
        QUEUE: QueueRankLink(pipes[QUEUE], queue),
    }
    for system in systems.values():
        system.join()
    while name := pipes["call"].recv_bytes().decode():
        pipes["call"].send_bytes(b"listening")
        systems[name].take()
    for system in systems.values():
        system.close()
