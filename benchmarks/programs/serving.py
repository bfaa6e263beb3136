"""The loop of a compared system: read a request per line, run one round, answer with seconds, CPU and peak memory.

    <- {"offers": ["plane"], "versions": {"penstock": "0.2.0"}}
    -> {"system": "plane", "case": "fixed", "ranks": 2, "transport": "tcp", "round": 1}
    <- {"seconds": 0.26, "cpu_s": 0.36, "plane_cpu_s": 0.12, "plane_bytes": 90000000, "rank_bytes": 210000000, ...}

It ends when its input does. What goes wrong is an answer too: {"error": "..."}.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self, TypeAlias

from .inputs import add

Request: TypeAlias = dict[str, Any]
PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one round took."""

    seconds: float
    """From the first put until every rank has read its tensors."""
    cpu_s: float
    """Over all processes of the system."""
    plane_cpu_s: float
    """Of those between producers and ranks."""
    rank_cpu_s: float
    """Of all ranks together."""
    producer_cpu_s: float
    """Of all producers together."""
    plane_bytes: int
    """Peak resident memory of what stands between producers and ranks."""
    rank_bytes: int
    """Peak resident memory of the largest rank."""
    producer_bytes: int
    """Peak resident memory of the largest producer."""
    plane_faults: int
    """Page faults, minor and major, of what stands between producers and ranks."""
    rank_faults: int
    """Those of the rank that had most."""
    producer_faults: int
    """Those of the producer that had most."""
    read_bytes: int = 0
    """That ranks read from storage, where they do."""
    needed_bytes: int = 0
    """That their samples take there."""
    slow: tuple[str, ...] = ()
    """What the plane recorded as slow during the round."""
    longest_put_s: float = 0.0
    put_s: float = 0.0
    """Until the last put returned, where that was looked at."""
    plane_in: float = 0.0
    """Bytes that the plane's process received over TCP, where that was looked at."""
    plane_out: float = 0.0
    """Bytes that it sent."""


def serve(offers: Sequence[str], versions: dict[str, str], run: Callable[[Request], Any]) -> None:
    """Answer requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print goes with their log lines

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    say({"offers": list(offers), "versions": versions})
    for line in sys.stdin:
        try:
            say(asdict(run(json.loads(line))))
        except Exception as error:  # noqa: BLE001 - reported in the row of this system
            say({"error": f"{type(error).__name__}: {error}"})


# ------------------------------------------------------------------ processes and what they use


class Crew:
    """Processes of the same kind, called together; each runs `work(number, pipe)`."""

    def __init__(self, work: Callable[[int, Connection], None], count: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for number in range(count):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=work, args=(number, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def pids(self, count: int | None = None) -> list[int]:
        return [process.pid for process in self._processes[:count] if process.pid is not None]

    def tell(self, request: Request, count: int | None = None) -> None:
        """Send a request to the first `count` of them."""
        for pipe in self._pipes[:count]:
            pipe.send_bytes(json.dumps(request).encode())

    def answers(self, count: int | None = None) -> list[dict[str, Any]]:
        """One answer from each of them."""
        pipes = self._pipes[:count]
        found: dict[Connection, dict[str, Any]] = {}
        while len(found) < len(pipes):
            ready = wait([pipe for pipe in pipes if pipe not in found], PATIENCE_S)
            if not ready:
                raise TimeoutError(f"{len(pipes) - len(found)} of {len(pipes)} processes did not answer")
            found |= {pipe: json.loads(pipe.recv_bytes()) for pipe in ready if isinstance(pipe, Connection)}
        errors = [answer["error"] for answer in found.values() if "error" in answer]
        if errors:
            raise RuntimeError(errors[0])
        return [found[pipe] for pipe in pipes]

    def ask(self, request: Request, count: int | None = None) -> list[dict[str, Any]]:
        self.tell(request, count)
        return self.answers(count)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Their requests end, so they end."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(PATIENCE_S)


def obey(pipe: Connection, handle: Callable[[Request], dict[str, Any]]) -> None:
    """A crew member's life: answer requests until the other end is gone."""
    while True:
        try:
            request = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = handle(request)
        except Exception as error:  # noqa: BLE001 - the caller reports it
            answer = {"error": f"{type(error).__name__}: {error}"}
        pipe.send_bytes(json.dumps(answer).encode())


class Meter:
    """CPU and peak memory of this process and all it started, from its making until `read`."""

    def __init__(self) -> None:
        for pid in tree_of(os.getpid()):
            _write(pid, "clear_refs", "5")  # reset the peak
        self._faults = {pid: _faults(pid) for pid in tree_of(os.getpid())}
        self._cpu = {pid: _cpu_s(pid) for pid in tree_of(os.getpid())}
        self._begin = time.perf_counter()

    def read(
        self,
        *,
        ranks: Sequence[int],
        producers: Sequence[int],
        plane: Sequence[int] | None = None,
        idle: Sequence[int] = (),
    ) -> Round:
        """`plane` are the processes between producers and ranks: by default all but those, `idle` and this one."""
        seconds = time.perf_counter() - self._begin
        tree = tree_of(os.getpid())
        spent = {pid: _cpu_s(pid) - self._cpu.get(pid, 0.0) for pid in tree}
        faults = {pid: _faults(pid) - self._faults.get(pid, 0) for pid in tree}
        between = set(tree) - {os.getpid(), *ranks, *producers, *idle} if plane is None else plane
        return Round(
            seconds=seconds,
            cpu_s=sum(spent.values()),
            plane_cpu_s=sum(spent.get(pid, 0.0) for pid in between),
            rank_cpu_s=sum(spent.get(pid, 0.0) for pid in ranks),
            producer_cpu_s=sum(spent.get(pid, 0.0) for pid in producers),
            plane_bytes=sum(peak_bytes(pid) for pid in between),
            rank_bytes=max(map(peak_bytes, ranks)),
            producer_bytes=max(map(peak_bytes, producers)),
            plane_faults=sum(faults.get(pid, 0) for pid in between),
            rank_faults=max(faults.get(pid, 0) for pid in ranks),
            producer_faults=max(faults.get(pid, 0) for pid in producers),
        )


def check(sent: Sequence[dict[str, int]], got: Sequence[dict[str, int]]) -> None:
    """Nothing may look fast by not arriving."""
    if add(sent) != add(got):
        raise ValueError(f"the ranks read {add(got)}, the producers sent {add(sent)}")


def tree_of(root: int) -> list[int]:
    """A process and its descendants."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo += parents.get(pid, [])
    return found


def _stat(pid: int) -> list[str]:
    """The fields behind the name: state, parent, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _cpu_s(pid: int) -> float:
    """CPU time of a process, by its clock: /proc counts in ticks of 10 ms, as long as a plane's step."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # as `clock_getcpuclockid` makes it
    except OSError:
        return 0.0


def _faults(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[7]) + int(fields[9]) if fields else 0


def peak_bytes(pid: int) -> int:
    """Peak resident memory of a process. Not `ru_maxrss`: across exec that keeps the parent's peak."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def _write(pid: int, name: str, text: str) -> None:
    try:
        Path(f"/proc/{pid}/{name}").write_text(text)
    except OSError:
        return
