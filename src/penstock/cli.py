"""The command line. Each command is a module of `penstock.commands`, imported when it is called."""

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
    "demo": "a complete RL run on this machine",
    "train": "run a configuration file",
    "serve": "run a plane: workers put groups, ranks take steps",
    "rollouts": "generate rollouts with verifiers environments",
    "top": "watch a running plane: rates, buffer, staleness, waits",
    "runs": "list the runs in a database, bucket or folder; delete one",
    "tenants": "show a plane's tenants; change their shares",
    "view": "look at every token of a run in the browser",
    "tokens": "means and maxima over the trained tokens of each step",
    "diff": "find where two recorded runs first differ",
    "rerun": "put a run into a plane again, or verify its decisions",
    "copy": "copy a run to another folder, once or continuously",
    "quarantine": "groups that no step can use: list, release, drop",
    "storage": "compare a run's log and storage; recover; forget",
    "inspect": "show the contents of a frame or a run",
    "convert": "convert samples between file formats",
    "assets": "the images of a run: list, verify, sweep",
    "keys": "create keys that let other hosts connect to a plane",
    "doctor": "check this installation and this machine",
    "bench": "measure against rivals on this machine",
}


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Build the parser. With `only`, import just that command's module."""
    parser = argparse.ArgumentParser(
        prog="penstock",
        description="The data plane for RL post-training: from rollouts to rank-ready micro-batches.",
        epilog="For details and an example of a command: penstock COMMAND --help",
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
    """Run one command. A PenstockError or OSError becomes one line on stderr and exit code 1."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if removed := removed_message(arguments):
        print(removed, file=sys.stderr)
        return 2
    args = build_parser(arguments[0] if arguments and arguments[0] in COMMANDS else "").parse_args(arguments)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except (PenstockError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():  # `penstock tokens ... | head`: not an error
            # Python flushes stdout at exit and would report the broken pipe again.
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
    """Escape control characters, except newlines: errors quote names and ids that others chose.

    >>> _shown("a\\x1b[31m")
    'a\\\\x1b[31m'
    """
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


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
