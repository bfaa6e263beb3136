"""The server process behind `penstock serve`: one plane, its signals, log lines and exit codes.

    SIGTERM, SIGINT   answer what has arrived, then end. The watchdog ensures that this takes at most 10 s
    a second one      end at once
    SIGUSR1           write the stacks of all threads to the log
    parent killed     end as on SIGTERM, if the parent was named

However it ends, nothing acknowledged is lost: it was on disk before it was acknowledged. A clean end is not announced
to the ranks: if a plane starts on the same folder within `timeouts.plane_s`, they continue where they were.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
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
from penstock.server.http_api import HttpApi, find_token
from penstock.server.log_format import log_lines
from penstock.server.metrics_page import MetricsPage, metrics_token
from penstock.server.prometheus import Snapshot
from penstock.server.watchdog import Watchdog, die_with_parent
from penstock.transport import MemoryPlane

logger = logging.getLogger("penstock.process")
_DRAIN_S = 2.0
LIVE_S = 30.0
"""/healthz reports a stuck plane when its loop has not turned for longer. The watchdog waits longer than that."""
IN_PROCESS = "memory:"
"""The address of the in-process transport, which no other process can use."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt`, from <malloc.h>."""
KEPT_BYTES = 128 << 20
"""Freed memory that the C library keeps, per arena."""
LARGE_BYTES = 32 << 20
"""Blocks from this size on are mapped one by one and returned to the system at once."""


class Exit(IntEnum):
    """Exit codes of a server process. If the watchdog kills it, a shell shows 137 (SIGKILL)."""

    ENDED = 0
    """A clean end by SIGTERM or SIGINT."""
    REFUSED = 1
    """It did not start: an invalid setting or address, or a folder that another plane has open."""
    USAGE = 2
    """Invalid command line."""
    FAILED = 3
    """A fatal error. The log has the reason, and it was sent to every rank."""
    FENCED = 4
    """Another plane has taken the run over."""
    AT_ONCE = 143
    """A second SIGTERM or SIGINT came before it had ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The report of a plane that listens."""

    pid: int
    watchdog: int | None
    """The pid of its watchdog."""
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
    """Its token if it was generated here, None if it was configured."""
    secured: bool
    """Whether clients need keys."""


def run_plane(config: ServerSettings, *, ready: Callable[[Ready], None], parent: int | None = None) -> Exit:
    """Run a plane in the main thread of this process until a signal ends it. Calls `ready` when it listens.

    `parent` is the pid of the process that started this one. When that process dies, however it dies, the plane ends.
    """
    os.umask(0o077)  # logs, sockets and frames are private to this user
    if parent is not None and not die_with_parent(parent, signal.SIGTERM):
        raise ConfigError(f"parent {parent}: this process was started by {os.getppid()}; name that, or leave it out")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_logging(config.log_file))
        hooks = _open(config, stack)
        settle_memory()
        state = hooks.ready
        logger.info("epoch %d, next step %d, listening at %s", hooks.log.epoch, state.next_step, ", ".join(state.urls))
        try:
            ready(state)
            hooks.server.run()
        except Fenced as error:
            logger.error("fenced: %s", error)  # noqa: TRY400 - the message is enough
            return Exit.FENCED
        except Exception:
            logger.exception("the plane failed")
            return Exit.FAILED
        logger.info("ended")
    return Exit.ENDED


def settle_memory() -> None:
    """Tune memory management. Call once, when everything is loaded.

    Every step frees some tens of megabytes and needs them again for the next. By default the C library returns them to
    the system each time, and faulting the pages in again costs about as much as building the step. So it keeps them.
    And Python's collector would scan all objects of all modules again and again: `gc.freeze` excludes them.
    `tests/server/test_allocation.py` counts the page faults. Does nothing where the C library has no `mallopt`.
    """
    gc.collect()
    gc.freeze()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, LARGE_BYTES)


class LoopHooks:
    """Called between two turns of the plane's loop: beats, answers observers, ends the loop when asked to."""

    def __init__(self, config: ServerSettings) -> None:
        self.config = config
        self.server: PlaneLoop
        self.log: Log
        self.watchdog: Watchdog | None = None
        self.page: MetricsPage | None = None
        self.http_api: HttpApi | None = None
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
        """Return the reason to restart the process, or ""."""
        age = 0.0 if self._turned_at is None else time.monotonic() - self._turned_at
        return f"the plane's loop has not turned for {age:.0f} s" if age > LIVE_S else ""

    def not_ready(self) -> str:
        """Return why clients should not connect now, or ""."""
        if self._turned_at is None:
            return "starting"
        return "ending" if self._asked is not None else self.not_live()

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._asked is not None:  # nothing acknowledged is lost by this: it is on disk
            os._exit(Exit.AT_ONCE)
        self._asked = time.monotonic()
        logger.info("%s: ending", signal.Signals(number).name)

    def _drain(self, now: float) -> None:
        """Stop after the first turn in which nothing happened: everything that arrived is then written and answered."""
        assert self._asked is not None
        engine = self.server.engine
        seen = (engine.ledger.accepted, engine.next_step, engine.last_step, engine.counts.total())
        # Counters that change with any work: equal ones in two turns mean that nothing was left to do in between.
        if seen == self._seen or now - self._asked > _DRAIN_S:
            self.server.stop()
        self._seen = seen

    def _where(self) -> str:
        engine, coordinator = self.server.engine, self.server.coordinator
        return (
            f"epoch {coordinator.epoch}, session {coordinator.session} {coordinator.phase.value}, step "
            f"{engine.next_step}, {len(engine.tenant_tables)} groups and {engine.held_bytes} bytes held, waiting for "
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
            http=None if self.http_api is None else self.http_api.url,
            http_token=self.made_token,
            secured=self.config.keys is not None,
        )


def _open(config: ServerSettings, stack: contextlib.ExitStack) -> LoopHooks:
    """Open everything that may fail to start, and register on `stack` what to close at the end.

    Closes what was opened if a later part fails."""
    hooks = LoopHooks(config)
    if config.metrics is None and config.metrics_token is not None:
        raise ConfigError(f"metrics_token: {config.metrics_token!r} without metrics; give the address of the page too")
    token = None if config.metrics is None else metrics_token(config.metrics, config.metrics_token)
    if config.http is None and config.http_token is not None:
        raise ConfigError(f"http_token: {config.http_token!r} without http; give the address of the HTTP API too")
    with contextlib.ExitStack() as opened:
        log = open_log(run_folder(config.folder, config), config)
        opened.callback(log.close)
        hooks.log = log
        transports = []
        for url in config.listen:
            transports.append(plane_transport(url, config.keys, max_message=config.max_message_bytes))
            opened.callback(transports[-1].close)
            stack.callback(_remove_socket, transports[-1].url, _inode(transports[-1].url))
        # The HTTP API is a client in this process. Its puts take the same path as those of any other client.
        memory = MemoryPlane()
        hooks.server = PlaneLoop(config, log, [*transports, memory] if config.http else transports, on_turn=hooks)
        note_listening(log, [usable_url(transport.url) for transport in transports])
        # The watchdog is closed after what follows it here: it also ends a process whose servers do not close.
        if (stall := config.watchdog.stall_s) is not None:
            hooks.watchdog = Watchdog(stall_s=stall, end_s=config.watchdog.end_s, grace_s=config.watchdog.grace_s)
            stack.callback(hooks.watchdog.close)
        if config.http is not None:
            memory.last_words = hooks.server.last_words
            hooks.http_api, hooks.made_token = _open_http(config, config.http, memory)
            stack.callback(hooks.http_api.close)
        if config.metrics is not None:
            hooks.page = MetricsPage(config.metrics, hooks.snapshot.ask, token=token, health=hooks)
            stack.callback(hooks.page.close)
        opened.pop_all()  # everything is open: from here on the plane's loop closes log and transports
    _handle_signals(hooks, stack)
    return hooks


def _open_http(config: ServerSettings, address: str, memory: MemoryPlane) -> tuple[HttpApi, str | None]:
    """Open the HTTP API, a client of the plane in this process. Returns its token if that was generated here."""
    token, is_made = find_token(address, config.http_token, config.folder)
    plane = Plane(memory.connect, url=IN_PROCESS, run=config.run, timeouts=config.timeouts)
    try:
        return HttpApi(address, plane, token=token), token if is_made else None
    except BaseException:
        plane.close()
        raise


def _handle_signals(hooks: LoopHooks, stack: contextlib.ExitStack) -> None:
    """Install signal handlers, which `stack` removes, and beat for the first time."""
    if hooks.watchdog is not None:
        signal.set_wakeup_fd(hooks.watchdog.pipe, warn_on_full_buffer=False)
        stack.callback(signal.set_wakeup_fd, -1)
    for number in (signal.SIGTERM, signal.SIGINT):
        stack.callback(signal.signal, number, signal.signal(number, hooks.on_signal))
    hooks()  # the first beat: from here on the watchdog reports the plane's state


def _inode(url: str) -> int:
    """Return the inode of an ipc address's socket file, or 0 for other addresses."""
    path = url.removeprefix("ipc://")
    return Path(path).stat().st_ino if path != url else 0


def _remove_socket(url: str, inode: int) -> None:
    """Remove the socket file that ZeroMQ leaves behind, unless another plane listens there by now."""
    path = Path(url.removeprefix("ipc://"))
    with contextlib.suppress(FileNotFoundError):
        if inode and path.stat().st_ino == inode:
            path.unlink()


@contextlib.contextmanager
def _logging(path: str | None) -> Iterator[None]:
    """Write log lines to a file or stderr. SIGUSR1 and crashes write stacks there too."""
    with contextlib.ExitStack() as stack:
        stream: IO[Any] = sys.stderr
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            stream = stack.enter_context(Path(path).open("a", encoding="utf-8"))
            os.dup2(stream.fileno(), 2)  # output of the watchdog and of libraries goes to the file too
        stack.callback(log_lines(stream))
        faulthandler.enable(2, all_threads=True)
        faulthandler.register(signal.SIGUSR1, 2, all_threads=True)
        stack.callback(faulthandler.unregister, signal.SIGUSR1)
        yield
