"""Pack sequences of given lengths, and show how long ranks would wait for one another.

  penstock pack lengths.txt --ranks 64 --cap 32768      one length per line, or several
  penstock pack lengths.txt --ranks 64 --cap 32768 --against verl,slime,prime-rl
                                                        the same lengths, packed as others do; from a clone
  penstock pack lengths.txt --ranks 8 --cap 8192 --plot step.svg
                                                        draw the steps: ranks, micro-batches, waiting
  penstock pack - --ranks 8 --cap 8192 --json           lengths from standard input; for programs

Every rank has the same number of micro-batches and meets the others at each one. "waiting" is the share of all
ranks' time that passes before the slowest has finished, by the default cost model. The other trainers' packers are
written from their descriptions (benchmarks/packers.py). In your own program: penstock.packing.assign.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.commands.bench import find_benchmarks
from penstock.commands.terminal import aligned, suggestion
from penstock.errors import InvalidInput
from penstock.packing import Cost, assign

_BAR = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("lengths", metavar="LENGTHS", help="a text file with whole numbers; - is standard input")
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="data-parallel ranks")
    parser.add_argument("--cap", type=int, required=True, metavar="TOKENS", help="tokens per micro-batch at most")
    parser.add_argument("--against", default="", metavar="NAMES", help="packers of other trainers, with commas between")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the steps to an .svg or .png file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    if args.ranks < 1 or args.cap < 1:
        raise InvalidInput(f"--ranks {args.ranks} --cap {args.cap}: both must be 1 or more")
    lengths = read_lengths(args.lengths)
    rivals = _rivals(args.against)
    costs = Cost().of_samples(lengths)
    reports, grids = {}, {}
    for name in ("penstock", *rivals):
        began = time.perf_counter()
        if name == "penstock":
            found = assign(lengths, ranks=args.ranks, cap=args.cap)
            grid = [list(row) for row in zip(*found, strict=True)]
        else:
            grid = rivals[name](lengths, costs, args.ranks, args.cap)
        seconds = time.perf_counter() - began
        grids[name] = np.array([[float(costs[b].sum()) for b in row] for row in grid])
        reports[name] = measured(grids[name], len(lengths), int(lengths.sum()), args.ranks * args.cap, seconds)
    if args.plot is not None:
        _plot(grids, args.plot)
    head = f"{len(lengths):,} sequences, {int(lengths.sum()):,} tokens, {args.ranks} ranks, cap {args.cap:,}"
    print(json.dumps(reports) if args.json else "\n".join([head, "", *_table(reports)]))
    return 0


def read_lengths(name: str) -> NDArray[np.int64]:
    """Read whole numbers, separated by spaces or lines."""
    text = sys.stdin.read() if name == "-" else Path(name).read_text()
    bad = next((word for word in text.split() if not word.isdecimal()), None)
    if bad is not None or not text.split():
        raise InvalidInput(f"{name}: {'no lengths' if bad is None else repr(bad)}; give whole numbers, one per line")
    return np.array(text.split(), np.int64)


def measured(costs: NDArray[np.float64], count: int, tokens: int, room: int, seconds: float) -> dict[str, Any]:
    """Summarize a packing from the [micro-batches, ranks] cost of each micro-batch."""
    step = float(costs.max(axis=1).sum())
    return {
        "sequences": count,
        "micro_batches": len(costs),
        "filled": tokens / (len(costs) * room),
        "waiting": 1 - float(costs.sum()) / (step * costs.shape[1]),
        "step_cost": step,
        "seconds": seconds,
    }


def _rivals(names: str) -> dict[str, Any]:
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        return {}
    find_benchmarks("pack --against")
    known = importlib.import_module("benchmarks.packers").BY_TRAINER
    for name in wanted:
        if name not in known:
            raise InvalidInput(f"--against {name}: not one of {', '.join(known)}{suggestion(name, known)}")
    return {name: known[name] for name in wanted}


def _table(reports: dict[str, dict[str, Any]]) -> list[str]:
    least = min(report["step_cost"] for report in reports.values())
    rows = [["packer", "micro-batches", "filled", "waiting", "step", "planned in"]]
    rows += [
        [
            *(name, f"{found['micro_batches']:,}", f"{found['filled']:.1%}", f"{found['waiting']:.1%}"),
            *(f"{found['step_cost'] / least:.3f}", f"{1000 * found['seconds']:.0f} ms"),
        ]
        for name, found in reports.items()
    ]
    bars = ["", *(_bar(found["waiting"]) for found in reports.values())]
    return [f"{line}  {bar}".rstrip() for line, bar in zip(aligned(rows, left=1), bars, strict=True)]


def _bar(waiting: float) -> str:
    """Draw the busy and the waiting share of the ranks' time.

    >>> _bar(0.1)
    '###########################...'
    """
    idle = round(_BAR * waiting)
    return "#" * (_BAR - idle) + "." * idle


def _plot(grids: dict[str, NDArray[np.float64]], picture: Path) -> None:
    from penstock.view import Timing, draw

    draw(
        {name: Timing(taken=costs, useful=costs, shared=np.zeros_like(costs)) for name, costs in grids.items()}, picture
    )
