"""Measure Penstock and its rivals on this machine, in one run, on the same inputs.

  penstock bench --check           every figure of the README, in under ten minutes
  penstock bench wire              sizes and speed of frames
  penstock bench replay --json     the same report for programs
  penstock bench pack --check      exit 1 if a figure misses its target

  penstock bench path --rivals rivals/bin/python     rivals installed in another environment (scripts/setup_rivals)

The report is a table: our figure, the rival's, and their ratio. With --json it is one object:
{"bench", "machine", "versions",
 "rows": [{"name", "ours", "rival", "rival_name", "ratio", "target", "ok", "skipped", ...}]}.
A row whose rival is not installed is skipped and says why: its "ratio" and "ok" are null.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

from penstock.commands.terminal import Progress
from penstock.errors import ConfigError

BENCHES = {
    "claims": ("every figure of the README, measured again; the default", ("cpprb", "torchrl", "torch")),
    "wire": ("size and speed of frames against lists and byte arrays", ()),
    "replay": ("tables against cpprb and TorchRL", ("cpprb", "torchrl", "torch")),
    "pack": ("plans against the packers of other trainers", ("torch",)),
    "trees": ("plans for samples with shared prefixes against simpler planners", ()),
    "assets": ("images by reference against shipping pixels", ("pillow",)),
    "deliver": ("a step to the ranks of one host, against raw ZeroMQ", ("pyzmq",)),
    "export": ("token export against a plain json loop, and against a training step", ("orjson", "pyarrow", "torch")),
    "path": ("producers to tensors on the ranks, against TransferQueue and Ray", ("pyzmq", "torch")),
    "small": ("what a group of 16 x 512 tokens costs, by process and by part", ("pyzmq",)),
    "log": ("commits and restarts of the decision log in SQLite and in PostgreSQL", ("psycopg",)),
    "storage": ("ranks and puts on an object store with 50 ms latency", ("obstore", "moto")),
    "start": ("import, open, connect and --help, each in a process of its own", ("pyzmq",)),
    "growth": ("held groups, ranks, lengths, steps, producers and exported steps, small and large", ("pyzmq",)),
    "tasks": ("leased prompts against TransferQueue, and what open leases cost", ("pyzmq",)),
    "ingest": ("durable puts against raw SQLite and a raw disk sync", ("pyzmq",)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = "; ".join(f"{name}: {what}" for name, (what, _) in BENCHES.items())
    parser.add_argument("name", choices=BENCHES, nargs="?", default="claims", metavar="NAME", help=names)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--check", action="store_true", help="exit 1 when a row with a target misses it")
    parser.add_argument("--full", action="store_true", help="all sizes; takes many minutes")
    parser.add_argument("--rivals", metavar="PYTHON", help="for path, tasks, claims: one with the rivals")
    parser.add_argument("--baseline", metavar="PYTHON", help="for path, claims: one with the previous version")


def run(args: argparse.Namespace) -> int:
    find_benchmarks("bench")
    report = importlib.import_module("benchmarks.report")
    module = importlib.import_module(f"benchmarks.{args.name}")
    progress = Progress()
    rows = module.run(full=args.full, progress=progress, **_interpreters(args))
    progress.end()
    packages = BENCHES[args.name][1]
    if args.json:
        print(json.dumps(report.as_json(args.name, rows, *packages), indent=1))
    else:
        print(report.as_table(args.name, rows))
    missed = [row.name for row in rows if row.ok is False]
    if args.check and missed:
        print(f"missed: {', '.join(missed)}", file=sys.stderr)
        return 1
    return 0


def find_benchmarks(what: str) -> None:
    """Make `benchmarks/` importable, ahead of any other package of that name. The wheel does not contain it."""
    root = Path(__file__).parents[3]
    if not (root / "benchmarks" / "report.py").is_file():
        raise ConfigError(
            f"{what}: the benchmarks are in the repository, not in the installed package; clone it, run `make bench`"
        )
    sys.path.insert(0, str(root))


def _interpreters(args: argparse.Namespace) -> dict[str, str]:
    """Return --rivals and --baseline, for the benchmarks that accept them."""
    given = {name: getattr(args, name) for name in ("rivals", "baseline") if getattr(args, name) is not None}
    for name in given:
        if args.name not in ("path", "claims") and (args.name, name) != ("tasks", "rivals"):
            raise ConfigError(f"bench {args.name}: takes no --{name}; leave it out")
    return given
