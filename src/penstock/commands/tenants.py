"""The tenants of a plane: what each has of the trainer; give one a share, or take it away.

  penstock tenants tcp://127.0.0.1:7440                                    a table
  penstock tenants tcp://127.0.0.1:7440 --share alpha=2 --share beta=1     alpha is to have two thirds of the tokens
  penstock tenants tcp://127.0.0.1:7440 --evict beta --because "no rewards since step 40"

A tenant is what samples name in `run`: an experiment, an adapter. From the first share on, groups of tenants without
one are rejected. An evicted tenant loses what it has waiting, counted in the ledger as dropped; a share lets it in
again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from penstock.commands.tables import aligned, size
from penstock.errors import InvalidInput
from penstock.server import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("where", metavar="URL", help="a plane's address")
    parser.add_argument(
        "--share", action="append", default=[], metavar="RUN[=WEIGHT]", help="give a run a share; of weight 1"
    )
    parser.add_argument("--evict", metavar="RUN", help="take a run's share away; needs --because")
    parser.add_argument("--because", metavar="TEXT", help="why; producers of that run are told")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--keys", type=Path, metavar="DIR", help="key folder, for a plane that needs one")


def run(args: argparse.Namespace) -> int:
    from penstock.client import open as open_plane
    from penstock.protocol import Timeouts

    if "://" not in args.where:
        raise InvalidInput(
            f"{args.where}: not an address; shares belong to a plane at work, such as tcp://127.0.0.1:7440"
        )
    if bool(args.evict) != bool(args.because):
        raise InvalidInput("--evict RUN and --because TEXT belong together: the run's producers are told why")
    wanted = [_weight(text) for text in args.share]
    with open_plane(args.where, keys=args.keys, timeouts=Timeouts(plane_s=5.0)) as plane:
        for name, weight in wanted:
            plane.share(name, weight)
        if args.evict:
            plane.evict(args.evict, args.because)
        found = plane.status()["runs"]
    print(json.dumps(found, indent=1) if args.json else "\n".join(table(found)))
    return 0


def _weight(text: str) -> tuple[str, float]:
    name, equals, weight = text.rpartition("=")
    try:
        return name if equals else text, float(weight) if equals else 1.0
    except ValueError:
        raise InvalidInput(
            f"--share {text!r}: {weight!r} is no number; write RUN=WEIGHT, for example alpha=2"
        ) from None


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    """The runs, as lines of text."""
    if not found:
        return ["runs are not kept apart here; give the first one a share with --share RUN=WEIGHT"]
    total = sum(metadata["taken_tokens"] for metadata in found.values()) or 1
    rows = [["run", "", "share", "of all tokens", "groups waiting", "bytes"]]
    for name, metadata in found.items():
        note = "" if metadata["evicted"] is None else f"evicted: {metadata['evicted']}"
        rows.append(
            [
                printable(name),
                printable(note),
                f"{100 * metadata['share']:.1f} %",
                f"{100 * metadata['taken_tokens'] / total:.1f} %",
                f"{metadata['held_groups']:,}",
                size(metadata["held_bytes"]),
            ]
        )
    return aligned(rows, left=2)
