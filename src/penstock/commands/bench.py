"""Measure Penstock against rivals on this machine, in one run, on the same inputs.

  penstock bench wire              sizes and speed of frames
  penstock bench replay --json     the same report for programs
  penstock bench pack --check      exit 1 when a figure with a target misses it

The report is a table of ours, the rival's and the ratio between them. With --json it is one object:
{"bench", "machine", "versions", "rows": [{"name", "ours", "rival", "rival_name", "ratio", "target", "ok", ...}]}.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys

from penstock.bench.report import as_json, as_table

BENCHES = {
    "wire": ("bytes and speed of frames against lists and byte arrays", ()),
    "replay": ("tables against cpprb and TorchRL", ("cpprb", "torchrl", "torch")),
    "pack": ("plans against the packers of other trainers", ("torch",)),
    "assets": ("images by reference against shipping pixels", ("pillow",)),
    "deliver": ("a step to the ranks of one host, against raw ZeroMQ and shared memory", ("pyzmq", "ray")),
    "export": ("token export against a plain json loop, and against a training step", ("orjson", "pyarrow", "torch")),
    "ingest": ("durable puts against raw SQLite and a raw disk sync", ("pyzmq",)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = "; ".join(f"{name}: {what}" for name, (what, _) in BENCHES.items())
    parser.add_argument("name", choices=BENCHES, help=names)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--check", action="store_true", help="exit 1 when a row with a target misses it")
    parser.add_argument("--full", action="store_true", help="the whole grid; may take many minutes")


def run(args: argparse.Namespace) -> int:
    module = importlib.import_module(f"penstock.bench.{args.name}")
    rows = module.run(full=args.full, progress=_progress)
    _progress("")
    packages = BENCHES[args.name][1]
    print(json.dumps(as_json(args.name, rows, *packages), indent=1) if args.json else as_table(args.name, rows))
    missed = [row.name for row in rows if row.ok is False]
    if args.check and missed:
        print(f"missed: {', '.join(missed)}", file=sys.stderr)
        return 1
    return 0


def _progress(what: str) -> None:
    """One line on a terminal that says what is being measured; nothing elsewhere."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{what}")
        sys.stderr.flush()
