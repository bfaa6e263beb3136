"""A process that has everything imported and forks the others: a rank or worker is at work in a blink.

Importing torch and transformers costs ten seconds of CPU. Paid once, before any thread exists, it is shared by every
process forked from here, and one that was killed is replaced at once. The launcher talks to it in JSON lines:

    -> {"role": "rank", "config": "...", "index": 0, "log": "...", "env": {...}, "key": "rank-0"}
    <- {"ready": true}                           when everything is imported
    <- {"key": "rank-0", "pid": 4711}
    <- {"pid": 4711, "code": -9}                 when a child has ended

Children die with the nursery, and the nursery with the launcher.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

from penstock.assets import worker_environment
from penstock.demo import role
from penstock.errors import Closed, PenstockError
from penstock.server import die_with_parent

_START_S = 300.0
_STEADY = {"TORCH_FR_BUFFER_SIZE": "64"}
"""Torch records its last 2,000 collectives; small things that stay, between tensors that go, break up the heap. With
the full record ranks grew by about 3 MB per 100 steps over their first 500, with this one by 0.3."""


class Child:
    """A process that the nursery forked: the part of `subprocess.Popen` that a launcher needs."""

    def __init__(self) -> None:
        self.pid = 0
        self.code: int | None = None
        self._born, self._ended = threading.Event(), threading.Event()

    def poll(self) -> int | None:
        return self.code

    def send_signal(self, sign: int) -> None:
        if self._born.wait(_START_S) and self.code is None:
            try:
                os.kill(self.pid, sign)
            except ProcessLookupError:
                return

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        assert self.code is not None
        return self.code

    def born(self, pid: int) -> None:
        self.pid = pid
        self._born.set()

    def ended(self, code: int) -> None:
        self.code = code
        self._born.set()
        self._ended.set()


class Nursery:
    """The launcher's side."""

    def __init__(self, config: Path, log: Path) -> None:
        with log.open("ab") as file:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-m", "penstock.demo.nursery", str(config), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env={**_STEADY, **worker_environment(os.environ)},
                text=True,
            )
        self._log = log
        self._ready, self._gone = threading.Event(), False
        self._by_key: dict[str, Child] = {}
        self._by_pid: dict[int, Child] = {}
        self._listener = threading.Thread(target=self._listen, name="nursery", daemon=True)
        self._listener.start()

    def wait_ready(self) -> None:
        """Return when everything is imported and the model could be built; else raise with the reason."""
        if not self._ready.wait(_START_S):
            raise Closed(f"the processes of the run: not ready after {_START_S:g} s; see {self._log}")
        if self._gone:
            raise Closed(f"the processes of the run cannot start: {last_words(self._log)}")

    def start(self, key: str, words: dict[str, Any]) -> Child:
        """Fork a role; returns at once, also while the nursery still imports."""
        child = self._by_key[key] = Child()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({**words, "key": key}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Closed(f"the process that starts the others is gone: {last_words(self._log)}") from None
        return child

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            news = json.loads(line)
            if "ready" in news:
                self._ready.set()
            elif "key" in news:
                child = self._by_pid[news["pid"]] = self._by_key[news["key"]]
                child.born(news["pid"])
            else:
                self._by_pid.pop(news["pid"]).ended(news["code"])
        for child in self._by_key.values():  # the nursery ended, and all its children with it
            if child.code is None:
                child.ended(-int(signal.SIGKILL))
        self._gone = True
        self._ready.set()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._listener.join(5)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # what it had not read is lost with it
                    pipe.close()


def last_words(log: Path, lines: int = 1) -> str:
    """The last lines that a process wrote that are not blank."""
    with contextlib.suppress(OSError):
        found = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        if found:
            return "\n".join(found[-lines:])
    return f"it wrote nothing; its log is {log}"


def main() -> int:
    config, launcher = Path(sys.argv[1]), int(sys.argv[2])
    if not die_with_parent(launcher, signal.SIGKILL):
        return 1
    try:
        role.preload(config)
    except PenstockError as error:
        print(error, file=sys.stderr)
        return 1
    _say({"ready": True})
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin.buffer, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)
        rest = b""
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin.buffer:
                    data = os.read(sys.stdin.fileno(), 1 << 16)
                    if not data:
                        return 0
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        _fork(json.loads(line))
                else:
                    os.read(wake_read, 1 << 10)
            _reap()


def _fork(words: dict[str, Any]) -> None:
    nursery = os.getpid()
    pid = os.fork()
    if pid == 0:
        _grow_up(words, nursery)
    _say({"key": words["key"], "pid": pid})


def _grow_up(words: dict[str, Any], nursery: int) -> NoReturn:
    """In the child: leave the nursery's files and signals behind, then be what it was forked for."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(words["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for old, new in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(old, new)
        os.environ.update(words["env"])
        if die_with_parent(nursery, signal.SIGKILL):
            code = role.run(words["role"], Path(words["config"]), int(words["index"]))
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 - whatever it was belongs into the log, and the process must end here
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def _reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _say({"pid": pid, "code": os.waitstatus_to_exitcode(status)})


def _say(news: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(news) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
