"""Starts the processes of a run, watches them, restarts those that die and decides when the run is over.

A dead worker is restarted, and so is a dead plane, which continues from its log. When a rank dies, the plane notifies
the other ranks and they stop. All ranks then restart from the last checkpoint, and the plane serves the steps after it
again. With `chaos` the launcher itself kills a random process every few seconds.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from penstock.client import open as open_plane
from penstock.demo.preflight import check_surroundings
from penstock.demo.processes import ABORTED, REFUSED, address, start, start_fork_server
from penstock.demo.run_files import Metrics, PlaneLines, last_lines
from penstock.demo.tasks import write_tokenizer
from penstock.errors import PenstockError
from penstock.protocol import FeedbackEvent, Timeouts
from penstock.train import TrainConfig, template
from penstock.view import at_work, note_death

_LOOK_S = 0.2
_MOST_FAILURES = 3
_LAST_LINES = 3
_GLANCE = Timeouts(plane_s=3.0)
"""A short deadline: a plane that does not answer is asked again, and dead processes must not wait for it."""
_LOADING = "starting: torch and the model are loaded once, for all processes; this takes seconds"
_OVER = "nothing: the run is over"
_SHOWN_ROWS = 100
"""Number of recent steps whose full metrics are kept, for the screen."""


@dataclass
class Chaos:
    """Kill a random process about every `every_s` seconds."""

    every_s: float = 4.0
    seed: int = 0
    kills: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What the screen shows."""

    rows: list[dict[str, float]]
    """One per step, in order."""
    status: dict[str, Any]
    """The plane's status, as `penstock top` shows it; empty while the plane does not answer."""
    kills: dict[str, int]
    seconds: float
    doing: str = ""
    """What the launcher is doing while there is no plane, before the run and after it."""


def _how_ended(name: str, code: int | None) -> str:
    """Say how a process died.

    >>> _how_ended("worker-0", -9), _how_ended("rank-1", 3)
    ('worker-0 was killed (SIGKILL)', 'rank-1 ended with code 3')
    """
    if code is not None and code < 0:
        return f"{name} was killed ({next((s.name for s in signal.Signals if s == -code), f'signal {-code}')})"
    return f"{name} ended with code {code}"


def tally(events: Iterable[FeedbackEvent]) -> dict[str, int]:
    """Count what became of groups: how many were trained and filtered, and how many the emptiest step had."""
    found, steps = Counter[str](), dict[int, set[str]]()
    for event in events:
        found[event.outcome] += 1
        if event.outcome == "trained" and event.step is not None:
            steps.setdefault(event.step, set()).add(event.group)
    return {**found, "least_groups_per_step": min(map(len, steps.values()), default=0)}


class RunFailed(PenstockError):
    """A process kept dying. The message names it and shows the end of its log."""


class Launcher:
    """Runs a configuration to its end. Tests and the Ray demo kill processes through it."""

    def __init__(self, config: TrainConfig, *, chaos: Chaos | None = None) -> None:
        self.config, self.chaos = config, chaos
        self.folder = Path(config.folder)
        self._processes: dict[str, ForkServerProcess] = {}
        self._failures: Counter[str] = Counter()
        """By process, since the last trained step."""
        self._trained = 0
        self._random = random.Random(0 if chaos is None else chaos.seed)
        self._metrics = Metrics(self.folder / "metrics.jsonl", whole_rows=_SHOWN_ROWS)
        self._lines = PlaneLines(self.folder / "plane.jsonl")
        self._status: dict[str, Any] = {}

    def run(self, show: Callable[[Progress], None]) -> dict[str, Any]:
        """Run to the end. Returns the plane's last status."""
        self.prepare()
        with at_work(self.folder):
            return self._run(show)

    def _run(self, show: Callable[[Progress], None]) -> dict[str, Any]:
        began = time.monotonic()
        show(Progress(rows=[], status={}, kills={}, seconds=0.0, doing=_LOADING))
        start_fork_server(self.config)
        try:
            if not self.config.plane:
                self._start("plane")
            plane = open_plane(address(self.config), timeouts=_GLANCE)
            self._start_ranks()
            for index in range(self.config.task.workers if self.config.task else 0):
                self._start(f"worker-{index}")
            if self.config.task and self.config.late_columns:
                self._start("judge-0")
            # Three intervals before the first kill: there should be something to kill by then.
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
                if self.config.task is not None and self.config.task.dynamic_sampling:
                    self._status["feedback"] = tally(plane.feedback())
            (self.folder / "status.json").write_text(json.dumps(self._status))
            show(self._progress(time.monotonic() - began, doing=_OVER))
        finally:
            self._stop("")
        return self._status

    def _progress(self, seconds: float, doing: str = "") -> Progress:
        rows = self._metrics.read()
        if rows and int(rows[-1]["step"]) > self._trained:
            self._trained = int(rows[-1]["step"])
            self._failures.clear()
        kills = dict(self.chaos.kills) if self.chaos else {}
        return Progress(rows=rows, status=self._status, kills=kills, seconds=seconds, doing=doing)

    # -------------------------------------------------------------- processes

    def prepare(self) -> None:
        """Check the machine and create the run's folder. Starts nothing."""
        check_surroundings(self.config)
        has_images = self.config.task is not None and self.config.task.name == "color"
        for name in ("logs", "weights", "checkpoints", *(["assets"] if has_images else [])):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / "config.toml").write_text(template(self.config))
        if self.config.task is not None and not self.config.model.path:
            write_tokenizer(self.folder, self.config.task.name)

    def _start(self, name: str, environment: dict[str, str] | None = None) -> None:
        self._processes[name] = start(name, self.folder, environment or {})

    def _start_ranks(self) -> None:
        """Start all ranks, at a new rendezvous port: ranks of an earlier start must not join these."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(self.config.ranks)}
        for index in range(self.config.ranks):
            self._start(f"rank-{index}", {**world, "RANK": str(index)})

    def _is_over(self) -> bool:
        """Return whether every rank has ended as it should."""
        return all(process.exitcode == 0 for name, process in self._processes.items() if name.startswith("rank"))

    def _mend(self) -> None:
        """Restart what died."""
        dead = [name for name, process in self._processes.items() if process.exitcode not in (None, 0)]
        for name in dead:
            note_death(self.folder, step=self._trained + 1, what=_how_ended(name, self._processes[name].exitcode))
            self._count_failure(name)
            if not name.startswith("rank"):
                self._start(name)
        if any(name.startswith("rank") for name in dead):
            self._stop("rank")
            self._start_ranks()

    def _count_failure(self, name: str) -> None:
        code = self._processes[name].exitcode
        if self.chaos is not None and code in (-signal.SIGKILL, ABORTED):
            return  # chaos did this: it killed the process itself, or another rank
        self._failures[name] += 1
        log = self.folder / "logs" / f"{name}.log"
        if code == REFUSED:
            raise RunFailed(f"{last_lines(log)}; its log is {log}")
        if self._failures[name] >= _MOST_FAILURES:
            raise RunFailed(
                f"{name} died {_MOST_FAILURES} times, the last with code {code}; the end of {log}:\n"
                + last_lines(log, _LAST_LINES)
            )

    def kill(self, kind: str) -> None:
        """Kill (SIGKILL) a random process of a kind: plane, worker or rank."""
        alive = [n for n, process in self._processes.items() if n.startswith(kind) and process.exitcode is None]
        if alive:
            process = self._processes[self._random.choice(alive)]
            process.kill()
            process.join()

    def kill_one(self) -> None:
        """Kill one process of a random kind. Chaos calls this about every `every_s` seconds."""
        assert self.chaos is not None
        kind = self._random.choice(["plane", "rank", "worker", *(["judge"] if self.config.late_columns else [])])
        self.kill(kind)
        self.chaos.kills[kind] += 1

    def _stop(self, kind: str) -> None:
        """End the processes whose names start with `kind`; "" ends all."""
        chosen = [process for name, process in self._processes.items() if name.startswith(kind)]
        for process in chosen:
            # Ranks and workers have nothing to save. The plane gets SIGTERM, and 10 s to close its log.
            if kind in ("rank", "worker"):
                process.kill()
            else:
                process.terminate()
        for process in chosen:
            process.join(10)
            if process.exitcode is None:
                process.kill()
                process.join()

    def _look(self, plane: Any) -> None:
        with contextlib.suppress(PenstockError):
            if "plane" not in self._processes or self._processes["plane"].exitcode is None:
                self._status = plane.status()
                self._lines.note(self._status)
