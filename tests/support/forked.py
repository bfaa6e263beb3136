"""Programs of the tests, each a process of its own that is forked from one that has imported them all.

    process = Forked("tests.support.farm", ["rank", url, "0", "2", "9"], stdout=write_end)

Importing a plane takes 0.35 s of core time, and the suite starts hundreds of processes. One process per test worker,
started at first use, imports the programs and then forks for each request. A program runs in the folder and environment
that the test has at that moment. `Forked` has the methods of `subprocess.Popen` that tests of processes need. A program
with `--parent` is killed when the test worker ends.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

PROGRAMS = ("tests.support.processes", "tests.support.farm", "tests.support.task_torture")
_ROOT = Path(__file__).parents[2]
_LONGEST = 1 << 20
_lock = threading.Lock()
_line: list[tuple[socket.socket, subprocess.Popen[bytes]]] = []


class Forked:
    """A running program: its module's `main` with these words."""

    def __init__(self, module: str, words: Sequence[str], *, stdout: int = 1, stderr: int = 2) -> None:
        status, theirs = os.pipe()
        self._status = os.fdopen(status, "rb", buffering=0)
        self.returncode: int | None = None
        with _lock:
            line, server = _server()
            own = [f"--parent={server.pid}" if word == f"--parent={os.getpid()}" else word for word in words]
            asked = {"module": module, "words": own, "env": dict(os.environ), "cwd": str(Path.cwd())}
            socket.send_fds(line, [json.dumps(asked).encode()], [stdout, stderr, theirs])
        os.close(theirs)
        self.pid = int.from_bytes(self._status.read(8), "little")
        assert self.pid, f"the process that forks {module} has ended"

    def poll(self) -> int | None:
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._status, selectors.EVENT_READ)
                if selector.select(timeout):
                    self.returncode = int.from_bytes(self._status.read(8), "little", signed=True)
                    self._status.close()
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _server() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    if not _line:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", __name__, str(there.fileno())]
        server = subprocess.Popen(command, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL, cwd=_ROOT)
        _line.append((here, server))
        atexit.register(_end, here, server)
        there.close()
    return _line[0]


def _end(line: socket.socket, server: subprocess.Popen[bytes]) -> None:
    line.close()
    server.wait()


# ------------------------------------------------------------------ the process that forks


def _serve(line: socket.socket) -> bytes:
    """Fork for each request. Returns the request in the child, b"" when the test worker has ended."""
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the test worker, with which this process ends
    running: dict[int, int] = {}
    with selectors.DefaultSelector() as selector:
        for end in (line, woken):
            selector.register(end, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if woken in ready:
                woken.recv(4096)
                _report_ended(running)
            if line not in ready:
                continue
            request, fds, *_ = socket.recv_fds(line, _LONGEST, 3)
            pid = os.fork() if request else 0
            if pid == 0:
                break
            os.write(fds[2], pid.to_bytes(8, "little"))
            running[pid] = fds.pop()
            for fd in fds:
                os.close(fd)
    signal.set_wakeup_fd(-1)
    for end in (line, woken, wake):
        end.close()
    _become(fds, running.values())
    return request


def _report_ended(running: dict[int, int]) -> None:
    for pid in list(running):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            end = running.pop(pid)
            with suppress(BrokenPipeError):  # the test worker has ended
                os.write(end, os.waitstatus_to_exitcode(status).to_bytes(8, "little", signed=True))
            os.close(end)


def _become(fds: Sequence[int], others: Iterable[int]) -> None:
    """Have the output go where it should, and signals do what they do in a new process."""
    for number, fd in enumerate(fds[:2], 1):
        os.dup2(fd, number)
    for fd in (*fds, *others):
        os.close(fd)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def main(words: Sequence[str]) -> int:
    for module in PROGRAMS:
        importlib.import_module(module)
    gc.freeze()  # a collection would copy what the processes share
    request = _serve(socket.socket(fileno=int(words[0])))
    if not request:
        return 0
    asked = json.loads(request)
    os.chdir(asked["cwd"])
    sys.path.insert(0, asked["cwd"])  # as `python -m` would
    os.environ.clear()
    os.environ.update(asked["env"])
    return int(importlib.import_module(asked["module"]).main(asked["words"]) or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
