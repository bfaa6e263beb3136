"""Simulate generation and training in virtual time, to choose how a run deals with stale data.

  penstock simulate staleness                            five policies on a seeded workload with a heavy tail
  penstock simulate staleness --from runs/demo           the lengths and rewards of a recorded run
  penstock simulate staleness --policy drop --policy window --staleness 4
  penstock simulate staleness --lengths lognormal --median 2000 --sigma 1.0 --plot staleness.svg --json

drop removes groups that are more than --staleness versions old, mask their old tokens. pace holds prompts back
that could not be trained in time, window also trains in order of dispatch, replay draws at random and twice. Prompts,
table, limiter and planner are those of a plane; only time is simulated.

"length bias" compares the mean length of what was trained with what was generated: -30 % means that the trainer sees
answers a third shorter than the model gives.

Not simulated: weights of environments (env_weights), shares of tenants, deadlines and filters of late rewards, workers
that die.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from penstock.commands.terminal import aligned
from penstock.commands.which_run import RUN_HELP, checked_where, plane_folder
from penstock.errors import InvalidInput
from penstock.runs import POLICIES, Rates, Workload, lognormal_workload, recorded_workload, simulate_staleness

COLUMNS = {
    "tokens/s": ("trained_tokens_s", "{:,.0f}"),
    "trainer idle": ("idle", "{:.1%}"),
    "staleness": ("staleness_mean", "{:.2f}"),
    "at most": ("staleness_max", "{:.0f}"),
    "discarded": ("discarded", "{:.1%}"),
    "length generated": ("gen_length", "{:,.0f}"),
    "trained": ("train_length", "{:,.0f}"),
    "length bias": ("length_bias", "{:+.1%}"),
    "reward bias": ("reward_bias", "{:+.3f}"),
}
"""Heading -> (figure, format)."""
_MADE_UP: dict[str, Any] = {"lengths": "lognormal", "median": 600.0, "sigma": 0.8, "samples": 8, "seed": 0}
"""Flags of a workload that is made up -> their defaults."""
_PANELS = {"share discarded": "discarded", "length bias": "length_bias", "trainer idle": "idle"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["staleness"], help="what to simulate")
    parser.add_argument(
        "--from", dest="run_from", metavar="RUN", type=checked_where, help=f"lengths and rewards of {RUN_HELP}"
    )
    parser.add_argument("--lengths", choices=["lognormal"], help="lengths to make up without --from")
    parser.add_argument("--median", type=float, metavar="TOKENS", help="of these lengths; default 600")
    parser.add_argument("--sigma", type=float, help="of their logarithm; default 0.8")
    parser.add_argument("--samples", type=int, metavar="N", help="samples of a group; default 8")
    parser.add_argument("--seed", type=int, help="of these lengths, and of the rewards; default 0")
    parser.add_argument("--policy", action="append", choices=POLICIES, help="may be repeated; default all")
    parser.add_argument("--staleness", type=int, default=2, metavar="VERSIONS", help="that a policy allows; default 2")
    parser.add_argument("--window", type=float, default=0.3, help="of the policy window; default 0.3")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="steps to train; default 100")
    parser.add_argument("--groups", type=int, default=16, metavar="N", help="groups of a step; default 16")
    parser.add_argument("--workers", type=int, default=48, metavar="N", help="groups generated at once; default 48")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="ranks of the trainer; default 4")
    parser.add_argument(
        "--train-ratio", type=float, default=1.2, metavar="X", help="speed of training over generation; default 1.2"
    )
    parser.add_argument(
        "--judge-seconds", type=float, default=0.0, metavar="S", help="mean wait for late rewards; default 0: none"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures to an .svg or .png file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    _check(args)
    workload = _workload(args)
    rates = Rates(
        groups_per_step=args.groups,
        workers=args.workers,
        ranks=args.ranks,
        train_ratio=args.train_ratio,
        judge_s=args.judge_seconds,
    )
    found = {
        policy: simulate_staleness(
            policy, workload, rates=rates, staleness=args.staleness, window=args.window, steps=args.steps
        )
        for policy in args.policy or POLICIES
    }
    if args.plot is not None:
        draw(found, args.plot)
    print(json.dumps(found) if args.json else "\n".join(table(found)))
    return 0


def _check(args: argparse.Namespace) -> None:
    for name, default in _MADE_UP.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
        elif args.run_from is not None:
            raise InvalidInput(f"--{name} makes up a workload, and --from reads one; leave one of them out")
    bounds = {
        "steps": (1, 100_000), "groups": (1, 65_536), "workers": (1, 65_536), "ranks": (1, 4_096),
        "staleness": (0, 10_000), "samples": (1, 4_096), "train_ratio": (1e-3, 1e3), "window": (0, 1),
        "seed": (0, 2**63), "judge_seconds": (0, 1e6),
    }  # fmt: skip
    for name, (least, most) in bounds.items():
        if not least <= getattr(args, name) <= most:
            flag = f"--{name.replace('_', '-')}"
            raise InvalidInput(f"{flag} {getattr(args, name)}: give {least:g} to {most:g}")


def _workload(args: argparse.Namespace) -> Workload:
    if args.run_from is not None:
        found = recorded_workload(plane_folder(args.run_from))
        if found.freed:
            print(
                f"{len(found):,} groups of {args.run_from}; {found.freed:,} others are freed, and those that are left "
                "may be longer or shorter than they were: record a run with retain='all'",
                file=sys.stderr,
            )
        return found
    # Each policy meets the same prompts in the same order, and none comes twice.
    prompts = 2 * args.steps * args.groups + args.workers
    return lognormal_workload(prompts, args.samples, median=args.median, sigma=args.sigma, seed=args.seed)


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    """Format the figures, a policy per line."""
    rows = [["policy", *COLUMNS]]
    rows += [[name, *(form.format(one[key]) for key, form in COLUMNS.values())] for name, one in found.items()]
    return aligned(rows, left=1)


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw what a policy discards, how it biases lengths and how long the trainer waits."""
    from penstock.view import picture

    with picture(path, height=2.6) as figure:
        for axis, (title, key) in zip(figure.subplots(1, len(_PANELS), sharey=True), _PANELS.items(), strict=True):
            values = [100 * float(one[key]) for one in found.values()]
            bars = axis.barh(list(found), values, color="#3b6ea5")
            axis.bar_label(bars, [f"{value:.1f} %" for value in values], padding=3, fontsize=8)
            axis.set_title(title, loc="left", fontsize=10)
            axis.margins(x=0.35)
            axis.set_xticks([])
            axis.tick_params(left=False)
            axis.axvline(0, color="black", linewidth=0.8)
            for side in ("top", "right", "bottom", "left"):
                axis.spines[side].set_visible(False)
        figure.axes[0].invert_yaxis()
