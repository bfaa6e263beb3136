"""How large a cluster one plane can serve: simulated, from constants measured on one machine.

  penstock simulate cluster --workers 10000 --ranks 1024 --columns text
  penstock simulate cluster --workers 1000 --ranks 256 --columns r3 --nodes 125 --link-gbit 100 --plot sizing.svg
  penstock simulate calibrate --out here.json          measure this machine, half a minute; then --constants here.json

The engine and the planner are the real ones, fed with facts; keepers, disks and links are discrete events.
docs/sizing.md says what was measured and what is extrapolated. The same seed gives the same answer.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from penstock.bench.sizing.answers import as_dict, as_svg, as_text, simulate
from penstock.bench.sizing.calibrate import SIZE, calibrate
from penstock.bench.sizing.constants import KINDS, SHIPPED, read_constants, write_constants
from penstock.bench.sizing.model import Cluster
from penstock.errors import InvalidInput

_WORKERS_PER_NODE = 8
_SAMPLES_PER_RANK = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["cluster", "calibrate"], help="simulate a cluster, or measure this machine")
    parser.add_argument("--workers", type=int, default=1000, help="that generate (default 1000)")
    parser.add_argument("--ranks", type=int, default=256, help="data ranks of the trainer (default 256)")
    parser.add_argument(
        "--nodes", type=int, help=f"with a keeper each (default: a node for {_WORKERS_PER_NODE} workers)"
    )
    parser.add_argument("--tokens", type=int, default=4096, help="of a sample, on average (default 4096)")
    parser.add_argument("--columns", choices=KINDS, default="text", help="what a token carries (default text)")
    parser.add_argument("--copies", type=int, help="keepers of each group (default 2 from two nodes on)")
    parser.add_argument(
        "--groups-per-step", type=int, help=f"of {SIZE} samples (default {_SAMPLES_PER_RANK} samples a rank)"
    )
    parser.add_argument(
        "--generate", type=float, default=2000.0, metavar="T", help="tokens/s of a worker (default 2000)"
    )
    parser.add_argument(
        "--train-s", type=float, metavar="S", help="of a step (default 0.8 of the time to generate one)"
    )
    parser.add_argument("--link-gbit", type=float, default=25.0, metavar="G", help="of each node's link (default 25)")
    parser.add_argument("--delay-us", type=float, default=100.0, metavar="US", help="from node to node (default 100)")
    parser.add_argument("--steps", type=int, default=5, help="to measure, after two others (default 5)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--constants", type=Path, default=SHIPPED, metavar="FILE", help="from `calibrate`, not the shipped ones"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write how busy everything is, as an SVG picture")
    parser.add_argument("--out", type=Path, metavar="FILE", help="calibrate: write the constants there")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    return _calibrate(args) if args.what == "calibrate" else _cluster(args)


def _calibrate(args: argparse.Namespace) -> int:
    if args.out is None:
        raise InvalidInput("--out: missing; say which file the constants go to")
    found = calibrate(lambda what: print(f"measuring {what}", file=sys.stderr))
    write_constants(found, args.out)
    print(f"{args.out}: written; now: penstock simulate cluster --constants {args.out}")
    return 0


def _cluster(args: argparse.Namespace) -> int:
    nodes = args.nodes or max(-(-args.workers // _WORKERS_PER_NODE), 1)
    cluster = Cluster(
        workers=args.workers,
        ranks=args.ranks,
        nodes=nodes,
        tokens=args.tokens,
        columns=args.columns,
        copies=min(2, nodes) if args.copies is None else args.copies,
        groups_per_step=args.groups_per_step or max(args.ranks * _SAMPLES_PER_RANK // SIZE, 1),
        generate_tokens_s=args.generate,
        train_s=args.train_s,
        link_bytes_s=args.link_gbit * 1e9 / 8,
        delay_s=args.delay_us * 1e-6,
        steps=args.steps,
        seed=args.seed,
    )
    constants = read_constants(args.constants)
    sized = simulate(cluster, constants)
    if args.plot is not None:
        args.plot.write_text(as_svg(cluster, sized), encoding="utf-8")
    print(json.dumps(as_dict(cluster, constants, sized), indent=1) if args.json else as_text(cluster, constants, sized))
    return 0
