"""Feed a run into a plane again, or decide it again and compare its steps with what its log says.

  penstock rerun runs/demo                              what the run still has
  penstock rerun runs/demo --verify                     read every frame; exit 1 if one is damaged
  penstock rerun runs/demo --diff                       make a plane with the recorded settings, put the same groups,
                                                         compare the digests of every step; exit 1 if one differs,
                                                         and say which
  penstock rerun runs/demo --plane tcp://HOST:7440      put the groups in their order, with their times between
  penstock rerun runs/demo --plane tcp://HOST:7440 --as-fast-as-possible

A run that is started with retain="all" has all of it (docs/archive.md); any other has its last steps. Its plane may be
at work: frames that are freed meanwhile are counted. Groups keep their ids, so a replay that was interrupted is started
again: a plane takes no group twice.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.client import Fed, feed
from penstock.client import open as open_plane
from penstock.commands.tables import size
from penstock.commands.which_run import RUN_HELP, plane_folder
from penstock.errors import InvalidInput
from penstock.log import GroupRow
from penstock.runs import RecordedRun, rerun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("where", metavar="RUN", help=RUN_HELP)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--plane", metavar="URL", help="put the groups into this plane")
    what.add_argument("--diff", action="store_true", help="decide the run again, and compare the digests of its steps")
    what.add_argument("--verify", action="store_true", help="read every frame and compare its checksum")
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument("--speed", type=float, default=1.0, metavar="X", help="times as fast as it was (default 1)")
    pace.add_argument("--as-fast-as-possible", action="store_true", help="wait for nothing but the plane")
    parser.add_argument("--keys", type=Path, metavar="DIR", help="key folder, for a plane that needs one")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="for --diff: keep the plane there, in a new folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    recorded = RecordedRun.open(plane_folder(args.where, args.keys))
    if args.plane is not None:
        return _feed(recorded, args)
    if args.diff:
        return _diff(recorded, args)
    if args.verify:
        recorded.verify()  # counts what is gone, too
    _print(summary(recorded), words(recorded, verified=args.verify), as_json=args.json)
    return 0


def summary(recorded: RecordedRun) -> dict[str, Any]:
    """What a run still has, as plain data."""
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


def words(recorded: RecordedRun, *, verified: bool) -> str:
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
        lines.append(f"  freed while they were read: frames of {found['gone']:,} groups")
    if verified:
        lines.append(f"  {found['groups']:,} frames read: all as written")
    return "\n".join(lines)


def _feed(recorded: RecordedRun, args: argparse.Namespace) -> int:
    def progress(_entry: GroupRow, fed: Fed) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{fed.groups + fed.known:,} of {recorded.num_frames:,} groups")

    with open_plane(args.plane, keys=args.keys) as plane:
        fed = feed(recorded, plane, speed=None if args.as_fast_as_possible else args.speed, each=progress)
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    late = f"; the last {fed.late_s:.1f} s late" if fed.late_s > 1 else ""
    gone = f", {fed.gone:,} were freed meanwhile" if fed.gone else ""
    text = f"{fed.groups:,} groups put, {fed.known:,} were there already{gone}, {size(fed.num_bytes)}{late}"
    _print(asdict(fed), text, as_json=args.json)
    return 0


def _diff(recorded: RecordedRun, args: argparse.Namespace) -> int:
    if args.folder is not None and args.folder.exists() and any(args.folder.iterdir()):
        raise InvalidInput(f"--folder {args.folder}: not empty; give a new folder")
    with tempfile.TemporaryDirectory(prefix="penstock-replay-") as temporary:
        found = rerun(recorded, args.folder or Path(temporary))
    _print(asdict(found), found.sentence, as_json=args.json)
    return 0 if found.same else 1


def _print(data: dict[str, Any], text: str, *, as_json: bool) -> None:
    print(json.dumps(data, indent=1) if as_json else text)
