"""Object storage that is 50 ms away: how long ranks wait for a step, and what a put costs.

An S3 server (moto, in this process) stands behind a proxy that adds the delay to every request. A plane, a producer
with eight puts under way and two ranks run as processes, and use the storage themselves. A step is 512 samples of up to
4k tokens in 32 groups. Each rank "trains" by sleeping for two seconds, and asks for the next step meanwhile. What it
waits is counted from the third step on: the first has to be generated.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.disk import disk_folder
from benchmarks.programs.inputs import CASES, Case, make_groups
from benchmarks.report import Row, skipped
from penstock.server.plane_process import PlaneProcess

RANKS, IN_FLIGHT, DELAY_S = 2, 8, 0.05
_PATIENCE_S = 300.0
_WARM_UP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is measured."""

    case: str = "ragged"
    steps: int = 8
    step_s: float = 2.0
    """How long a rank trains."""
    delay_s: float = DELAY_S


@dataclass(frozen=True, slots=True)
class Found:
    """What one run took."""

    waits: list[float]
    """Seconds, of every rank and step that counts."""
    puts: list[float]
    step_s: float

    @property
    def share(self) -> float:
        """Of a step that is waited, in percent."""
        return 100 * sum(self.waits) / len(self.waits) / self.step_s


def run(*, full: bool, progress: Callable[[str], None], setting: Setting | None = None) -> list[Row]:
    made = setting or Setting(steps=20 if full else 8)
    name = f"ranks wait, % of a {made.step_s:g} s step, {1e3 * made.delay_s:g} ms added to each request"
    if not find_spec("moto") or not find_spec("obstore"):
        return [skipped(name, "moto and obstore are not installed", target=5.0, bound="max")]
    rows = []
    for prefetch, target in ((1, 5.0), (0, None)):
        progress(f"{made.steps} steps, prefetch {prefetch}")
        found = measure(made, prefetch=prefetch)
        longest = f"longest wait {1e3 * max(found.waits):.0f} ms, median {1e3 * median(found.waits):.0f}"
        mode = "reading ahead" if prefetch else "without reading ahead"
        rows.append(Row(name=f"{name}, {mode}", ours=found.share, unit="%", target=target, bound="max", note=longest))
        if prefetch:
            tail = f"p99 {1e3 * quantiles(found.puts, n=100)[-1]:.0f} ms of {len(found.puts)} puts"
            put = f"a put, {IN_FLIGHT} under way, until it is durable and in the log"
            rows.append(Row(name=put, ours=1e3 * median(found.puts), unit="ms", note=tail))
    return rows


def measure(setting: Setting, *, prefetch: int) -> Found:
    """One run of a plane, a producer and ranks."""
    from tests.support.object_proxy import ObjectProxy
    from tests.support.s3_server import make_bucket, s3_environment, s3_server

    case, before = CASES[setting.case], dict(os.environ)
    with disk_folder() as folder, s3_server() as endpoint, ObjectProxy(endpoint) as proxy:
        proxy.delay_s = setting.delay_s
        os.environ.update(s3_environment(proxy.url))
        try:
            storage = f"s3://{make_bucket(endpoint)}/bench"
            with _plane(folder, storage, case) as plane:
                return _measure(plane.url, setting, prefetch)
        finally:
            os.environ.clear()
            os.environ.update(before)


def _plane(folder: Path, storage: str, case: Case) -> PlaneProcess:
    arguments = [f"--ranks={RANKS}", f"--seq-len={4 * case.tokens}", f"--groups-per-step={case.groups}"]
    arguments += ["--listen=tcp://127.0.0.1:*", f"--set=storage={storage}", "--set=retain_steps=1"]
    return PlaneProcess([str(folder / "run"), *arguments], stderr=subprocess.DEVNULL)


def _measure(url: str, setting: Setting, prefetch: int) -> Found:
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(RANKS + 1)]
    works = [(_produce, (url, setting))] + [(_train, (url, setting, rank, prefetch)) for rank in range(RANKS)]
    processes = [
        context.Process(target=_answer, args=(work, arguments, theirs), daemon=True)
        for (work, arguments), (_, theirs) in zip(works, pipes, strict=True)
    ]
    for process in processes:
        process.start()
    try:
        answers = [_received(mine) for mine, _ in pipes]
    finally:
        for process in processes:
            process.terminate()
            process.join()
    return Found([wait for waits in answers[1:] for wait in waits], answers[0], setting.step_s)


def _received(pipe: Connection) -> list[float]:
    if not pipe.poll(_PATIENCE_S):
        raise TimeoutError(f"a process of the benchmark did not answer in {_PATIENCE_S:g} s")
    found = pipe.recv()
    if isinstance(found, str):
        raise RuntimeError(found)  # noqa: TRY004 - the error text of the process
    return list(found)


def _answer(work: Callable[..., list[float]], arguments: tuple[object, ...], pipe: Connection) -> None:
    try:
        pipe.send(work(*arguments))
    except Exception as error:  # noqa: BLE001 - reported to the parent process
        pipe.send(f"{type(error).__name__}: {error}")
    time.sleep(_PATIENCE_S)  # others may still need this one's connection; it is ended


def _produce(url: str, setting: Setting) -> list[float]:
    import penstock as ps

    case = CASES[setting.case]
    with ps.open(url) as plane, ThreadPoolExecutor(IN_FLIGHT) as pool:

        def put(number: int) -> float:
            group = make_groups(case, [number], "bench")[0]
            rows: list[dict[str, Any]] = list(group.samples)
            samples = [ps.Sample(id=f"{group.id}/{i}", group=group.id, **row) for i, row in enumerate(rows)]
            began = time.monotonic()
            plane.put(samples)
            return time.monotonic() - began

        return list(pool.map(put, range((setting.steps + 1) * case.groups)))


def _train(url: str, setting: Setting, rank: int, prefetch: int) -> list[float]:
    import penstock as ps

    waits = []
    with ps.connect(url, rank=rank, world=RANKS, prefetch=prefetch) as source:
        for _ in range(setting.steps):
            began = time.monotonic()
            step = source.step(timeout=_PATIENCE_S)
            waits.append(time.monotonic() - began)
            time.sleep(setting.step_s)
            source.commit(step)
        source.flush(_PATIENCE_S)
    return waits[_WARM_UP:]
