"""Put a recorded run into a plane again, or repeat its decisions and compare the steps with its log.

  penstock rerun runs/demo                              show what the run still has
  penstock rerun runs/demo --verify                     read every frame; exit 1 if one is damaged
  penstock rerun runs/demo --diff                       open a plane with the recorded settings, put the same groups and
                                                         compare the digests of every step; exit 1 and name the first
                                                         step that differs
  penstock rerun runs/demo --plane tcp://HOST:7440      put the groups in order, at their original pace
  penstock rerun runs/demo --plane tcp://HOST:7440 --as-fast-as-possible

A run started with retain="all" has everything (docs/archive.md); any other has its last steps. Its plane may be
running: frames that are freed in the meantime are counted. Groups keep their ids and a plane accepts no group twice, so
an interrupted rerun can simply be started again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.client import Fed, feed
from penstock.client import open as open_plane
from penstock.commands.terminal import Progress, size
from penstock.commands.which_run import RUN_HELP, checked_where, plane_folder
from penstock.errors import InvalidInput
from penstock.log import GroupRow
from penstock.runs import RecordedRun, rerun
from penstock.server import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("where", metavar="RUN", type=checked_where, help=RUN_HELP)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--plane", metavar="URL", type=checked_where, help="put the groups into this plane")
    what.add_argument("--diff", action="store_true", help="repeat the run's decisions and compare its steps")
    what.add_argument("--verify", action="store_true", help="read every frame and compare its checksum")
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument("--speed", type=float, default=1.0, metavar="X", help="X times the original pace (default 1)")
    pace.add_argument("--as-fast-as-possible", action="store_true", help="wait for nothing but the plane")
    parser.add_argument("--keys", type=Path, metavar="DIR", help="key folder, for a plane that needs one")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="for --diff: a new folder for the plane")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    recorded = RecordedRun.open(plane_folder(args.where, args.keys))
    if args.plane is not None:
        return _feed(recorded, args)
    if args.diff:
        return _diff(recorded, args)
    if args.verify:
        recorded.verify()  # also counts the frames that are gone
    _print(summary(recorded), text(recorded, verified=args.verify), as_json=args.json)
    return 0


def summary(recorded: RecordedRun) -> dict[str, Any]:
    """Summarize what a run still has, as plain data."""
    times = [entry.at for entry in recorded.groups.values() if entry.at]
    return {
        "run": recorded.run,
        "run_id": recorded.run_id,
        "retain": "all" if recorded.retains_all else "steps",
        "steps": len(recorded.steps),
        "last_step": max(recorded.steps, default=0),
        "planned_steps": sum(bool(entry.digests) for entry in recorded.steps.values()),
        "groups": recorded.num_frames,
        "evaluation_groups": sum(recorded.groups[op].is_evaluation for op in recorded.groups if recorded.has_frame(op)),
        "accepted_groups": len(recorded.groups),
        "bytes": recorded.num_bytes,
        "freed": sum(not entry.location for entry in recorded.groups.values()),
        "gone": len(recorded.gone),
        "first_at": min(times, default=None),
        "last_at": max(times, default=None),
    }


def text(recorded: RecordedRun, *, verified: bool) -> str:
    found = summary(recorded)
    lines = [
        f"run {found['run']!r} ({found['run_id'][:12]}): {found['steps']:,} steps, {found['groups']:,} groups "
        f"({found['evaluation_groups']:,} for evaluation), {size(found['bytes'])}, retain {found['retain']!r}"
    ]
    if found["first_at"] is not None:
        first, last = (datetime.fromtimestamp(found[name], UTC) for name in ("first_at", "last_at"))
        lines.append(f"  accepted {first:%Y-%m-%d %H:%M:%S} to {last:%Y-%m-%d %H:%M:%S} UTC")
    if found["freed"]:
        plans = found["steps"] - found["planned_steps"]
        lines.append(f"  freed: frames of {found['freed']:,} groups, plans of {plans:,} steps")
    if found["gone"]:
        lines.append(f"  freed during the read: frames of {found['gone']:,} groups")
    if verified:
        lines.append(f"  {found['groups']:,} frames read, all intact")
    return "\n".join(lines)


def _feed(recorded: RecordedRun, args: argparse.Namespace) -> int:
    progress = Progress()

    def tell(_entry: GroupRow, fed: Fed) -> None:
        progress(f"{fed.groups + fed.known:,} of {recorded.num_frames:,} groups")

    with open_plane(args.plane, keys=args.keys) as plane:
        fed = feed(recorded, plane, speed=None if args.as_fast_as_possible else args.speed, each=tell)
    progress.end()
    late = f"; the last {fed.late_s:.1f} s late" if fed.late_s > 1 else ""
    gone = f", {fed.gone:,} freed in the meantime" if fed.gone else ""
    message = f"{fed.groups:,} groups put, {fed.known:,} were already there{gone}, {size(fed.num_bytes)}{late}"
    _print(asdict(fed), message, as_json=args.json)
    return 0


def _diff(recorded: RecordedRun, args: argparse.Namespace) -> int:
    if args.folder is not None and args.folder.exists() and any(args.folder.iterdir()):
        raise InvalidInput(f"--folder {args.folder}: not empty; give a new folder")
    with tempfile.TemporaryDirectory(prefix="penstock-replay-") as temporary:
        found = rerun(recorded, args.folder or Path(temporary))
    _print(asdict(found), found.sentence, as_json=args.json)
    return 0 if found.same else 1


def _print(data: dict[str, Any], text: str, *, as_json: bool) -> None:
    print(json.dumps(data, indent=1) if as_json else "\n".join(map(printable, text.split("\n"))))
