"""What every command shares: its parser, and the text it prints on a terminal.

Help fits the terminal, and misspelt words and flags get a suggestion. Tables have aligned columns, sizes are readable,
and a command that is silent for long shows that it is working.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from penstock.errors import InvalidInput
from penstock.server import redraws

_CHOICE = re.compile(r"invalid choice: '?([^'( ]+)'? \(choose from (.*)\)")
_NOTE = re.compile(r"(\s*\S.*?)\s{2,}(\S.*)")
_FLAG = re.compile(r"-[a-zA-Z-][^\s]*$")
_FAR = 20
"""A line of help that begins with more spaces than this continues the note above it."""


class MissingWords(InvalidInput):
    """The command line lacks something that the command needs. The exit code is 2, as for one that cannot be read."""


class Parser(argparse.ArgumentParser):
    """An argument parser that says what was probably meant."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **{"formatter_class": argparse.RawDescriptionHelpFormatter, **named})
        self.register("type", Path, _path)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Reject unknown flags here: left to argparse, the command above rejects them, with its own usage line, or
        reports a missing argument instead."""
        words = list(args or ())
        if not self._subparsers:
            self._reject_unknown(words[: words.index("--")] if "--" in words else words)
        found, rest = super().parse_known_args(words, namespace)
        self._reject_unknown(rest)
        return found, rest

    def _reject_unknown(self, words: Sequence[str]) -> None:
        flags = self._option_string_actions
        for flag in (word.partition("=")[0] for word in words if _FLAG.match(word)):
            if not any(known.startswith(flag) for known in flags):
                self.error(f"{flag}: unknown flag{suggestion(flag, flags)}")

    def format_help(self) -> str:
        return fitted(super().format_help(), shutil.get_terminal_size().columns)

    def error(self, message: str) -> NoReturn:
        """Print one line, not the usage: that of `serve` has thirty lines, above the one that matters."""
        if found := _CHOICE.search(message):
            known = re.findall(r"[\w.-]+", found[2])
            message = f"{found[1]!r}: not one of {', '.join(known)}{suggestion(found[1], known)}"
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _path(text: str) -> Path:
    if not text:  # Path("") is the current folder
        raise argparse.ArgumentTypeError("'': empty; was a shell variable unset? Give . for the current folder")
    return Path(text)


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" for a word that resembles a known one, else "".

    >>> suggestion("--seqlen", ["--seq-len", "--ranks"]), suggestion("zebra", ["demo"])
    ("; did you mean '--seq-len'?", '')
    """
    import difflib  # only for mistakes

    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def fitted(text: str, width: int) -> str:
    """Return text in which no line is wider than `width`, if its words allow it.

    Paragraphs are filled again. A line "  command    what it does" that is too wide becomes two lines.

    >>> print(fitted("  penstock view runs/demo      look at every token of a run", 40))
      penstock view runs/demo
          look at every token of a run
    """
    return "\n\n".join(_paragraph(part.split("\n"), width) for part in text.split("\n\n"))


def _paragraph(lines: list[str], width: int) -> str:
    if all(len(line) <= width for line in lines):
        return "\n".join(lines)
    if lines[0].startswith("usage:"):  # argparse wraps it, except where a list of choices has no space
        return "\n".join(lines)
    if not any(line.startswith(("  ", "penstock ")) for line in lines):
        return textwrap.fill(" ".join(lines), width, break_on_hyphens=False, break_long_words=False)
    return "\n".join(_examples(lines, width))


def _examples(lines: Sequence[str], width: int) -> list[str]:
    """Fit lines of commands with notes. A note that continues on the next line is joined first."""
    joined: list[str] = []
    for line in lines:
        if joined and len(line) - len(line.lstrip()) > _FAR:
            joined[-1] += ("  " if _NOTE.fullmatch(joined[-1]) is None else " ") + line.strip()
        else:
            joined.append(line)
    return [part for line in joined for part in _example(line, width)]


def _example(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()))
    wrap = partial(textwrap.wrap, width=width, break_on_hyphens=False, break_long_words=False)
    further = indent + " " * 4
    found = _NOTE.fullmatch(line)
    command, note = (line, "") if found is None else found.groups()
    shown = wrap(command.strip(), initial_indent=indent, subsequent_indent=further)
    return shown + wrap(note, initial_indent=further, subsequent_indent=further)


# ------------------------------------------------------------------ text


class Progress:
    """Shows one line on a terminal, at most every `every_s` seconds. In a log, prints one every `log_every_s`."""

    def __init__(self, every_s: float = 0.0, *, log_every_s: float = math.inf) -> None:
        self._terminal, self._shown = redraws(sys.stderr), False
        self._every_s = every_s if self._terminal else log_every_s
        self._next = 0.0 if self._terminal else time.monotonic() + log_every_s

    def __call__(self, text: str) -> None:
        if time.monotonic() >= self._next:
            self._next, self._shown = time.monotonic() + self._every_s, True
            self._write(f"\r\x1b[K{text}" if self._terminal else f"{text}\n")

    def end(self) -> None:
        """Clear the line."""
        if self._terminal and self._shown:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


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
        if redraws(sys.stderr):
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
