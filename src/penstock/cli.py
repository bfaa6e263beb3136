"""The command line: one small module per command, imported only when it is called."""

from __future__ import annotations

import argparse
import importlib
import os
import select
import sys
from collections.abc import Sequence

from penstock.config import removed_message
from penstock.errors import PenstockError
from penstock.extras import missing
from penstock.version import __version__

COMMANDS = {
    "demo": "a complete RL run on this machine, in one command",
    "train": "run a configuration file",
    "serve": "run a plane: workers put groups in, ranks take steps out",
    "rollouts": "make rollouts with verifiers' environments, and put them into a plane",
    "top": "watch a plane at work: rates, buffer, staleness, who waits for whom",
    "runs": "the runs in a database, a bucket or a folder: list them, delete one",
    "tenants": "who shares a plane: what each has and had, give or take away a share",
    "view": "look at every token of a run in the browser",
    "tokens": "means and maxima over the trained tokens of finished steps",
    "diff": "where two recorded runs first differ: step, sample, token and column",
    "rerun": "put a run into a plane again, or decide it again and compare its steps",
    "copy": "copy a run to another folder, or keep the copy up to date beside training",
    "quarantine": "the groups that no step could be made with: list, release, drop",
    "storage": "compare a run's log with its storage; put back what the log has lost; let a run forget",
    "inspect": "show what a frame or a run's folder holds",
    "convert": "samples from one file format to another: frames, Parquet, what other trainers use",
    "assets": "look after the images of a run: list, verify, sweep",
    "keys": "make the keys that let other hosts connect to a plane",
    "doctor": "check this installation and this machine, in plain words",
    "bench": "measure against rivals on this machine",
}


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser; with `only`, just that command's module is imported."""
    parser = argparse.ArgumentParser(
        prog="penstock",
        description="The data plane for RL post-training: from rollouts to rank-ready micro-batches.",
        epilog="Each command explains itself and shows an example: penstock COMMAND --help",
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        if only in (None, name):
            module = importlib.import_module(f"penstock.commands.{name}")
            sub.description = module.__doc__
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors of ours become one line on stderr and exit code 1."""
    words = list(sys.argv[1:] if argv is None else argv)
    if removed := removed_message(words):
        print(removed, file=sys.stderr)
        return 2
    args = build_parser(words[0] if words and words[0] in COMMANDS else "").parse_args(words)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except (PenstockError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():  # `penstock tokens ... | head`: not an error
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        print(f"penstock {args.command}: {_shown(_sentence(error))}", file=sys.stderr)
        return 1
    except ImportError as error:
        found = missing(args.command, error)
        if found is error:
            raise
        print(f"penstock {found}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return code


def _shown(text: str) -> str:
    """The text without anything that a terminal would act on: errors quote names and ids from elsewhere.

    >>> _shown("a\\x1b[31m")
    'a\\\\x1b[31m'
    """
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _reader_is_gone() -> bool:
    """Whether it is our own output that nobody reads any more, and not some other pipe that broke."""
    try:
        output = sys.stdout.fileno()
    except (OSError, ValueError):
        return False
    poll = select.poll()
    poll.register(output, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _sentence(error: PenstockError | OSError) -> str:
    """The error in words: what the system says of a file or an address names it first, and has no number.

    >>> _sentence(FileNotFoundError(2, "No such file or directory", "runs/x"))
    'runs/x: No such file or directory'
    """
    if isinstance(error, PenstockError) or error.strerror is None:
        return str(error) or type(error).__name__
    named = f"{error.filename}: " if error.filename is not None else ""
    return f"{named}{error.strerror}"


if __name__ == "__main__":
    raise SystemExit(main())
