"""Run the console blocks of a page as a user would type them, and compare what is printed with what the page shows.

    .venv/bin/python scripts/run_transcript.py docs/first-half-hour.md

All commands of a page run in one shell, in an empty folder, with this interpreter's environment first in PATH.
`...` in the page stands for anything, within a line or as lines of its own. A block under a comment
`<!-- file: NAME -->` is written to that file; one under `<!-- not run: WHY -->` is left out. Output that differs ends
the run with the page's line, what was expected and what came.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"```(\w+)")
_COMMENT = re.compile(r"<!--\s*(file|not run):\s*(.*?)\s*-->")
_END = "__the command ended with code"
_DEADLINE_S = 600.0
"""For one command, beside eight busy processes too. A loop that waits for what never comes would take all of CI's
time."""
_JOB_ENDED = re.compile(r"bash: (line \d+: +)?\d+ (Killed|Terminated)")
"""What bash says of a process that was killed, whenever it notices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    line: int
    words: str
    shown: str
    """What the page says that it prints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    name: str
    text: str


class Differs(AssertionError):
    """A command does not print what its page shows."""


def steps(page: str) -> Iterator[Command | File]:
    """The files and commands of a page, in order.

    >>> list(steps("```console\\n$ echo hi\\nhi\\n```\\n"))
    [Command(line=2, words='echo hi', shown='hi\\n')]
    """
    lines = page.splitlines()
    at, above = 0, ""
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        if fence is None:
            above = lines[at] or above
            at += 1
            continue
        end = lines.index("```", at + 1)
        comment = _COMMENT.search(above)
        kind, word = comment.groups() if comment else ("", "")
        if kind == "file":
            yield File(name=word, text="\n".join(lines[at + 1 : end]) + "\n")
        elif fence[1] == "console" and kind != "not run":
            yield from _commands(lines[at + 1 : end], at + 2)
        at, above = end + 1, ""


def _commands(lines: list[str], first: int) -> Iterator[Command]:
    starts = [i for i, line in enumerate(lines) if line.startswith("$ ")]
    for start, stop in zip(starts, [*starts[1:], len(lines)], strict=True):
        shown = "".join(f"{line}\n" for line in lines[start + 1 : stop])
        yield Command(line=first + start, words=lines[start].removeprefix("$ "), shown=shown)


def agrees(shown: str, printed: str) -> bool:
    """Whether output is what the page shows.

    >>> agrees("a ... c\\n...\\nend\\n", "a b c\\nmore\\nand more\\nend\\n"), agrees("a\\n", "b\\n")
    (True, False)
    """
    pattern = re.escape(shown.strip()).replace(re.escape("\n...\n"), r"\n(?:.*\n)*?").replace(re.escape("..."), ".*?")
    pattern = re.sub(r"\\\n\.\*\?$", r"(?:\n[\\s\\S]*)?", pattern)  # "..." as the last line: any lines, or none
    return re.fullmatch(pattern, printed.strip()) is not None


class Shell:
    """One bash, in a folder of its own. By default this interpreter's environment is first in PATH."""

    def __init__(self, folder: Path, given: dict[str, str] | None = None, *, deadline_s: float = _DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._late = False
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        env = {**(given or {**os.environ, "PATH": path}), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        self._process = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=folder,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, words: str) -> str:
        """What a command prints, and its exit code if that is not 0."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{words}\necho; echo {_END} $?__\n")
        self._process.stdin.flush()
        printed: list[str] = []
        alarm = threading.Timer(self._deadline_s, self._kill)
        alarm.start()
        try:
            for line in self._process.stdout:
                if line.startswith(_END):
                    return "".join(printed).removesuffix("\n")
                if not _JOB_ENDED.match(line):
                    printed.append(line)
        finally:
            alarm.cancel()
        ended = f"it did not end within {self._deadline_s:g} s" if self._late else "the shell ended"
        raise Differs(f"$ {words}\n{ended}; before that it printed:\n{''.join(printed)}")

    def _kill(self) -> None:
        self._late = True
        os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the shell and everything it started."""
        if not self._late:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def run_page(page: Path, folder: Path) -> int:
    """How many commands ran; raises Differs."""
    return run_steps(page.name, steps(page.read_text(encoding="utf-8")), folder)


def run_steps(page: str, every: Iterable[Command | File], folder: Path, given: dict[str, str] | None = None) -> int:
    shell, count = Shell(folder, given), 0
    try:
        for step in every:
            if isinstance(step, File):
                (folder / step.name).write_text(step.text)
                continue
            printed = shell.run(step.words)
            if not agrees(step.shown, printed):
                raise Differs(f"{page}:{step.line}: $ {step.words}\nexpected\n{step.shown}\nprinted\n{printed}")
            count += 1
    finally:
        shell.close()
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    page = parser.parse_args().page
    with tempfile.TemporaryDirectory() as folder:
        try:
            print(f"{page}: {run_page(page, Path(folder))} commands")
        except Differs as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
