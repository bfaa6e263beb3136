"""What a run keeps in its storage.

  penstock storage forget runs/demo           end retain="all": keep from now on what retain_steps says
  penstock storage forget runs/demo --yes     the same without asking, for programs

`forget` needs a run whose plane is stopped. It says how much would be freed, and asks. The next plane that is started
on the folder frees the frames.
"""

from __future__ import annotations

import argparse
import sys

from penstock.commands.tables import size
from penstock.commands.which_run import plane_folder
from penstock.errors import InvalidInput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    forget = actions.add_parser("forget", help="let a run that keeps everything forget what it has trained")
    forget.add_argument("where", metavar="RUN", help="the run: its folder, or its plane's folder")
    forget.add_argument("--yes", action="store_true", help="do not ask")


def run(args: argparse.Namespace) -> int:
    return {"forget": _forget}[args.action](args)


def _forget(args: argparse.Namespace) -> int:
    from penstock.serve.decisions.forgetting import forget, forgettable

    folder = plane_folder(args.where)
    found = forgettable(folder)
    what = f"{found.groups:,} groups ({size(found.num_bytes)}) and the plans of steps before {found.before_step:,}"
    print(f"{folder}: run {found.run_id[:12]} would free {what}; they cannot be brought back")
    if not args.yes and not _agreed():
        print("Nothing was changed.")
        return 1
    forget(folder)
    print("The run keeps steps only from now on. The next plane on this folder frees the rest.")
    return 0


def _agreed() -> bool:
    if not sys.stdin.isatty():
        raise InvalidInput("storage forget: asks before it changes anything, and there is no terminal to ask; give --yes")
    return input("Forget them? [y/N] ").strip().lower() in ("y", "yes")
