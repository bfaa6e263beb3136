"""The server process: one plane, its signals, its log lines, its exit codes.

    SIGTERM, SIGINT   answer what has arrived, then end: within 10 s, for the watchdog sees to it
    a second one      end at once
    SIGUSR1           write the stacks of all threads to the log
    parent killed     end as on SIGTERM, if the parent was named

Whatever the end, nothing acknowledged is lost: it was on disk before it was acknowledged. Ranks are not told of an
orderly end: if a plane comes back on the same folder within `timeouts.plane_s` they go on where they were.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import IO, Any

from penstock.client import Plane, plane_transport, usable_url
from penstock.errors import ConfigError, Fenced
from penstock.log import Log
from penstock.plane import PlaneLoop, ServerSettings, note_listening, open_log, run_folder
from penstock.server.allocation import settle_memory
from penstock.server.http_api import HttpApi, find_token
from penstock.server.log_format import LineFormatter
from penstock.server.metrics_page import MetricsPage, metrics_token
from penstock.server.prometheus import Snapshot
from penstock.server.watchdog import Watchdog, die_with_parent
from penstock.transport import MemoryPlane

logger = logging.getLogger("penstock.process")
_DRAIN_S = 2.0
LIVE_S = 30.0
"""Without a turn of the loop for longer, /healthz says that the plane is stuck; the watchdog waits longer than that."""
IN_PROCESS = "memory:"
"""The address of what runs in this process: nobody else can use it."""


class Exit(IntEnum):
    """How a server process ended. Killed by the watchdog it ends by SIGKILL, which a shell shows as 137."""

    ENDED = 0
    """By SIGTERM or SIGINT, in order."""
    REFUSED = 1
    """It did not start: a setting, an address, a folder that another plane has open."""
    USAGE = 2
    """The command line could not be read."""
    FAILED = 3
    """Something went wrong beyond repair; the log says what, and every rank was told."""
    FENCED = 4
    """Another plane has taken the run over."""
    AT_ONCE = 143
    """A second SIGTERM or SIGINT came before it had ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What others need to know of a plane that listens."""

    pid: int
    watchdog: int | None
    """Its watchdog's process."""
    run: str
    run_id: str
    folder: str
    urls: tuple[str, ...]
    ranks: int
    replicas: int
    next_step: int
    metrics: str | None
    """Address of the Prometheus page."""
    http: str | None
    """Address of the HTTP API."""
    http_token: str | None
    """Its token, if it was made here; None if it was given."""
    secured: bool
    """Whether clients need keys."""


def run_plane(config: ServerSettings, *, ready: Callable[[Ready], None], parent: int | None = None) -> Exit:
    """Run a plane in this process, in the main thread, until a signal ends it; `ready` is called when it listens.

    `parent` names the process that started this one: when that dies, however it dies, so does the plane.
    """
    os.umask(0o077)
    if parent is not None and not die_with_parent(parent, signal.SIGTERM):
        raise ConfigError(f"parent {parent}: this process was started by {os.getppid()}; name that, or leave it out")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_logging(config.log_file))
        turns = _open(config, stack)
        settle_memory()
        state = turns.ready
        logger.info("epoch %d, next step %d, listening at %s", turns.log.epoch, state.next_step, ", ".join(state.urls))
        try:
            ready(state)
            turns.server.run()
        except Fenced as error:
            logger.error("fenced: %s", error)  # noqa: TRY400 - the sentence says it all
            return Exit.FENCED
        except Exception:
            logger.exception("the plane failed")
            return Exit.FAILED
        logger.info("ended")
    return Exit.ENDED


class LoopHooks:
    """What is done between two turns of the plane's loop: beat, answer onlookers, end when asked to."""

    def __init__(self, config: ServerSettings) -> None:
        self.config = config
        self.server: PlaneLoop
        self.log: Log
        self.watchdog: Watchdog | None = None
        self.page: MetricsPage | None = None
        self.door: HttpApi | None = None
        self.made_token: str | None = None
        self.snapshot = Snapshot(lambda: self.server.status())
        self._asked: float | None = None
        self._turned_at: float | None = None
        self._seen: tuple[int, ...] = ()

    def __call__(self) -> None:
        now = self._turned_at = time.monotonic()
        if self.watchdog is not None and self.watchdog.due(now) and not self.watchdog.beat(self._where(), now):
            logger.warning("the watchdog had died; started another, process %d", self.watchdog.pid)
            signal.set_wakeup_fd(self.watchdog.pipe, warn_on_full_buffer=False)
        self.snapshot.on_turn()
        if self._asked is not None:
            self._drain(now)

    def not_live(self) -> str:
        age = 0.0 if self._turned_at is None else time.monotonic() - self._turned_at
        return f"the plane's loop has not turned for {age:.0f} s" if age > LIVE_S else ""

    def not_ready(self) -> str:
        if self._turned_at is None:
            return "starting"
        return "ending" if self._asked is not None else self.not_live()

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._asked is not None:
            os._exit(Exit.AT_ONCE)
        self._asked = time.monotonic()
        logger.info("%s: ending", signal.Signals(number).name)

    def _drain(self, now: float) -> None:
        """End after the first turn in which nothing happened: what had arrived by then is written and answered."""
        assert self._asked is not None
        engine = self.server.engine
        seen = (engine.ledger.accepted, engine.next_step, engine.last_step, engine.counts.total())
        if seen == self._seen or now - self._asked > _DRAIN_S:
            self.server.stop()
        self._seen = seen

    def _where(self) -> str:
        engine, coordinator = self.server.engine, self.server.coordinator
        return (
            f"epoch {coordinator.epoch}, session {coordinator.session} {coordinator.phase.value}, step "
            f"{engine.next_step}, {len(engine.run_tables)} groups and {engine.held_bytes} bytes held, waiting for "
            f"{coordinator.waits_for(time.monotonic())}"
        )

    @property
    def ready(self) -> Ready:
        return Ready(
            pid=os.getpid(),
            watchdog=None if self.watchdog is None else self.watchdog.pid,
            run=self.config.run,
            run_id=self.log.run_id,
            folder=self.config.folder or self.log.where,
            urls=tuple(url for url in self.server.urls if url != IN_PROCESS),
            ranks=self.config.packing.ranks,
            replicas=self.config.replicas,
            next_step=self.server.engine.next_step,
            metrics=None if self.page is None else self.page.url,
            http=None if self.door is None else self.door.url,
            http_token=self.made_token,
            secured=self.config.keys is not None,
        )


def _open(config: ServerSettings, stack: contextlib.ExitStack) -> LoopHooks:
    """Everything that can refuse to start; what was opened is closed again if the rest cannot be."""
    turns = LoopHooks(config)
    if config.metrics is None and config.metrics_token is not None:
        raise ConfigError(f"metrics_token: {config.metrics_token!r} without metrics; give the address of the page too")
    token = None if config.metrics is None else metrics_token(config.metrics, config.metrics_token)
    if config.http is None and config.http_token is not None:
        raise ConfigError(f"http_token: {config.http_token!r} without http; give the address of the HTTP API too")
    with contextlib.ExitStack() as opened:
        log = _open_log(config)
        opened.callback(log.close)
        turns.log = log
        transports = []
        for url in config.listen:
            transports.append(plane_transport(url, config.keys, max_message=config.max_message_bytes))
            opened.callback(transports[-1].close)
            stack.callback(_remove_socket, transports[-1].url, _inode(transports[-1].url))
        memory = MemoryPlane()
        turns.server = PlaneLoop(config, log, [*transports, memory] if config.http else transports, on_turn=turns)
        note_listening(log, [usable_url(transport.url) for transport in transports])
        if config.http is not None:
            memory.last_words = turns.server.last_words
            turns.door, turns.made_token = _open_door(config, config.http, memory)
            opened.callback(turns.door.close)
        if config.metrics is not None:
            turns.page = MetricsPage(config.metrics, turns.snapshot.ask, token=token, health=turns)
            opened.callback(turns.page.close)
        stall = config.watchdog.stall_s
        if stall is not None:
            turns.watchdog = Watchdog(stall_s=stall, end_s=config.watchdog.end_s, grace_s=config.watchdog.grace_s)
            opened.callback(turns.watchdog.close)
        opened.pop_all()
    _keep(turns, stack)
    return turns


def _open_door(config: ServerSettings, address: str, memory: MemoryPlane) -> tuple[HttpApi, str | None]:
    """The door, a client of the plane in this process; and its token, if it was made here."""
    token, is_made = find_token(address, config.http_token, config.folder)
    line = Plane(memory.connect, url=IN_PROCESS, run=config.run, timeouts=config.timeouts)
    try:
        return HttpApi(address, line, token=token), token if is_made else None
    except BaseException:
        line.close()
        raise


def _open_log(config: ServerSettings) -> Log:
    return open_log(run_folder(config.folder, config), config)


def _keep(turns: LoopHooks, stack: contextlib.ExitStack) -> None:
    """Signals from here on; at the end, what the server does not close itself."""
    if turns.watchdog is not None:
        stack.callback(turns.watchdog.close)
        signal.set_wakeup_fd(turns.watchdog.pipe, warn_on_full_buffer=False)
        stack.callback(signal.set_wakeup_fd, -1)
    if turns.page is not None:
        stack.callback(turns.page.close)
    if turns.door is not None:
        stack.callback(turns.door.close)
    for number in (signal.SIGTERM, signal.SIGINT):
        stack.callback(signal.signal, number, signal.signal(number, turns.on_signal))
    turns()  # the first beat: from here on the watchdog knows what it watches


def _inode(url: str) -> int:
    """Of an ipc address's socket file; 0 for other addresses."""
    path = url.removeprefix("ipc://")
    return Path(path).stat().st_ino if path != url else 0


def _remove_socket(url: str, inode: int) -> None:
    """ZeroMQ leaves the file behind; remove it unless somebody else listens there by now."""
    path = Path(url.removeprefix("ipc://"))
    with contextlib.suppress(FileNotFoundError):
        if inode and path.stat().st_ino == inode:
            path.unlink()


@contextlib.contextmanager
def _logging(path: str | None) -> Iterator[None]:
    """Log lines to a file or stderr, where SIGUSR1 and crashes write stacks too."""
    with contextlib.ExitStack() as stack:
        stream: IO[Any] = sys.stderr
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            stream = stack.enter_context(Path(path).open("a", encoding="utf-8"))
            os.dup2(stream.fileno(), 2)  # the watchdog, and whatever a library writes, end up there as well
        handler = logging.StreamHandler(stream)
        handler.setFormatter(LineFormatter())
        root = logging.getLogger("penstock")
        root.addHandler(handler)
        root.setLevel(logging.INFO)
        stack.callback(root.removeHandler, handler)
        faulthandler.enable(2, all_threads=True)
        faulthandler.register(signal.SIGUSR1, 2, all_threads=True)
        stack.callback(faulthandler.unregister, signal.SIGUSR1)
        yield
