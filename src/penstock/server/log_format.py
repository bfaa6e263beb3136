"""The format of log lines: one event, one line, whatever the message contains.

Text from peers (ids, errors) may contain newlines or terminal codes. They are escaped, so that a peer cannot forge a
line or control an operator's terminal.
"""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Callable
from typing import IO


def printable(text: str) -> str:
    """Escape everything that a terminal or a line reader would act on.

    >>> printable("one\\ntwo \\x1b[31mred")
    'one\\\\ntwo \\\\x1b[31mred'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def redraws(stream: IO[str]) -> bool:
    """Return whether a stream is a terminal that can move its cursor. TERM=dumb says that it cannot."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


class LineFormatter(logging.Formatter):
    """Formats `time level logger: message`, in UTC. An exception's frames follow on the same line, innermost first."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = f"{seconds}.{int(record.msecs):03d}Z {record.levelname} {record.name}: {record.getMessage()}"
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            frames = reversed(traceback.extract_tb(error.__traceback__))
            trace = " < ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames)
            line += f" | {type(error).__name__}: {error} | {trace}"
        return printable(line)


def log_lines(stream: IO[str] | None = None) -> Callable[[], None]:
    """Write Penstock's log lines to a stream, stderr by default. Returns a function that ends this.

    A host process, such as a Ray actor, gets each line once: loggers above Penstock's do not see them.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter())
    root = logging.getLogger("penstock")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False

    def end() -> None:
        root.removeHandler(handler)
        root.propagate = True

    return end
