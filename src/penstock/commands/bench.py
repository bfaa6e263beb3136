"""Measure Penstock against rivals on this machine, in one run, on the same inputs.

  penstock bench wire              sizes and speed of frames
  penstock bench replay --json     the same report for programs
  penstock bench pack --check      exit 1 when a figure with a target misses it

  penstock bench path --rivals rivals/bin/python     rivals that are installed elsewhere (scripts/setup_rivals)

The report is a table of ours, the rival's and the ratio between them. With --json it is one object:
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

from penstock.errors import ConfigError

BENCHES = {
    "wire": ("bytes and speed of frames against lists and byte arrays", ()),
    "replay": ("tables against cpprb and TorchRL", ("cpprb", "torchrl", "torch")),
    "pack": ("plans against the packers of other trainers", ("torch",)),
    "trees": ("plans of samples that share tokens against other ways to keep them together", ()),
    "assets": ("images by reference against shipping pixels", ("pillow",)),
    "deliver": ("a step to the ranks of one host, against raw ZeroMQ", ("pyzmq",)),
    "export": ("token export against a plain json loop, and against a training step", ("orjson", "pyarrow", "torch")),
    "path": ("producers to tensors on the ranks, against TransferQueue and Ray", ("pyzmq", "torch")),
    "log": ("commits and restarts of the decision log in SQLite and in PostgreSQL", ("psycopg",)),
    "storage": ("ranks and puts on an object store that is 50 ms away", ("obstore", "moto")),
    "ingest": ("durable puts against raw SQLite and a raw disk sync", ("pyzmq",)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = "; ".join(f"{name}: {what}" for name, (what, _) in BENCHES.items())
    parser.add_argument("name", choices=BENCHES, help=names)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--check", action="store_true", help="exit 1 when a row with a target misses it")
    parser.add_argument("--full", action="store_true", help="all sizes; may take many minutes")
    parser.add_argument("--rivals", metavar="PYTHON", help="an interpreter that has the rivals of path")
    parser.add_argument("--baseline", metavar="PYTHON", help="one that has the previous version, for path")


def run(args: argparse.Namespace) -> int:
    _find_benchmarks()
    report = importlib.import_module("benchmarks.report")
    module = importlib.import_module(f"benchmarks.{args.name}")
    rows = module.run(full=args.full, progress=_progress, **_interpreters(args))
    _progress("")
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


def _find_benchmarks() -> None:
    """Make `benchmarks/` importable, before any other package of that name. The wheel has none."""
    root = Path(__file__).parents[3]
    if not (root / "benchmarks" / "report.py").is_file():
        raise ConfigError(
            "bench: the benchmarks are in the repository, not in the installed package; clone it, run `make bench`"
        )
    sys.path.insert(0, str(root))


def _interpreters(args: argparse.Namespace) -> dict[str, str]:
    """Those that were named, for a benchmark that can use them."""
    given = {name: getattr(args, name) for name in ("rivals", "baseline") if getattr(args, name) is not None}
    for name in given:
        if args.name != "path":
            raise ConfigError(f"bench {args.name}: takes no --{name}; leave it out")
    return given


def _progress(what: str) -> None:
    """One line on a terminal that says what is being measured; nothing elsewhere."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{what}")
        sys.stderr.flush()
