"""The `penstock` command line. Each command is a module, imported only when it is called."""

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
    "rollouts": "make rollouts with verifiers' environments and put them into a plane",
    "top": "watch a running plane: rates, buffer, staleness, what waits for what",
    "runs": "list the runs in a database, a bucket or a folder, or delete one",
    "tenants": "list the tenants of a plane and their use; set or remove a share",
    "view": "look at every token of a run in the browser",
    "tokens": "means and maxima over the trained tokens of finished steps",
    "diff": "find where two recorded runs first differ: step, sample, token and column",
    "rerun": "put a recorded run into a plane again, or repeat its decisions and compare the steps",
    "copy": "copy a run to another folder, once or continuously during training",
    "quarantine": "list, release or drop the groups that no step could be made with",
    "storage": "compare a run's log with its storage, restore what the log lost, free what a run kept",
    "inspect": "show the contents of a frame or a run's folder",
    "convert": "convert samples between file formats: frames, Parquet, those of other trainers",
    "assets": "manage the images of a run: list, verify, sweep",
    "keys": "make the keys that let other hosts connect to a plane",
    "doctor": "check this installation and this machine",
    "bench": "measure against rivals on this machine",
}


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Build the parser. With `only`, imports just that command's module."""
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
    """Run one command. Penstock's errors become one line on stderr and exit code 1."""
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
    """Escape everything that a terminal would act on: errors quote names and ids from peers.

    >>> _shown("a\\x1b[31m")
    'a\\\\x1b[31m'
    """
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _reader_is_gone() -> bool:
    """Return whether the reader of our own output is gone, as opposed to some other broken pipe."""
    try:
        output = sys.stdout.fileno()
    except (OSError, ValueError):
        return False
    poll = select.poll()
    poll.register(output, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _sentence(error: PenstockError | OSError) -> str:
    """Return the error as text. A system error begins with its file or address and has no number.

    >>> _sentence(FileNotFoundError(2, "No such file or directory", "runs/x"))
    'runs/x: No such file or directory'
    """
    if isinstance(error, PenstockError) or error.strerror is None:
        return str(error) or type(error).__name__
    named = f"{error.filename}: " if error.filename is not None else ""
    return f"{named}{error.strerror}"


if __name__ == "__main__":
    raise SystemExit(main())
