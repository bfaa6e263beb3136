"""Text that commands print for people: aligned columns, readable sizes, progress, a sign of being at work."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any


class Progress:
    """Shows one line on a terminal, at most every `every_s` seconds. Shows nothing elsewhere."""

    def __init__(self, every_s: float = 0.0) -> None:
        self._every_s, self._next = every_s, 0.0

    def __call__(self, text: str) -> None:
        if sys.stderr.isatty() and time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every_s
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()

    def end(self) -> None:
        """Clear the line."""
        self._next = 0.0
        self("")


def aligned(rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """Format a table whose first `left` columns are text, aligned left, and whose others are numbers."""
    widths = [max(len(cell) for cell in cells) for cells in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def size(number: float) -> str:
    """Format a number of bytes.

    >>> size(512), size(3 << 20), size(4.5 * 2**30)
    ('512 B', '3.0 MiB', '4.5 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def reasons_line(counts: dict[str, Any]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.items() if count) or "none"


def masked_line(counts: dict[str, int]) -> str:
    """Return one line about tokens that were left out of the loss because they were too old.

    >>> masked_line(dict(stale_tokens=1200, stale_samples=3))
    'masked     1,200 tokens of 3 samples: older than max_token_staleness'
    """
    tokens, samples = counts["stale_tokens"], counts["stale_samples"]
    return f"masked     {tokens:,} tokens of {samples:,} samples: older than max_token_staleness"


# ------------------------------------------------------------------ the first sign

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
