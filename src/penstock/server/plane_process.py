"""Starts a plane as a separate process that ends with the program that started it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Any, Self

from penstock.errors import PlaneLost


class PlaneProcess:
    """A running `penstock serve`, started with the given command-line arguments.

    The kernel ends it when the thread that created it ends, however that happens. So create it from a thread that
    stays.

    >>> with PlaneProcess(["memory:", "--ranks=1", "--seq-len=16", "--groups-per-step=1",
    ...                    "--listen=tcp://127.0.0.1:*"]) as plane:
    ...     plane.url.startswith("tcp://127.0.0.1:")
    True
    """

    def __init__(
        self, arguments: Sequence[str], *, stderr: IO[Any] | int | None = None, timeout_s: float = 60.0
    ) -> None:
        own = ["--json", f"--parent={os.getpid()}"]
        command = [sys.executable, "-m", "penstock.cli", "serve", *arguments, *own]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr)  # noqa: S603
        self.ready: dict[str, Any] = {}
        """The report that the process printed (`--json`)."""
        try:
            self.ready = json.loads(self._first_line(time.monotonic() + timeout_s))
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def urls(self) -> list[str]:
        return list(self.ready["urls"])

    @property
    def url(self) -> str:
        """The first address it listens at."""
        return self.urls[0]

    def stop(self, timeout_s: float = 12.0) -> int:
        """Send SIGTERM, wait, and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        finally:
            self._close()

    def kill(self) -> None:
        """Send SIGKILL and wait."""
        self.process.kill()
        self.process.wait()
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _close(self) -> None:
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _first_line(self, deadline: float) -> bytes:
        assert self.process.stdout is not None
        # `readline` could block past the deadline, so wait with `select` and read what is there.
        line = b""
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                raise PlaneLost("penstock serve: did not report its address in time; see its log")
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            if not data:
                code = self.process.wait()
                raise PlaneLost(f"penstock serve: ended with code {code} before it listened; see its log")
            line += data
        return line
