"""Shows on a terminal that a command is at work, until it prints something itself."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any

QUIET_S = 1.5
"""A command may be silent for this long. Python itself takes the rest of two seconds to start."""
_CLEAR = "\r\033[K"


class FirstSign:
    """Counts seconds on stderr while neither stdout nor stderr was written to. Does nothing without a terminal."""

    def __init__(self, command: str) -> None:
        self._command, self._lock = command, threading.Lock()
        self._written = threading.Event()
        self._shown = False
        self._streams: tuple[Any, Any] = (sys.stdout, sys.stderr)

    def __enter__(self) -> None:
        if sys.stderr.isatty():
            sys.stdout, sys.stderr = (_Watched(stream, self) for stream in self._streams)
            threading.Thread(target=self._count, name="penstock-first-sign", daemon=True).start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        sys.stdout, sys.stderr = self._streams

    def end(self) -> None:
        """Clear the line, because the command is about to print."""
        if self._written.is_set():
            return
        with self._lock:
            self._written.set()
            if self._shown:
                self._show(_CLEAR)

    def _count(self) -> None:
        began = time.monotonic()
        while not self._written.wait(1.0 if self._shown else QUIET_S):
            with self._lock:
                if not self._written.is_set():
                    self._shown = True
                    seconds = time.monotonic() - began
                    self._show(f"{_CLEAR}penstock {self._command}: working, {seconds:.0f} s; Ctrl-C stops it")

    def _show(self, text: str) -> None:
        self._streams[1].write(text)
        self._streams[1].flush()


class _Watched:
    """A stream that reports its first write."""

    def __init__(self, stream: Any, sign: FirstSign) -> None:
        self._stream, self._sign = stream, sign

    def write(self, text: str) -> Any:
        self._sign.end()
        return self._stream.write(text)

    @property
    def buffer(self) -> Any:
        self._sign.end()  # a caller that asks for the binary stream is about to write
        return self._stream.buffer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
