"""Starts the processes of a run, watches them, starts again what dies, and knows when the run is over.

A dead worker is started again; so is a dead plane, which continues from its log. When a rank dies the others are told
by the plane and stop; all of them start again from the last checkpoint, and what was trained after it is served
again. With `chaos` the launcher itself kills a random process every few seconds.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.client import open as open_plane
from penstock.demo.nursery import Child, Nursery, last_words
from penstock.demo.plane_lines import PlaneLines
from penstock.demo.planes import address
from penstock.demo.preflight import check_surroundings
from penstock.demo.role import ABORTED, REFUSED
from penstock.demo.words import write_tokenizer
from penstock.errors import PenstockError
from penstock.protocol import Timeouts
from penstock.train import TrainConfig, template
from penstock.view import at_work

_LOOK_S = 0.2
_MOST_FAILURES = 3
_LAST_LINES = 3
_GLANCE = Timeouts(plane_s=3.0)
"""A plane that does not answer a look soon is looked at again; what died meanwhile must not wait for it."""
_LOADING = "starting: torch and the model are loaded once, for all processes; this takes seconds"
_SHOWN_ROWS = 100
"""Steps of which the screen may show more than the reward."""


@dataclass
class Chaos:
    """Kill a random process every so often."""

    every_s: float = 4.0
    seed: int = 0
    kills: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What the screen shows."""

    rows: list[dict[str, float]]
    """One per step, in order."""
    status: dict[str, Any]
    """Of the plane, as `penstock top` sees it; empty while it cannot be asked."""
    kills: dict[str, int]
    seconds: float
    doing: str = ""
    """What the launcher does before there is a plane to ask."""


class RunFailed(PenstockError):
    """A process kept dying; names it and shows the end of its log."""


class Launcher:
    def __init__(self, config: TrainConfig, *, chaos: Chaos | None = None) -> None:
        self.config, self.chaos = config, chaos
        self.folder = Path(config.folder)
        self._processes: dict[str, Child] = {}
        self._nursery: Nursery | None = None
        self._failures: Counter[str] = Counter()
        """Of each process, since the last step that was trained."""
        self._trained = 0
        self._random = random.Random(0 if chaos is None else chaos.seed)
        self._metrics = Metrics(self.folder / "metrics.jsonl", whole_rows=_SHOWN_ROWS)
        self._lines = PlaneLines(self.folder / "plane.jsonl")
        self._status: dict[str, Any] = {}

    def run(self, show: Callable[[Progress], None]) -> dict[str, Any]:
        """Run it to the end; returns the plane's last status."""
        self.prepare()
        with at_work(self.folder):
            return self._run(show)

    def _run(self, show: Callable[[Progress], None]) -> dict[str, Any]:
        began = time.monotonic()
        show(Progress(rows=[], status={}, kills={}, seconds=0.0, doing=_LOADING))
        self._nursery = Nursery(self.folder / "config.toml", self.folder / "logs" / "nursery.log")
        try:
            self._nursery.wait_ready()
            if not self.config.plane:
                self._start("plane")
            plane = open_plane(address(self.config), timeouts=_GLANCE)
            self._start_ranks()
            for index in range(self.config.task.workers if self.config.task else 0):
                self._start(f"worker-{index}")
            next_kill = began + 3 * (self.chaos.every_s if self.chaos else 0)
            while not self._is_over():
                time.sleep(_LOOK_S)
                if self.chaos is not None and time.monotonic() > next_kill:
                    next_kill = time.monotonic() + self._random.uniform(0.5, 1.5) * self.chaos.every_s
                    self.kill_one()
                self._mend()
                self._look(plane)
                show(self._progress(time.monotonic() - began))
            plane.close()
            self._stop("worker")
            with open_plane(address(self.config)) as plane:
                self._status = plane.status()
                self._lines.note(self._status)
            (self.folder / "status.json").write_text(json.dumps(self._status))
        finally:
            self._stop("")
            self._nursery.close()
        return self._status

    def _progress(self, seconds: float) -> Progress:
        rows = self._metrics.read()
        if rows and int(rows[-1]["step"]) > self._trained:
            self._trained = int(rows[-1]["step"])
            self._failures.clear()
        kills = dict(self.chaos.kills) if self.chaos else {}
        return Progress(rows=rows, status=self._status, kills=kills, seconds=seconds)

    # -------------------------------------------------------------- processes

    def prepare(self) -> None:
        """Check what the run needs of the machine, and make its folder; nothing has started yet."""
        check_surroundings(self.config)
        has_images = self.config.task is not None and self.config.task.name == "color"
        for name in ("logs", "weights", "checkpoints", *(["assets"] if has_images else [])):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / "config.toml").write_text(template(self.config))
        if self.config.task is not None and not self.config.model.path:
            write_tokenizer(self.folder, self.config.task.name)

    def _start(self, name: str, extra: dict[str, str] | None = None) -> None:
        role, _, index = name.partition("-")
        words = {
            "role": role,
            "config": str(self.folder / "config.toml"),
            "index": int(index or 0),
            "log": str(self.folder / "logs" / f"{name}.log"),
            "env": extra or {},
        }
        assert self._nursery is not None
        self._processes[name] = self._nursery.start(name, words)

    def _start_ranks(self) -> None:
        """All ranks together, at an address of their own: those that were started before must not meet these."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(self.config.ranks)}
        for index in range(self.config.ranks):
            self._start(f"rank-{index}", {**world, "RANK": str(index)})

    def _ranks(self) -> list[Child]:
        return [process for name, process in self._processes.items() if name.startswith("rank")]

    def _is_over(self) -> bool:
        return all(process.poll() == 0 for process in self._ranks())

    def _mend(self) -> None:
        """Start again what died."""
        dead = [name for name, process in self._processes.items() if process.poll() not in (None, 0)]
        for name in dead:
            self._count_failure(name)
            if not name.startswith("rank"):
                self._start(name)
        if any(name.startswith("rank") for name in dead):
            self._stop("rank")
            self._start_ranks()

    def _count_failure(self, name: str) -> None:
        code = self._processes[name].poll()
        if self.chaos is not None and code in (-signal.SIGKILL, ABORTED):
            return  # as intended
        self._failures[name] += 1
        log = self.folder / "logs" / f"{name}.log"
        if code == REFUSED:
            raise RunFailed(f"{last_words(log)}; its log is {log}")
        if self._failures[name] >= _MOST_FAILURES:
            raise RunFailed(
                f"{name} died {_MOST_FAILURES} times, the last with code {code}; the end of {log}:\n"
                + last_words(log, _LAST_LINES)
            )

    def kill(self, kind: str) -> None:
        """Kill -9 a random process of a kind: plane, worker or rank."""
        alive = [n for n, process in self._processes.items() if n.startswith(kind) and process.poll() is None]
        if alive:
            process = self._processes[self._random.choice(alive)]
            process.kill()
            process.wait()

    def kill_one(self) -> None:
        """What chaos does every now and then."""
        assert self.chaos is not None
        kind = self._random.choice(["plane", "rank", "worker"])
        self.kill(kind)
        self.chaos.kills[kind] += 1

    def _stop(self, kind: str) -> None:
        """End the processes whose names begin so: politely, then not."""
        chosen = [process for name, process in self._processes.items() if name.startswith(kind)]
        rude = signal.SIGKILL if kind in ("rank", "worker") else signal.SIGTERM
        for process in chosen:
            if process.poll() is None:
                process.send_signal(rude)
        for process in chosen:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _look(self, plane: Any) -> None:
        with contextlib.suppress(PenstockError):
            if "plane" not in self._processes or self._processes["plane"].poll() is None:
                self._status = plane.status()
                self._lines.note(self._status)


class Metrics:
    """Reads metrics.jsonl as it grows; a step that was trained again after a crash counts with its last line."""

    def __init__(self, path: Path, *, whole_rows: int | None = None) -> None:
        """With `whole_rows`, of rows before the last so many only the reward is kept: a run may be long."""
        self._path, self._at, self._whole = path, 0, whole_rows
        self._rows: dict[int, dict[str, float]] = {}
        self._in_order: list[dict[str, float]] = []

    def read(self) -> list[dict[str, float]]:
        known = self._at
        for line in self._lines():
            with contextlib.suppress(json.JSONDecodeError, KeyError):
                row = json.loads(line)
                self._rows[int(row["step"])] = row
                self._shorten(int(row["step"]))
        if self._at != known:
            self._in_order = [self._rows[step] for step in sorted(self._rows)]
        return self._in_order

    def _shorten(self, newest: int) -> None:
        if self._whole is None or (old := self._rows.get(newest - self._whole)) is None:
            return
        self._rows[newest - self._whole] = {name: old[name] for name in ("step", "train/reward")}

    def _lines(self) -> Iterator[str]:
        if not self._path.exists():
            return
        with self._path.open() as file:
            file.seek(self._at)
            while (line := file.readline()).endswith("\n"):
                self._at = file.tell()
                yield line
