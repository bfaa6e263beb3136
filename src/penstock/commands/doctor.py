"""Check this installation and this machine, in plain words.

  penstock doctor                  checks, one line each; exit code 1 if something essential fails
  penstock doctor runs             also how fast the disk under that folder makes things durable
  penstock doctor runs/demo        also whether the run there can be read, and its ledger balances
  penstock doctor tcp://127.0.0.1:7440     also whether the plane there answers
  penstock doctor --json           the same for programs

Nothing is changed; files and sockets that are needed for a check are removed again.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from penstock.commands.doctor_checks import Finding, examine
from penstock.commands.doctor_run import examine_run
from penstock.commands.which_run import RUN_HELP

_MARKS = {"ok": "ok   ", "warning": "note ", "failure": "FAIL "}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "where", metavar="FOLDER|RUN", nargs="?", default="", help=f"where runs are kept, or {RUN_HELP}"
    )
    parser.add_argument("--keys", type=Path, metavar="DIR", help="key folder, for a plane that needs one")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    findings = [*examine(Path() if "://" in args.where else Path(args.where)), *examine_run(args.where, args.keys)]
    healthy = all(finding.verdict != "failure" for finding in findings)
    if args.json:
        print(json.dumps({"healthy": healthy, "findings": [asdict(finding) for finding in findings]}, indent=1))
    else:
        print(_text(findings, healthy=healthy))
    return 0 if healthy else 1


def _text(findings: list[Finding], *, healthy: bool) -> str:
    width = max(len(finding.name) for finding in findings)
    lines = [f"{_MARKS[f.verdict]} {f.name.ljust(width)}  {f.text}" for f in findings]
    end = "Everything essential works." if healthy else "Something essential does not work: see the lines marked FAIL."
    return "\n".join([*lines, "", end])
