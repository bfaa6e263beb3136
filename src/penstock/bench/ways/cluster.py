"""Penstock with its plane alone, with keepers over sockets, and in a Ray cluster: what passes through the plane.

The same producers, ranks and inputs as `plane`; beside them, per round, how long the puts took and how many bytes the
plane's process received and sent over its connections, as the kernel counts them. `keepers-N` has two `penstock keep`
and a plane with `copies=N`; `ray-N` has a cluster of two nodes on this machine.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from .inputs import CASES, Group, make_groups, sums_of
from .plane import PRODUCERS, SEQ_LEN, rank, samples_of
from .serving import Crew, Meter, Request, Round, check, obey, serve

NODES = ("node0", "node1")
"""As a local Ray cluster names them."""
_COUNT = re.compile(r"bytes_(sent|received):(\d+)")


def main() -> None:
    import penstock

    with tempfile.TemporaryDirectory(prefix="penstock-cluster-", dir=sys.argv[1]) as folder:
        way = _Way(Path(folder))
        offers = ["tcp", "shm", "keepers-1", "keepers-2"]
        versions = {"penstock": penstock.__version__}
        if util.find_spec("ray") is not None:
            offers, versions = [*offers, "ray-1", "ray-2"], versions | {"ray": _version("ray")}
        try:
            serve(offers, versions, way.run)
        finally:
            way.close()


def _version(package: str) -> str:
    from importlib import metadata

    return metadata.version(package)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A plane that everybody joined."""

    plane: int
    """Its process."""
    keepers: tuple[int, ...]
    over_tcp: bool


class _Way:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def run(self, request: Request) -> Round:
        """One step, from arrays to tensors, on a plane of its own; the first one warms it up."""
        case, ranks = CASES[request["case"]], int(request["ranks"])
        with (
            _served(self._folder, str(request["way"]), ranks, case.groups) as (served, url),
            Crew(producer, PRODUCERS) as self._producers,  # started now: processes find a Ray cluster by what is set
            Crew(rank, ranks) as self._ranks,
        ):
            self._ranks.ask({"do": "join", "plane": "it", "url": url, "world": ranks}, ranks)
            self._producers.ask({"do": "join", "url": url})
            self._round("tiny-text", f"warm-{request['round']}", ranks, served, case.groups)
            found = self._round(case.name, f"{case.name}-{request['round']}", ranks, served, case.groups)
            self._producers.ask({"do": "leave"})
            self._ranks.ask({"do": "leave", "plane": "it"}, ranks)
        return found

    def _round(self, case: str, name: str, ranks: int, served: Served, groups: int) -> Round:
        sent = self._producers.ask({"do": "prepare", "case": case, "name": name, "groups": groups})
        before, meter = _traffic(served), Meter()
        self._ranks.tell({"do": "take", "plane": "it"}, ranks)
        self._producers.tell({"do": "put"})
        puts = self._producers.answers()
        got = self._ranks.answers(ranks)
        used = meter.read(ranks=self._ranks.pids(ranks), plane=[served.plane])
        after = _traffic(served)
        self._ranks.ask({"do": "commit", "plane": "it"}, ranks)
        check(sent, got)
        extra = {"put_s": max(one["seconds"] for one in puts), "plane_in": after[0] - before[0]}
        return replace(used, **extra, plane_out=after[1] - before[1])

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _traffic(served: Served) -> tuple[int, int]:
    """Bytes that the plane's process has received and sent over TCP."""
    if not served.over_tcp:
        return 0, 0
    done = subprocess.run(["ss", "-tinpH"], capture_output=True, text=True, check=True)  # noqa: S607
    totals = {"received": 0, "sent": 0}
    ours = False
    for line in done.stdout.splitlines():
        if line[:1].isspace():
            for kind, count in _COUNT.findall(line) if ours else ():
                totals[kind] += int(count)
        else:
            ours = f"pid={served.plane}," in line
    return totals["received"], totals["sent"]


@contextmanager
def _served(folder: Path, way: str, ranks: int, groups: int) -> Iterator[tuple[Served, str]]:
    home = Path(tempfile.mkdtemp(prefix="run-", dir=folder))
    kind, _, copies = way.partition("-")
    serving = _in_ray if kind == "ray" else _in_processes
    with serving(home, kind, int(copies or 0), ranks, groups) as found:
        yield found
    shutil.rmtree(home)


@contextmanager
def _in_processes(home: Path, kind: str, copies: int, ranks: int, groups: int) -> Iterator[tuple[Served, str]]:
    with ExitStack() as stack:
        listen = f"shm+ipc://{home}/s" if kind == "shm" else "tcp://127.0.0.1:*"
        words = [f"--ranks={ranks}", f"--seq-len={SEQ_LEN}", f"--groups-per-step={groups}", "--retain-steps=1"]
        said = _start(stack, ["serve", str(home / "run"), *words, f"--listen={listen}", f"--copies={copies}"])
        url = said["urls"][0]
        keepers = [
            _start(stack, ["keep", f"--plane={url}", f"--folder={home / node}", f"--node={node}"])["pid"]
            for node in (NODES if copies else ())
        ]
        yield Served(plane=said["pid"], keepers=tuple(keepers), over_tcp=kind != "shm"), url


def _start(stack: ExitStack, words: Sequence[str]) -> dict[str, Any]:
    """A command that says in one line of JSON that it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli", *words, "--json", f"--parent={os.getpid()}"], stdout=subprocess.PIPE
    )
    stack.callback(process.wait)
    stack.callback(process.terminate)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"penstock {words[0]} ended with code {process.wait()}")
    said: dict[str, Any] = json.loads(line)
    return said


@contextmanager
def _in_ray(home: Path, _kind: str, copies: int, ranks: int, groups: int) -> Iterator[tuple[Served, str]]:
    import penstock as ps
    from penstock.ray import LocalCluster, calls

    with LocalCluster(len(NODES)):
        url = "ray://bench"
        plane = ps.open(
            url,
            ranks=ranks,
            seq_len=SEQ_LEN,
            groups_per_step=groups,
            retain_steps=1,
            copies=2 if copies == 2 else 1,
            log=home / "log",
            frames=home / "frames",
        )
        while sum(keeper["up"] for keeper in plane.status()["keepers"]) < len(NODES):
            time.sleep(0.1)
        pids = [calls.ask(calls.keeper_of("bench", node.id), "process")["pid"] for node in calls.nodes()]
        yield (
            Served(plane=calls.ask(calls.actor_of("bench"), "process")["pid"], keepers=tuple(pids), over_tcp=True),
            url,
        )
        plane.kill()


def producer(number: int, pipe: Connection) -> None:
    import penstock as ps

    plane: list[ps.Plane] = []
    groups: list[Group] = []

    def handle(request: Request) -> dict[str, Any]:
        match request["do"]:
            case "join":
                url = request["url"]  # where Ray is, it says on which node this is
                plane.append(ps.open(url) if url.startswith("ray://") else ps.open(url, node=NODES[number % 2]))
            case "prepare":
                case = CASES[request["case"]]
                groups[:] = make_groups(case, range(number, request["groups"], PRODUCERS), request["name"])
                return sums_of(groups)
            case "put":
                began = time.perf_counter()
                for group in groups:
                    plane[0].put(samples_of(group))
                groups.clear()
                return {"seconds": time.perf_counter() - began}
            case "leave":
                plane.pop().close()
        return {}

    obey(pipe, handle)


if __name__ == "__main__":
    main()
