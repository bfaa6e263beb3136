"""The command line. Each command is a module of `penstock.commands`, imported when it is called."""

from __future__ import annotations

import argparse
import importlib
import os
import select
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.commands.terminal import FirstSign, MissingWords, Parser, suggestion
from penstock.errors import PenstockError
from penstock.extras import missing
from penstock.server import printable
from penstock.version import __version__

GROUPS = {
    "try": {
        "demo": "a complete RL run on this machine",
        "train": "run a configuration file",
        "pack": "pack sequences of given lengths; compare packers",
        "simulate": "what dropping, masking and pacing stale data would do",
        "bench": "measure against rivals on this machine",
    },
    "run": {
        "serve": "run a plane: workers put groups, ranks take steps",
        "rollouts": "generate rollouts with verifiers environments",
        "keys": "create keys that let other hosts connect to a plane",
        "tenants": "show a plane's tenants; change their shares",
        "runs": "list the runs in a database, bucket or folder; delete one",
        "copy": "copy a run to another folder, once or continuously",
    },
    "look": {
        "view": "look at every token of a run in the browser",
        "top": "watch a running plane: rates, buffer, staleness, waits",
        "tokens": "means and maxima over the trained tokens of each step",
        "inspect": "show the contents of a frame or a run",
        "diff": "find where two recorded runs first differ",
        "convert": "convert samples between file formats",
    },
    "check": {
        "doctor": "check this installation and this machine",
        "storage": "compare a run's log and storage; recover; forget",
        "quarantine": "groups that no step can use: list, release, drop",
        "rerun": "put a run into a plane again, or verify its decisions",
        "assets": "the images of a run: list, verify, sweep",
    },
}
"""Commands with their summaries, by what one wants to do."""
_LONGEST = 4000
"""Characters of an error that are printed. Messages quote values, and a file may hold one of any length."""
COMMANDS = {name: summary for commands in GROUPS.values() for name, summary in commands.items()}


def overview() -> str:
    """List the commands in their groups."""
    lines = [
        "usage: penstock COMMAND ...",
        "",
        "The data plane for RL post-training: from rollouts to packed micro-batches.",
    ]
    for group, commands in GROUPS.items():
        lines += ["", f"{group}:", *(f"  {name:<12}{summary}" for name, summary in commands.items())]
    return "\n".join([*lines, "", "For details and an example: penstock COMMAND --help", ""])


class _Overview(Parser):
    """The parser of `penstock` itself, whose help is the overview."""

    def format_help(self) -> str:
        return overview()


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Build the parser. With `only`, import just that command's module."""
    parser = _Overview(prog="penstock", usage="penstock COMMAND ...")
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, prog="penstock", parser_class=Parser
    )
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(name, help=summary)
        if only in (None, name):
            module = importlib.import_module(f"penstock.commands.{name}")
            sub.description = module.__doc__
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. A PenstockError or OSError becomes one line on stderr and exit code 1."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: `penstock ... >&-`. What replaces it is open to the end.
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        print(overview(), end="")
        return 2
    command = arguments[0]
    if command not in COMMANDS and not command.startswith("-"):
        likely = suggestion(command, COMMANDS)
        print(f"penstock: {_shown(command)}: no such command{likely}; see penstock --help", file=sys.stderr)
        return 2
    with FirstSign(command):
        try:
            return _run(build_parser(command if command in COMMANDS else "").parse_args(arguments))
        except KeyboardInterrupt:  # also while the command's modules are imported
            return 130


def _run(args: argparse.Namespace) -> int:
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except (PenstockError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():  # `penstock tokens ... | head`: not an error
            # Python flushes stdout at exit and would report the broken pipe again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        message, name = _shown(_sentence(error)), f"penstock {args.command}"
        print(message if message.startswith(name) else f"{name}: {message}", file=sys.stderr)
        return 2 if isinstance(error, MissingWords) else 1
    except ImportError as error:
        found = missing(args.command, error)
        if found is error:
            raise
        print(f"penstock {found}", file=sys.stderr)
        return 1
    return code


def _shown(text: str) -> str:
    """Escape control characters, except newlines: errors quote names and ids that others chose. Cut long text."""
    if len(text) > _LONGEST:
        text = (
            f"{text[: _LONGEST // 2]} ... ({len(text) - _LONGEST:,} characters left out) ... {text[-_LONGEST // 2 :]}"
        )
    return "\n".join(map(printable, text.split("\n")))


def _reader_is_gone() -> bool:
    """Check that the broken pipe is our standard output, and not some other pipe."""
    try:
        output = sys.stdout.fileno()
    except (OSError, ValueError):
        return False
    poll = select.poll()
    poll.register(output, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _sentence(error: PenstockError | OSError) -> str:
    """Return the error as one sentence. An OSError names its file first and has no errno.

    >>> _sentence(FileNotFoundError(2, "No such file or directory", "runs/x"))
    'runs/x: No such file or directory'
    """
    if isinstance(error, PenstockError) or error.strerror is None:
        return str(error) or type(error).__name__
    named = f"{error.filename}: " if error.filename is not None else ""
    return f"{named}{error.strerror}"


if __name__ == "__main__":
    raise SystemExit(main())
