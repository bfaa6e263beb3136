"""Show the tenants of a plane and their part of the trainer; give a tenant a share, or evict it.

  penstock tenants tcp://127.0.0.1:7440                                    a table
  penstock tenants tcp://127.0.0.1:7440 --share alpha=2 --share beta=1     alpha gets two thirds of the tokens
  penstock tenants tcp://127.0.0.1:7440 --evict beta --because "no rewards since step 40"

A tenant is an experiment or adapter, named in the `run` column of samples. Once one tenant has a share, groups of
tenants without one are rejected. Eviction drops a tenant's waiting groups, counted in the ledger. A new share readmits
it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from penstock.commands.terminal import aligned, size
from penstock.commands.which_run import asking, checked_where
from penstock.errors import InvalidInput
from penstock.server import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("where", metavar="URL", type=checked_where, help="a plane's address")
    parser.add_argument(
        "--share",
        action="append",
        default=[],
        metavar="TENANT[=WEIGHT]",
        help="give a tenant a share; default weight 1",
    )
    parser.add_argument("--evict", metavar="TENANT", help="take a tenant's share away; needs --because")
    parser.add_argument("--because", metavar="TEXT", help="the reason, reported to the tenant's producers")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--keys", type=Path, metavar="DIR", help="key folder, for a plane that needs one")


def run(args: argparse.Namespace) -> int:
    if "://" not in args.where:
        raise InvalidInput(
            f"{args.where}: not an address; give a running plane's address, such as tcp://127.0.0.1:7440"
        )
    if bool(args.evict) != bool(args.because):
        raise InvalidInput("--evict TENANT and --because TEXT: give both; producers receive the reason")
    wanted = [_weight(text) for text in args.share]
    with asking(args.where, args.keys) as plane:
        for name, weight in wanted:
            plane.share(name, weight)
        if args.evict:
            plane.evict(args.evict, args.because)
        found = plane.status()["tenants"]
    print(json.dumps(found, indent=1) if args.json else "\n".join(table(found)))
    return 0


def _weight(text: str) -> tuple[str, float]:
    name, equals, weight = text.rpartition("=")
    try:
        return name if equals else text, float(weight) if equals else 1.0
    except ValueError:
        raise InvalidInput(
            f"--share {text!r}: {weight!r} is not a number; write TENANT=WEIGHT, for example alpha=2"
        ) from None


def table(found: dict[str, dict[str, Any]], what: str = "tenant") -> list[str]:
    """Format tenants or environments as a table."""
    if not found:
        return ["this plane has no tenants; give the first one a share with --share TENANT=WEIGHT"]
    total = sum(metadata["taken_tokens"] for metadata in found.values()) or 1
    rows = [[what, "", "share", "of all tokens", "groups waiting", "bytes"]]
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
