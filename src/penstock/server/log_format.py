"""Log lines: one event, one line, whatever the message holds.

Text from elsewhere (ids, errors of peers) may contain newlines or terminal codes; they are shown escaped, so that
nobody can forge a line or repaint an operator's screen.
"""

from __future__ import annotations

import logging
import time
import traceback


def printable(text: str) -> str:
    """The text with everything that a terminal or a line reader would act on escaped.

    >>> printable("one\\ntwo \\x1b[31mred")
    'one\\\\ntwo \\\\x1b[31mred'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class LineFormatter(logging.Formatter):
    """`time level logger: message`, in UTC; an exception's frames follow on the same line, innermost first."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = f"{seconds}.{int(record.msecs):03d}Z {record.levelname} {record.name}: {record.getMessage()}"
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            frames = reversed(traceback.extract_tb(error.__traceback__))
            trace = " < ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames)
            line += f" | {type(error).__name__}: {error} | {trace}"
        return printable(line)


def log_lines() -> None:
    """Write what Penstock logs to stderr, in a process that is somebody else's: an actor's goes to Ray's logs."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter())
    root = logging.getLogger("penstock")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False
