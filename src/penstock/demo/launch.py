"""Starts the processes of a run, watches them, restarts those that die and decides when the run is over.

A dead worker is restarted, and so is a dead plane, which continues from its log. When a rank dies, the plane notifies
the other ranks and they stop. All ranks then restart from the last checkpoint, and the plane serves the steps after it
again. With `chaos` the launcher itself kills a random process every few seconds. On a Ray cluster, `NodeLoss` kills one
node, once.
"""

from __future__ import annotations

import contextlib
import errno
import json
import random
import signal
import socket
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from penstock.client import open as open_plane
from penstock.config import Given
from penstock.config import template as settings_file
from penstock.demo.processes import ABORTED, REFUSED, address, last_lines, start, start_fork_server
from penstock.demo.tasks import write_tokenizer
from penstock.errors import ConfigError, PenstockError
from penstock.extras import require
from penstock.log import is_run, own, release
from penstock.plane import ClusterSettings, PlaneSettings
from penstock.protocol import FeedbackEvent, Timeouts
from penstock.server import metrics_token, parse_address
from penstock.train import TrainConfig, check_installed, image_processor, is_vision, template
from penstock.view import Metrics, PlaneLines, at_work, note_death

if TYPE_CHECKING:
    from penstock.ray import LocalCluster


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
        if is_run(self.folder):
            raise ConfigError(
                f"{self.folder}: the folder of a plane, such as `penstock serve` makes; give another one: "
                f"this run keeps its own plane in {self.folder / 'plane'}"
            )
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


# ------------------------------------------------------------------ before the start


def check_surroundings(config: TrainConfig) -> None:
    """Raise for the first problem that would keep the run from starting, with the setting and the remedy."""
    check_installed(list(config.metrics))
    if config.model.path and not (Path(config.model.path) / "config.json").is_file():
        raise ConfigError(f"model.path: {config.model.path!r} has no config.json; give the folder of a saved model")
    if is_vision(config.model):
        image_processor(config.model)
    for url in config.listen:
        _check_listen(url)
    if config.prometheus:
        require("prometheus", "prometheus_client")
        metrics_token(config.prometheus, None)  # rejects an address that other hosts can reach
        host, port = parse_address(config.prometheus, "metrics")
        _check_port("prometheus", config.prometheus, host, port)
    _make_folder(Path(config.folder))
    if not config.plane:
        _check_alone(Path(config.folder))


def _check_listen(url: str) -> None:
    scheme, _, rest = url.rpartition("://")
    if scheme.endswith("ipc"):
        if not Path(rest).parent.is_dir():
            raise ConfigError(f"listen: {url!r}: {Path(rest).parent} is not a folder; make it, or use another path")
        return
    if scheme != "tcp" or rest.endswith(":*"):
        return
    parts = urlsplit(url)
    if parts.hostname and parts.port is not None:
        _check_port("listen", url, parts.hostname, parts.port)


def _check_port(setting: str, given: str, host: str, port: int) -> None:
    """Bind the port for a moment. If it is taken between now and the plane's start, the plane reports it."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        return  # a name that only ZeroMQ resolves, such as that of a network interface
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            busy = "another process listens there" if error.errno == errno.EADDRINUSE else error.strerror
            raise ConfigError(f"{setting}: {given!r}: {busy}; use another port") from None


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"folder: {str(folder)!r}: {error.strerror}; give a folder that can be made") from None


def _check_alone(folder: Path) -> None:
    """Raise if a plane is running in the run's folder: its ranks and ours would join each other."""
    if (folder / "plane").is_dir():
        release(own(folder / "plane"))


# ------------------------------------------------------------------ on a Ray cluster


NODES = 3
_CLUSTERS_OWN = ("keys", "listen")
"""Settings that a plane in a cluster chooses itself."""
_LOSE_AFTER_S = 8.0
"""A third of the time until the loss (see `Launcher._run`): training must be under way by then."""


class NodeLoss(Launcher):
    """A launcher whose chaos is to kill one node, once."""

    def __init__(self, config: TrainConfig, cluster: LocalCluster) -> None:
        super().__init__(config, chaos=Chaos(every_s=_LOSE_AFTER_S))
        self._cluster = cluster

    def kill_one(self) -> None:
        assert self.chaos is not None
        if not self.chaos.kills["node"]:
            self._cluster.kill_node(self._cluster.others[-1])
            self.chaos.kills["node"] += 1
            self._cluster.add_node()


def say(message: str) -> None:
    print(f"penstock demo: {message}", file=sys.stderr, flush=True)


@contextmanager
def started(config: TrainConfig) -> Iterator[tuple[TrainConfig, LocalCluster]]:
    """Start a cluster and the run's plane in it. Yields the configuration that uses them, and the cluster."""
    from penstock.ray import LocalCluster, open_given

    folder = Path(config.folder).resolve()
    run = replace(config, plane=f"ray://{config.run}", timeouts=replace(config.timeouts, plane_s=120.0))
    own = {field.name: getattr(run, field.name) for field in fields(PlaneSettings)}
    settings = ClusterSettings(**own, folder=str(folder / "plane"))
    tables = tomllib.loads(settings_file(settings, title="", all_values=True))
    given = Given({name: value for name, value in tables.items() if name not in _CLUSTERS_OWN}, "the demo")
    say(f"starting a Ray cluster of {NODES} nodes on this machine, loopback only")
    with LocalCluster(NODES, say=say) as cluster:
        say(f"starting the plane {run.plane} on the node that will be lost")
        with open_given(run.plane, given, node=cluster.others[-1]) as plane:
            say("the plane listens; starting workers and ranks")
            yield run, cluster
            plane.kill()
