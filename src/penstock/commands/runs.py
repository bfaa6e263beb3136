"""List and delete the runs in a database, a bucket or a folder.

  penstock runs list postgresql://me@db/runs            every run with its log there, and where its frames are
  penstock runs list s3://bucket/experiments            every run with its frames there
  penstock runs list runs                               the same for a folder
  penstock runs delete postgresql://me@db/runs#demo     delete its log and its frames, after asking

A run that a plane has open is not deleted. Frames are deleted only if the storage's marker names the same run. A run
with an SQLite log is a folder: stop its plane and remove the folder. Storage whose log is gone may still be used by
`penstock storage recover`, so no command here deletes it.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from penstock.commands.terminal import aligned, size
from penstock.commands.which_run import checked_where
from penstock.errors import InvalidInput
from penstock.extras import require
from penstock.log import is_postgres, split_run
from penstock.server import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("list", "delete"))
    parser.add_argument(
        "where",
        metavar="WHERE",
        type=checked_where,
        help="postgresql://USER@HOST/DB[#RUN], s3://BUCKET/PREFIX, a folder",
    )
    parser.add_argument("--yes", action="store_true", help="delete without asking")
    parser.add_argument("--keep-frames", action="store_true", help="delete the log only")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    return _list(args) if args.action == "list" else _delete(args)


def _list(args: argparse.Namespace) -> int:
    if is_postgres(args.where):
        require("postgresql://", "psycopg")
        from penstock.log import runs_in

        found = [asdict(one) for one in runs_in(args.where)]
        head = ["run", "plane", "storage", "epoch", "groups", "log"]
        rows = [
            [
                *(one["name"], f"open: {one['holder']}" if one["is_open"] else "stopped", one["storage"] or "-"),
                *(f"{one['epoch']}", f"{one['groups']:,}", size(one["num_bytes"])),
            ]
            for one in found
        ]
    else:
        from penstock.storage import runs_below

        found = [
            {"name": one.marker.run, "run_id": one.marker.run_id, "epoch": one.marker.epoch, "storage": one.address}
            | {"segments": one.segments, "num_bytes": one.num_bytes}
            for one in runs_below(args.where)
        ]
        head = ["run", "id", "storage", "epoch", "segments", "bytes"]
        rows = [
            [
                *(one["name"], one["run_id"][:12], one["storage"]),
                *(f"{one['epoch']}", f"{one['segments']:,}", size(one["num_bytes"])),
            ]
            for one in found
        ]
    if args.json:
        print(json.dumps({"runs": found}, indent=1))
    elif not rows:
        print("no runs")
    else:
        print("\n".join(aligned([head, *([printable(cell) for cell in row] for row in rows)], left=3)))
    return 0


def _delete(args: argparse.Namespace) -> int:
    """Delete the frames, then the log: after an interruption the log still says where the rest is."""
    if not is_postgres(args.where):
        raise InvalidInput(f"{args.where}: give postgresql://USER@HOST/DB#RUN; a run with an SQLite log is a folder")
    require("postgresql://", "psycopg")
    from penstock.log import DatabaseRun, drop_run, runs_in
    from penstock.storage import erase

    _, name = split_run(args.where)
    if "#" not in args.where:
        raise InvalidInput(f"{args.where}: which run? write {args.where}#RUN; `penstock runs list` shows all")
    found = next((one for one in runs_in(args.where) if one.name == name), None)
    if found is None:
        raise InvalidInput(f"run {name!r}: not in that database; `penstock runs list` shows all")
    if found.is_open:
        raise InvalidInput(f"run {name!r}: {found.holder} has it open; stop that plane first")
    frames = bool(found.storage) and not args.keep_frames
    _ask(args, f"delete the log of {name!r} ({found.groups:,} groups)" + f" and all in {found.storage}" * frames)
    num_segments = 0

    def delete_frames(locked: DatabaseRun) -> None:
        nonlocal num_segments
        num_segments = erase(locked.storage, locked.run_id) if frames else 0

    drop_run(args.where, delete_frames)
    kept = "" if frames else f"; its frames are still in {found.storage or 'the folder of its plane'}"
    message = printable(f"{name}: deleted, {num_segments} segments of frames{kept}")
    print(json.dumps({"run": name, "segments": num_segments}) if args.json else message)
    return 0


def _ask(args: argparse.Namespace, what: str) -> None:
    if args.yes:
        return
    if not sys.stdin.isatty():
        raise InvalidInput(f"to {printable(what)}, pass --yes")
    if input(f"{printable(what)}? [y/N] ").strip().lower() != "y":
        raise InvalidInput("nothing was deleted")
