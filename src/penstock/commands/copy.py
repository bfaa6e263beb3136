"""Copy a run to another folder, once or continuously during training.

  penstock copy runs/demo backup/demo               once; the plane may be running
  penstock copy runs/demo backup/demo               again: copies only what is new
  penstock copy runs/demo backup/demo --follow      until Ctrl-C, whenever the run has changed
  penstock copy runs/demo moved/demo --same-run     the copy keeps the run's id; its plane must be stopped

TARGET is a new folder, or an earlier copy of the same run on which no plane was opened since. Every frame is compared
with its digest. `penstock.open(TARGET)` and every command accept a copy like any run. It has a new id unless --same-run
is given. Files beside the plane's folder, such as token exports and checkpoints, are not copied.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

from penstock.commands.terminal import size
from penstock.commands.which_run import checked_where, plane_folder
from penstock.log import as_corrupt
from penstock.runs import Copied, RunCopy

_REST = 9
"""Pause this many times as long as the last round took, so that copying uses at most a tenth of a core and disk."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("where", metavar="RUN", type=checked_where, help="the run: its folder, or its plane's folder")
    parser.add_argument("target", metavar="TARGET", type=Path, help="a new folder, or an earlier copy of this run")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--follow", action="store_true", help="keep the copy up to date until interrupted")
    what.add_argument("--same-run", action="store_true", help="keep the run's id; the run's plane must be stopped")
    parser.add_argument("--every", type=float, default=5.0, metavar="S", help="with --follow: seconds between checks")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each round")


def run(args: argparse.Namespace) -> int:
    folder = plane_folder(args.where)
    with as_corrupt(folder):
        copy = RunCopy(folder, args.target, same_run=args.same_run)
    with copy:
        found = _round(copy, as_json=args.json)
        if args.follow:
            _follow(copy, args)
    return 1 if found.damaged else 0


def _follow(copy: RunCopy, args: argparse.Namespace) -> None:
    rest = args.every
    try:
        while True:
            time.sleep(rest)
            rest = args.every
            with as_corrupt(copy.source):
                is_behind = copy.is_behind()
            if is_behind:
                began = time.monotonic()
                _round(copy, as_json=args.json)
                rest = max(args.every, _REST * (time.monotonic() - began))
    except KeyboardInterrupt:  # also in the middle of a round: the copy is as the last complete round left it
        return


def _round(copy: RunCopy, *, as_json: bool) -> Copied:
    with as_corrupt(copy.source):
        found = copy.round()
    text = (
        f"{copy.target}: run {found.run_id[:12]}, up to transaction {found.commits:,}: {found.groups:,} groups "
        f"({size(found.num_bytes)}) copied, {found.freed:,} freed"
    )
    lines = [text, *(f"  not copied: group {group!r}: {why}" for group, why in found.damaged.items())]
    print(json.dumps(asdict(found)) if as_json else "\n".join(lines), flush=True)
    return found
