"""Penstock: a served plane on a folder, producers that put durably, ranks that take packed steps.

plane: producers call `put` for each group. many: they call `put_many` once.

Runs with the Penstock of its interpreter, this version or an older one, so it uses what both have: `penstock serve`,
`open`, `connect`, `Sample`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from .inputs import CASES, TOKENS, Array, Group, add, make_groups, read_all, sums_of
from .serving import PATIENCE_S, Crew, Meter, Request, Round, check, obey, serve

PRODUCERS = 2
SEQ_LEN = 4 * TOKENS
"""Of a micro-batch: four of the longest samples."""


def main() -> None:
    import penstock

    with tempfile.TemporaryDirectory(prefix="penstock-path-", dir=sys.argv[1]) as folder:
        system = _System(Path(folder))
        try:
            offers = ["plane", "many"] if hasattr(penstock.Plane, "put_many") else ["plane"]
            serve(offers, {"penstock": penstock.__version__}, system.run)
        finally:
            system.close()


@dataclass(frozen=True, slots=True)
class _Served:
    """A running plane that every process of this program has joined."""

    name: str
    ranks: int
    process: subprocess.Popen[bytes]


class _System:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._producers, self._ranks = Crew(producer, PRODUCERS), Crew(rank, int(sys.argv[2]))
        self._planes: dict[str, _Served] = {}

    def run(self, request: Request) -> Round:
        """One step, from arrays to tensors."""
        ranks, case = int(request["ranks"]), CASES[request["case"]]
        plane = self._plane(ranks, str(request["transport"]), case.groups)
        name = f"{case.name}-{ranks}-{request['system']}-{request['round']}"
        sent = self._producers.ask({"do": "prepare", "case": case.name, "name": name})
        meter, began = Meter(), time.time()
        self._ranks.tell({"do": "take", "plane": plane.name}, ranks)
        self._producers.tell({"do": "put", "plane": plane.name, "many": request["system"] == "many"})
        got = self._ranks.answers(ranks)
        used = meter.read(ranks=self._ranks.pids(ranks), producers=self._producers.pids(), plane=[plane.process.pid])
        puts = self._producers.answers()
        done = self._ranks.ask({"do": "commit", "plane": plane.name}, ranks)
        check(sent, got)
        return replace(
            used,
            read_bytes=sum(one["read"] for one in done),
            needed_bytes=sum(one["needed"] for one in done),
            longest_put_s=max(one["longest_s"] for one in puts),
            slow=tuple(self._producers.ask({"do": "slow", "plane": plane.name, "since": began}, 1)[0]["slow"]),
        )

    def _plane(self, ranks: int, transport: str, groups: int) -> _Served:
        """The plane for that many ranks, running; those for another number of ranks end."""
        name = f"{transport}-{ranks}-{groups}"
        if name not in self._planes:
            self.close([served for served in self._planes.values() if served.ranks != ranks])
            self._planes[name] = self._start(name, ranks, transport, groups)
        return self._planes[name]

    def _start(self, name: str, ranks: int, transport: str, groups: int) -> _Served:
        home = self._folder / name
        arguments = [f"--ranks={ranks}", f"--seq-len={SEQ_LEN}", f"--groups-per-step={groups}"]
        arguments += ["--listen=tcp://127.0.0.1:*", "--set=retain_steps=1", "--json", f"--parent={os.getpid()}"]
        keys = _writer_keys(self._folder / f"{name}-keys") if transport == "direct" else None
        if keys is not None:
            arguments.append(f"--keys={keys}")
        elif _knows_direct():
            arguments.append("--set=direct=false")
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli", "serve", str(home), *arguments], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"penstock serve ended with code {process.wait()}")
        url = json.loads(line)["urls"][0]
        self._ranks.ask({"do": "join", "plane": name, "url": url, "world": ranks, "keys": keys}, ranks)
        self._producers.ask({"do": "join", "plane": name, "url": url, "keys": keys})
        return _Served(name, ranks, process)

    def close(self, planes: Sequence[_Served] | None = None) -> None:
        """End planes, all by default, after everybody has left them; their folders go too."""
        for plane in list(self._planes.values()) if planes is None else planes:
            self._producers.ask({"do": "leave", "plane": plane.name})
            self._ranks.ask({"do": "leave", "plane": plane.name}, plane.ranks)
            plane.process.terminate()
            plane.process.wait(PATIENCE_S)
            shutil.rmtree(self._folder / plane.name)
            del self._planes[plane.name]


def _writer_keys(folder: Path) -> str:
    """A key folder whose client may write to storage."""
    from penstock.transport.keys import make_keys

    make_keys(folder, ("other",), writers=("client",))
    return str(folder)


def _knows_direct() -> bool:
    """Check whether this version's clients use storage directly by default."""
    return importlib.util.find_spec("penstock.client") is not None  # 462be9a has none


def producer(number: int, pipe: Connection) -> None:
    import penstock as ps

    planes: dict[str, ps.Plane] = {}
    groups: list[Group] = []

    def handle(request: Request) -> dict[str, Any]:
        match request["do"]:
            case "join":
                planes[request["plane"]] = ps.open(request["url"], keys=request.get("keys"))
            case "prepare":
                case = CASES[request["case"]]
                groups[:] = make_groups(case, range(number, case.groups, PRODUCERS), request["name"])
                return sums_of(groups)
            case "put":
                begin, longest_s = time.perf_counter(), 0.0
                if request.get("many"):
                    planes[request["plane"]].put_many(samples_of(group) for group in groups)
                    longest_s = time.perf_counter() - begin
                else:
                    for group in groups:
                        begin = time.perf_counter()
                        planes[request["plane"]].put(samples_of(group))
                        longest_s = max(longest_s, time.perf_counter() - begin)
                groups.clear()
                return {"longest_s": longest_s}
            case "slow":
                found = planes[request["plane"]].status().get("slow", {"last": []})["last"]  # not in 462be9a
                late = [one for one in found if one["at"] >= request["since"]]
                return {"slow": [f"{one['work']} {one['seconds'] * 1e3:.0f} ms, {one['doing']}" for one in late]}
            case "leave":
                planes.pop(request["plane"]).close()
        return {}

    obey(pipe, handle)


def samples_of(group: Group) -> list[Any]:
    from penstock import Sample

    names = [{"id": f"{group.id}/{i}", "group": group.id} for i in range(len(group.samples))]
    given: list[dict[str, Any]] = [name | row for name, row in zip(names, group.samples, strict=True)]
    return [Sample(**one) for one in given]


def rank(number: int, pipe: Connection) -> None:
    import torch

    import penstock as ps

    torch.set_num_threads(1)
    sources: dict[str, ps.Source] = {}
    steps: dict[str, Any] = {}

    def handle(request: Request) -> dict[str, Any]:
        plane = request["plane"]
        match request["do"]:
            case "join":
                sources[plane] = ps.connect(
                    request["url"], rank=number, world=request["world"], keys=request.get("keys")
                )
            case "take":
                steps[plane] = sources[plane].step(timeout=PATIENCE_S)
                tensors = [_tensors(batch) for batch in steps[plane]]
                return add([read_all({name: tensor.numpy() for name, tensor in one.items()}) for one in tensors])
            case "commit":
                sources[plane].commit(steps.pop(plane))
                sources[plane].flush()
                return _bytes_read(sources[plane])
            case "leave":
                sources.pop(plane).close()
        return {}

    obey(pipe, handle)


def _bytes_read(source: Any) -> dict[str, int]:
    """What a source read from storage for its last step, and what the samples of that step take there."""
    reach = getattr(source, "_reach", None)  # not in 462be9a
    if reach is None or reach.reader is None:
        return {"read": 0, "needed": 0}
    from penstock.frames import ANY_SIZE, RangedFrame

    read = needed = 0
    for group in reach.reader.picks.groups:
        frame = RangedFrame(group.front, limits=ANY_SIZE)
        read += sum(b - a for a, b in frame.plan(group.rows))
        needed += sum(b - a for a, b in frame.ranges(group.rows, gap=0))
    return {"read": read, "needed": needed}


def _tensors(batch: Any) -> dict[str, Any]:
    """int64 ids; masks, log-probabilities and experts as they are."""
    import numpy as np
    import torch

    columns: dict[str, Array] = dict(batch.columns)
    columns["token_ids"] = columns["token_ids"].astype(np.int64)
    return {name: torch.from_numpy(values) for name, values in columns.items()}


if __name__ == "__main__":
    main()
