"""Groups in quarantine, which no step could use: list them, release one for training, or drop it.

  penstock quarantine runs/mine                                 list them, with the reasons
  penstock quarantine runs/mine --release prompt-17#3f          back to training, from the next start of the plane
  penstock quarantine tcp://127.0.0.1:7440 --drop prompt-17#3f  a running plane drops it now

--release and --drop need a stopped plane when you give the run's folder, and a running one when you give its address.
A released group that still does not fit the others is quarantined again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from penstock.commands.terminal import aligned
from penstock.commands.which_run import RUN_HELP, asking, checked_where, is_address, plane_folder
from penstock.server import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("where", metavar="RUN", type=checked_where, help=RUN_HELP)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--release", metavar="ID", help="return this group to training")
    choice.add_argument("--drop", metavar="ID", help="drop this group; the ledger counts it as dropped")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--keys", type=Path, metavar="DIR", help="key folder, for a plane that needs one")


def run(args: argparse.Namespace) -> int:
    found = _at_work(args) if is_address(args.where) else _in_folder(args)
    if args.json:
        print(json.dumps({"quarantine": found}, indent=1))
    else:
        print("\n".join(table(found)) if found else "Nothing is in quarantine.")
    return 0


def _at_work(args: argparse.Namespace) -> list[dict[str, Any]]:
    with asking(args.where, args.keys) as plane:
        if args.release or args.drop:
            plane.settle(args.release or args.drop, drop=bool(args.drop))
        found: list[dict[str, Any]] = plane.status()["quarantine"]
    return found


def _in_folder(args: argparse.Namespace) -> list[dict[str, Any]]:
    from penstock.runs import quarantine_of, settle_offline

    folder = plane_folder(args.where)
    if args.release or args.drop:
        settle_offline(folder, args.release or args.drop, drop=bool(args.drop))
    return quarantine_of(folder)


def table(found: list[dict[str, Any]]) -> list[str]:
    rows = [["group", "tenant or env", "samples", "why"]]
    rows += [[printable(g["id"]), printable(g["run"]), str(g["samples"]), printable(g["reason"])] for g in found]
    return aligned(rows, left=4)
