"""The parser of every command: help that fits the terminal, and suggestions for misspelt words and flags."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

from penstock.errors import InvalidInput

_CHOICE = re.compile(r"invalid choice: '?([^'( ]+)'? \(choose from (.*)\)")
_NOTE = re.compile(r"(\s*\S.*?)\s{2,}(\S.*)")
_FAR = 20
"""A line of help that begins with more spaces than this continues the note above it."""


class MissingWords(InvalidInput):
    """The command line lacks something that the command needs. The exit code is 2, as for one that cannot be read."""


class Parser(argparse.ArgumentParser):
    """An argument parser that says what was probably meant."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **{"formatter_class": argparse.RawDescriptionHelpFormatter, **named})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Reject unknown flags here: left to argparse, the command above rejects them, with its own usage line."""
        found, rest = super().parse_known_args(args, namespace)
        if unknown := [word for word in rest if word.startswith("-") and word != "-"]:
            flag = unknown[0].partition("=")[0]
            self.error(f"{flag}: unknown flag{suggestion(flag, re.findall(r'--[a-z][a-z-]+', super().format_help()))}")
        return found, rest

    def format_help(self) -> str:
        return fitted(super().format_help(), shutil.get_terminal_size().columns)

    def error(self, message: str) -> NoReturn:
        """Print one line, not the usage: that of `serve` has thirty lines, above the one that matters."""
        if found := _CHOICE.search(message):
            known = re.findall(r"[\w.-]+", found[2])
            message = f"{found[1]!r}: not one of {', '.join(known)}{suggestion(found[1], known)}"
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


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
