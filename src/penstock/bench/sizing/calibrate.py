"""Measure what a simulated cluster is made of, with the code that a real one runs: half a minute.

Work is timed in CPU seconds, the best of a few rounds, at two sizes, so that what a call costs and what a token costs
are told apart. Disk and log are timed as they are. What cannot be measured on one machine is not here: links and their
delays are given to the simulation.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import zmq

from penstock.arrays import Sample
from penstock.arrays.digests import sample_digests
from penstock.arrays.sample_facts import SampleFacts
from penstock.bench import data
from penstock.bench.disk import disk_folder
from penstock.bench.facts_only import Elsewhere, make_facts
from penstock.bench.facts_only import measure as measure_facts
from penstock.bench.protocol import protocol_time
from penstock.bench.report import machine
from penstock.bench.sizing.constants import KINDS, Constants, Disk, Kind, Line, Plane
from penstock.encode import decode, encode
from penstock.keep import MemoryKeeper, Pick, check_group
from penstock.pack import Packing, fill, plan
from penstock.serve.decisions.engine import Engine
from penstock.serve.decisions.log import Log
from penstock.serve.settings import PlaneSettings, Target

SIZE = 16
"""Samples of a group."""
_SHORT, _LONG = 512, 2048
_TAKEN = 4
"""Samples of a group that one rank takes."""


def calibrate(progress: Callable[[str], None] = lambda _: None, *, rounds: int = 5) -> Constants:
    """Measure everything."""
    kinds = {}
    for name in KINDS:
        progress(f"{name}: encode, keep, take, fill")
        kinds[name] = _kind(name, rounds)
    progress("the plane, facts only")
    plane = _plane()
    progress("disk and sockets")
    with disk_folder() as folder:
        disk = _disk(folder, rounds)
    return Constants(
        date=datetime.now(UTC).date().isoformat(),
        machine=machine(),
        kinds=kinds,
        plane=plane,
        disk=disk,
        send_byte_s=_send_byte_s(rounds),
        call_s=_call_s(),
    )


def _best(work: Callable[[], object], rounds: int) -> float:
    """CPU seconds of the fastest round."""
    found = []
    for _ in range(rounds):
        begin = time.process_time()
        work()
        found.append(time.process_time() - begin)
    return min(found)


def _line(short: tuple[int, float], long: tuple[int, float]) -> Line:
    """Through two measurements of (tokens, seconds); neither part is negative."""
    slope = max((long[1] - short[1]) / (long[0] - short[0]), 0.0)
    return Line(base_s=max(short[1] - slope * short[0], 0.0), token_s=slope)


# ------------------------------------------------------------------ groups


def make_group(kind: str, tokens: int) -> list[Sample]:
    """Sixteen answers to one prompt, a quarter of their tokens, with the columns of a kind."""
    rng = np.random.default_rng(tokens)
    prompt = data.text(rng, tokens // 4)
    samples = [data.sample(rng, prompt, tokens - len(prompt), f"g/{i}") for i in range(SIZE)]
    if kind == "r3":
        shared = rng.integers(0, 128, (len(prompt), 48, 8), np.uint8)
        rest = (tokens - len(prompt), 48, 8)
        return [
            s.replace(routed_experts=np.concatenate([shared, rng.integers(0, 128, rest, np.uint8)])) for s in samples
        ]
    if kind == "topk":
        return [
            s.replace(mode="opd", teacher_topk_ids=_ids(rng, tokens), teacher_topk_logprobs=_logprobs(rng, tokens))
            for s in samples
        ]
    return samples


def _ids(rng: np.random.Generator, tokens: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint32]]:
    return (rng.random((tokens, 64), np.float32) ** 3 * data.VOCABULARY).astype(np.uint32)


def _logprobs(rng: np.random.Generator, tokens: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return -np.sort(rng.standard_exponential((tokens, 64), np.float32), axis=1)


def _kind(name: str, rounds: int) -> Kind:
    found = [_work(make_group(name, tokens), tokens, rounds) for tokens in (_SHORT, _LONG)]
    (short, _, _), (long, frame_bytes, taken_bytes) = found
    lines = {what: _line(short[what], long[what]) for what in short}
    return Kind(frame_bytes=frame_bytes, taken_bytes=taken_bytes, **lines)


def _work(samples: list[Sample], tokens: int, rounds: int) -> tuple[dict[str, tuple[int, float]], float, float]:
    """What is done to a group, as (tokens, seconds); bytes per token as kept and as taken."""
    frame, keeper = encode(samples), MemoryKeeper()
    location = keeper.keep([frame])[0]
    picks = [[Pick(location, "g", tuple(range(_TAKEN)))]]
    taken = keeper.take(picks)[0]
    packing = Packing(ranks=1, seq_len=4 * tokens)

    def fill_rank() -> None:
        found = decode(taken)
        sample_digests(found)
        made = plan(SampleFacts.of(found, packing.seq_len), packing).rank_plans[0]
        fill(found, made)

    whole, part = SIZE * tokens, _TAKEN * tokens
    seconds = {
        "encode": (whole, _best(lambda: encode(samples), rounds)),
        "keep": (whole, _best(lambda: check_group(frame, group="g", seq_len=tokens), rounds)),
        "take": (part, _best(lambda: keeper.take(picks), rounds)),
        "fill": (part, _best(fill_rank, rounds)),
    }
    return seconds, len(frame) / whole, len(taken) / part


# ------------------------------------------------------------------ the plane


def _plane() -> Plane:
    """Two sizes of steps, and two numbers of ranks, tell what a sample and what a rank costs."""
    found = {}
    for groups, ranks in ((128, 16), (1024, 16), (128, 256)):
        with tempfile.TemporaryDirectory() as folder:
            found[groups, ranks] = measure_facts(folder, groups, ranks)
    small, samples = found[128, 16]["cpu_s"], SIZE * (1024 - 128)
    return Plane(
        accept_s=_accept_s(512, 3),
        sample_s=max(found[1024, 16]["cpu_s"] - small, 0.0) / samples,
        rank_s=max(found[128, 256]["cpu_s"] - small, 0.0) / (256 - 16),
        protocol_s=protocol_time(256, clock=time.process_time) / 256,
        facts_bytes=float(len(make_facts(1)[0].to_bytes())),
    )


def _accept_s(groups: int, rounds: int) -> float:
    """CPU for a group: into the real engine and its log, a transaction for each 16, as when many put at once."""
    facts = make_facts(groups)
    settings = PlaneSettings(
        packing=Packing(ranks=1, seq_len=1 << 14), target=Target(groups=groups), max_held_bytes=1 << 50
    )

    def accept(folder: str) -> None:
        log = Log(folder)
        acceptance = Engine(settings, log, Elsewhere()).acceptance
        for number, one in enumerate(facts, start=1):
            acceptance.offer(one.group, one.group, one.digests[0], 100_000)
            acceptance.arrive(one.group, one, f"elsewhere:{one.group}")
            if number % 16 == 0:
                acceptance.flush()
        log.close()

    found = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            found.append(_best(lambda folder=folder: accept(folder), 1))  # type: ignore[misc]
    return min(found) / groups


# ------------------------------------------------------------------ disk and sockets


def _disk(folder: Path, rounds: int) -> Disk:
    """A small and a large write, each synced, in wall time."""
    file = os.open(folder / "written", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        small = min(_written(file, 64 << 10) for _ in range(4 * rounds))
        large = min(_written(file, 32 << 20) for _ in range(4 * rounds))
    finally:
        os.close(file)
    return Disk(sync_s=small, write_bytes_s=(32 << 20) / max(large - small, 1e-6))


def _written(file: int, size: int) -> float:
    block = bytes(size)
    begin = time.perf_counter()
    os.write(file, block)
    os.fdatasync(file)
    return time.perf_counter() - begin


def _send_byte_s(rounds: int) -> float:
    """CPU of both ends of a socket, by halves."""
    size = 16 << 20
    return _best(lambda: _through_socket(bytes(size), 4), rounds) / (2 * 4 * size)


def _call_s() -> float:
    return _best(lambda: _through_socket(bytes(200), 2000), 3) / 2000


def _through_socket(message: bytes, count: int) -> None:
    context = zmq.Context()
    try:
        server, client = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        port = server.bind_to_random_port("tcp://127.0.0.1")
        client.connect(f"tcp://127.0.0.1:{port}")
        for _ in range(count):
            client.send(message, copy=False)
            server.recv(copy=False)
        for one in (server, client):
            one.close(linger=0)
    finally:
        context.term()
