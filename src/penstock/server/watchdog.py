"""The watchdog: a second process that kills a plane whose loop no longer turns. Stacks first, then SIGKILL.

The plane writes to a pipe: a line per beat with its state, and the number of each signal that asks it to end. The
latter goes through `signal.set_wakeup_fd`, so it works even while Python code cannot run. The watchdog reads the other
end.

    no beat for `stall_s`               stacks (SIGUSR1), then SIGKILL
    asked to end, not gone in `end_s`   stacks, then SIGKILL
    asked to end twice                  SIGKILL at once
    the pipe ends                       the plane is gone, and the watchdog ends too

`faulthandler.dump_traceback_later` would need only a thread, but it cannot kill a process that is stopped (SIGSTOP).

This file is also run as a program, by its path and with the standard library only: the watchdog of a stuck plane must
not depend on the plane's code. The watchdog cannot outlive the plane: the kernel ends it with its parent
(PR_SET_PDEATHSIG). And a plane that finds the pipe broken starts another watchdog.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_BEATS_PER_S = 4
_ENDING = (signal.SIGTERM, signal.SIGINT)


def die_with_parent(parent: int, sign: signal.Signals) -> bool:
    """Have the kernel send `sign` when the thread that started this process ends. Returns False if it has already
    ended."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(sign), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    return os.getppid() == parent


class Watchdog:
    """The plane's side: starts the watchdog process and sends beats.

    `beat` may be called at every turn of the loop if `due`, which limits it to a few times per second.
    """

    def __init__(self, *, stall_s: float = 300.0, end_s: float = 7.0, grace_s: float = 2.0) -> None:
        self._times = {"stall": stall_s, "end": end_s, "grace": grace_s}
        self._gap_s = min(1 / _BEATS_PER_S, stall_s / 8)
        self._next = 0.0
        self._child: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        self._start()

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    @property
    def pipe(self) -> int:
        """For `signal.set_wakeup_fd`. Changes when the watchdog is started again."""
        return self._pipe

    def due(self, now: float) -> bool:
        return now >= self._next

    def beat(self, text: str, now: float) -> bool:
        """Report that the loop turns, and the plane's state. Returns False if the watchdog had died and was started
        again."""
        self._next = now + self._gap_s
        line = "".join(c if c.isprintable() else "?" for c in text)[:500]
        try:
            os.write(self._pipe, line.encode() + b"\n")
        except BlockingIOError:
            return True  # the pipe is full of unread beats: these already prove that the plane is alive
        except BrokenPipeError:
            self.close()
            self._start()
            return False
        return True

    def close(self) -> None:
        """End the watchdog. Called when the plane ends cleanly."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
        if self._child is not None:
            try:
                self._child.wait(2)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()

    def _start(self) -> None:
        reading, self._pipe = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._pipe, False)
        times = [f"--{name}={value}" for name, value in self._times.items()]
        command = [sys.executable, "-I", "-S", str(Path(__file__).resolve()), f"--plane={os.getpid()}", *times]
        self._child = subprocess.Popen(command, stdin=reading, stdout=subprocess.DEVNULL)  # noqa: S603
        os.close(reading)


class _Watch:
    """The watchdog's side."""

    def __init__(self, plane: int, times: argparse.Namespace) -> None:
        self._times = times
        self._name = plane
        self._plane = os.pidfd_open(plane)  # a pid may be reused by another process, a pidfd cannot
        self._state = "unknown"
        self._heard = time.monotonic()
        self._asked: float | None = None

    def run(self) -> int:
        while True:
            left = self._deadline() - time.monotonic()
            if left <= 0:
                return self._end(self._reason(), stacks=True)
            if not select.select([0], [], [], left)[0]:
                continue
            data = os.read(0, 1 << 16)
            if not data:
                return 0
            if self._read(data) > 1:
                return self._end("was asked to end a second time", stacks=False)

    def _read(self, data: bytes) -> int:
        """Parse beats and signal numbers. Returns how often the plane has been asked to end."""
        now = time.monotonic()
        asked = sum(data.count(bytes([sign])) for sign in _ENDING) + (self._asked is not None)
        if asked and self._asked is None:
            self._asked = now
        # Signal numbers are bytes below 32, beats are printable lines: drop all control characters but the newline
        # (10).
        lines = [line for line in data.translate(None, bytes(range(10)) + bytes(range(11, 32))).split(b"\n") if line]
        if lines:
            self._heard, self._state = now, lines[-1].decode(errors="replace")
        return asked

    def _deadline(self) -> float:
        stall = self._heard + float(self._times.stall)
        return stall if self._asked is None else min(stall, self._asked + float(self._times.end))

    def _reason(self) -> str:
        if self._asked is not None and time.monotonic() - self._asked >= self._times.end:
            return f"was asked to end {self._times.end:g} s ago and did not"
        return f"has not turned its loop for {self._times.stall:g} s"

    def _end(self, reason: str, *, stacks: bool) -> int:
        self._log(f"process {self._name} {reason}; its last state was: {self._state}")
        if stacks:
            self._log(f"asking process {self._name} for its stacks; SIGKILL in {self._times.grace:g} s")
            # A stopped process (SIGSTOP) would write nothing: SIGCONT lets it run long enough to dump its stacks.
            self._send(signal.SIGUSR1)
            self._send(signal.SIGCONT)
            select.select([self._plane], [], [], self._times.grace)
        self._send(signal.SIGKILL)  # and the kernel ends the watchdog with it
        return 1

    def _send(self, sign: signal.Signals) -> None:
        try:
            signal.pidfd_send_signal(self._plane, sign)
        except ProcessLookupError:
            return

    @staticmethod
    def _log(text: str) -> None:
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"
        try:
            os.write(2, f"{stamp} ERROR penstock.watchdog: {text}\n".encode())
        except OSError:
            return  # stderr is closed; the plane must be killed all the same


def main() -> int:
    parser = argparse.ArgumentParser(description="Kills a plane whose loop no longer turns. Started by the plane.")
    parser.add_argument("--plane", type=int, required=True)
    for name in ("stall", "end", "grace"):
        parser.add_argument(f"--{name}", type=float, required=True)
    args = parser.parse_args()
    # Ctrl-C reaches every process of the group. The plane decides when to end, and the watchdog ends with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if not die_with_parent(args.plane, signal.SIGKILL):
        return 0
    return _Watch(args.plane, args).run()


if __name__ == "__main__":
    sys.exit(main())
