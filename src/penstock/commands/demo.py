"""Run complete RL training on this machine: a tiny policy learns through all of Penstock.

  penstock demo                       reverse three letters, about a minute on two cores
  penstock demo --chaos               the same, while a random process is killed every few seconds
  penstock demo --fast                a few steps only, to see that everything works on this machine
  penstock demo --replay              prioritized replay with reuse instead of a queue
  penstock demo --vision              a tiny vision-language model names colours in drawn images
  penstock demo --trees               longer prompts, each computed once for all its rollouts
  penstock demo --ray                 on a local Ray cluster of three nodes, while one of them is lost
  penstock demo --judge               rewards come late, from a judge in another process
  penstock demo --dynamic-sampling    drop groups whose rewards are all the same, generate more until a step is full
  penstock demo --top-p 0.9           sample with top-p; the trainer normalizes over the same tokens
  penstock demo --write-config my.toml    write every setting to a file, then: penstock train my.toml

A plane, two rollout workers and two trainer ranks run as separate processes. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from contextlib import redirect_stdout
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from penstock.commands.terminal import fitted
from penstock.demo.launch import Chaos, Launcher
from penstock.demo.screen import killed, screen, watched
from penstock.demo.tasks import model_of
from penstock.errors import ConfigError, MissingExtra
from penstock.extras import EXTRAS, install
from penstock.packing import Packing
from penstock.plane import Target
from penstock.replay import MinPriority, Prioritized, Replay
from penstock.train import PACKED_IMAGES, LossConfig, TaskConfig, TrainConfig, template
from penstock.view import Metrics

LEARNED = 0.8
_FAST_STEPS = 5
_PREAMBLE = 32
"""Shorter prompts are not worth sharing: see `penstock.frames.prefixes.MIN_SHARED`."""
_WIDTH = 80
_CHAOS_NEXT = "  penstock demo --chaos             the same while processes are killed"
_CONFIG_NEXT = "  penstock demo --write-config my.toml && penstock train my.toml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, help="folder of the run (default: runs/demo-TIME)")
    parser.add_argument("--steps", type=_steps, metavar="N", help="train N steps instead of until it has learned")
    parser.add_argument("--fast", action="store_true", help=f"{_FAST_STEPS} small steps, one worker: a smoke test")
    parser.add_argument("--seed", type=int, default=0, help="seed for weights, prompts and sampling")
    parser.add_argument("--chaos", action="store_true", help="kill a random process every few seconds")
    parser.add_argument("--replay", action="store_true", help="prioritized replay with reuse instead of a queue")
    parser.add_argument("--vision", action="store_true", help="a vision-language model and images by reference")
    parser.add_argument("--trees", action="store_true", help="compute a prompt once for all its rollouts")
    parser.add_argument("--judge", action="store_true", help="rewards come late, from a judge in another process")
    parser.add_argument("--ray", action="store_true", help="on its own Ray cluster, while one of the nodes is lost")
    parser.add_argument(
        "--dynamic-sampling", action="store_true", help="drop groups of one reward, generate more until a step is full"
    )
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="sample from the likeliest tokens that together reach P"
    )
    parser.add_argument("--write-config", type=Path, metavar="FILE", help="write the configuration and exit")
    parser.add_argument("--json", action="store_true", help="print one JSON line at the end, and nothing else")


def _steps(text: str) -> int:
    """Parse a number of steps for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}; must be 1 or more; leave it out to train until it has learned")
    return int(text)


def config_of(args: argparse.Namespace) -> TrainConfig:
    """Return the demo's configuration: a run's defaults plus what a tiny policy needs to learn."""
    task = TaskConfig(
        name="color" if args.vision else "reverse",
        top_p=args.top_p,
        preamble=_PREAMBLE if args.trees else 0,
        workers=1 if args.fast else TaskConfig().workers,
        dynamic_sampling=args.dynamic_sampling,
    )
    packing = Packing(ranks=2, seq_len=64, micro_batch_max_tokens=1024, long_rows=True, packed_images=PACKED_IMAGES)
    groups = 8 if args.fast else 16 if args.vision else 32
    steps = args.steps or (_FAST_STEPS if args.fast else None)
    folder = args.folder or Path("runs") / time.strftime("demo-%H%M%S")
    return TrainConfig(
        run=folder.name if folder.name.replace("-", "").replace("_", "").isalnum() else "demo",
        folder=str(folder),
        max_steps=steps or (600 if args.replay or args.trees else 400),
        target_reward=None if steps else 0.85,
        seed=args.seed,
        checkpoint_every=5 if args.chaos or args.ray else 10,
        export_every=min(10, steps or 10),  # a short run exports its last step, for the viewer
        model=model_of(task.name),
        loss=LossConfig(entropy_bonus=0.02 if args.vision else 0.01),
        packing=replace(packing, trees=args.trees),
        target=Target(groups=groups),
        replay=_reuse(groups, args.seed)
        if args.replay
        else Replay(capacity=2 * groups, max_staleness=8, seed=args.seed),
        task=task,
        needs=("rewards",) if args.judge else (),
        needs_deadline_s=60.0 if args.judge else None,
    )


def _reuse(groups: int, seed: int) -> Replay:
    """Train each group twice, those with the largest advantages first."""
    return Replay(
        capacity=4 * groups,
        sampler=Prioritized(0.6),
        remover=MinPriority(),
        max_times_sampled=2,
        max_staleness=12,
        seed=seed,
    )


def run(args: argparse.Namespace) -> int:
    if args.judge and (args.vision or args.ray):
        raise ConfigError("--judge: its judge scores the text task on this machine; leave out --vision and --ray")
    config = config_of(args)
    if args.write_config is not None:
        if args.write_config.exists():
            raise ConfigError(f"{args.write_config}: exists; choose another name")
        args.write_config.write_text(template(replace(config, folder="", run="my-run")))
        print(f"wrote {args.write_config}; now: penstock train {args.write_config}")
        return 0
    goal = None if config.target_reward is None else LEARNED
    if args.ray:
        return _run_in_ray(config, goal, args)
    chaos = Chaos(seed=args.seed) if args.chaos else None
    following = (_CONFIG_NEXT,) if args.chaos else (_CHAOS_NEXT, _CONFIG_NEXT)
    return run_config(config, goal=goal, chaos=chaos, following=following, as_json=args.json)


def _run_in_ray(config: TrainConfig, goal: float | None, args: argparse.Namespace) -> int:
    if args.chaos:
        raise ConfigError("--ray and --chaos: --ray already kills a node; use one of them")
    print("penstock demo: starting; loading Ray and the model takes a few seconds", file=sys.stderr, flush=True)
    from penstock.demo.launch import NodeLoss, started

    out, aside = sys.stdout, sys.stderr if args.json else sys.stdout
    with (
        redirect_stdout(aside),
        started(config) as (run, cluster),
    ):  # Ray prints warnings about the lost node to stdout, and they must not end up in the JSON
        launcher = NodeLoss(run, cluster)
        return run_config(run, goal=goal, launcher=launcher, following=(_CONFIG_NEXT,), as_json=args.json, out=out)


def run_config(
    config: TrainConfig,
    *,
    name: str = "demo",
    goal: float | None,
    chaos: Chaos | None = None,
    following: tuple[str, ...] = (),
    announce: str = "",
    as_json: bool = False,
    launcher: Launcher | None = None,
    out: TextIO | None = None,
) -> int:
    """Run a configuration to its end and print the result. Returns the exit code.

    `goal` is the reward it should reach, if any. `name` is the command's name, `following` are commands to suggest at
    the end, `announce` is printed once the checks before the start have passed, and `out` receives the result instead
    of standard output.
    """
    began = time.monotonic()
    absent = [module for module in EXTRAS["demo"].modules if find_spec(module) is None]
    if absent:
        raise MissingExtra(f"training here needs {', '.join(absent)}; {install('demo')}")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    launcher = launcher or Launcher(config, chaos=chaos)
    launcher.prepare()
    if announce and not as_json:
        print(announce, flush=True)
    try:
        with watched(launcher.folder, quiet=as_json), screen(f"penstock {name}", quiet=as_json) as show:
            status = launcher.run(show)
    except KeyboardInterrupt:
        print(
            f"stopped; everything is in {config.folder}, and `{command()} train {config.folder}/config.toml` "
            "continues it",
            file=sys.stderr,
        )
        raise
    report = summary(config, status, time.monotonic() - began, goal)
    if launcher.chaos is not None:
        report["kills"] = dict(launcher.chaos.kills)
    print(json.dumps(report) if as_json else _closing(report, config, following), file=out)
    return 0 if report["learned"] is not False and report["ledger"].get("balanced", True) else 1


def summary(config: TrainConfig, status: dict[str, Any], seconds: float, goal: float | None) -> dict[str, Any]:
    """Summarize a run as plain data. `learned` is None without a goal."""
    rows = Metrics(Path(config.folder) / "metrics.jsonl").read()
    rewards = [row["train/reward"] for row in rows if row.get("train/reward") is not None]
    last = sum(rewards[-10:]) / max(len(rewards[-10:]), 1)
    return {
        "learned": None if goal is None else last >= goal,
        "reward_first": round(sum(rewards[:10]) / max(len(rewards[:10]), 1), 4),
        "reward_last": round(last, 4),
        "steps": len(rows),
        "seconds": round(seconds, 1),
        "tokens": _summed(rows, "perf/tokens"),
        "shared_tokens": _summed(rows, "perf/shared_tokens"),
        "on_policy_gap": rows[0].get("train/on_policy_gap") if rows else None,
        "ledger": status.get("ledger", {}),
        **({"feedback": status["feedback"]} if "feedback" in status else {}),
        "folder": config.folder,
    }


def _summed(rows: list[dict[str, float]], name: str) -> int:
    return int(sum(row.get(name) or 0 for row in rows))


def _closing(report: dict[str, Any], config: TrainConfig, following: tuple[str, ...]) -> str:
    ledger, gap = report["ledger"], report["on_policy_gap"]
    verdict = {True: "It learned", False: "It did not learn in time", None: "Training finished"}[report["learned"]]
    lines = [
        "",
        f"{verdict}: reward {report['reward_first']:.2f} -> {report['reward_last']:.2f} "
        f"in {report['steps']} steps, {report['seconds']:.0f} s.",
    ]
    if ledger:
        under_way = ledger["scheduled"] + ledger["delivered"]
        lines.append(
            f"Ledger: {ledger['accepted']:,} samples accepted, {ledger['committed']:,} trained, {ledger['held']:,} "
            f"held, {under_way:,} under way, {_dropped(ledger['dropped'])}."
        )
        lines.append("Every sample is accounted for." if ledger["balanced"] else "The ledger is NOT BALANCED.")
    if (distinct := _trained_once(ledger)) and ledger["uses"] > distinct:
        lines.append(f"Replay: each trained sample was used {ledger['uses'] / distinct:.2f} times on average.")
    if gap is not None:
        lines.append(f"Trainer and sampler agree on the first step to {gap:.1e} in log-probability.")
    if report["shared_tokens"]:
        lines.append(
            f"{report['shared_tokens']:,} of {report['tokens']:,} tokens were not computed again: samples of a "
            "micro-batch share them."
        )
    if became := report.get("feedback"):
        lines.append(
            f"Dynamic sampling: {became.get('filtered', 0):,} groups filtered, {became.get('trained', 0):,} trained, "
            f"at least {became['least_groups_per_step']} in each step."
        )
    if report.get("kills"):
        were = "was" if sum(report["kills"].values()) == 1 else "were"
        lines.append(f"Meanwhile {killed(report['kills'])} {were} killed and replaced.")
    lines += [f"Everything is in {config.folder}.", "", "Next:"]
    todo = [f"  penstock view {config.folder}          look at the tokens", *following]
    todo = [line.replace("penstock ", f"{command()} ") for line in todo]
    return "\n".join(fitted(line, _WIDTH) for line in [*lines, *todo])


def _trained_once(ledger: dict[str, Any]) -> int:
    """Count the samples that are or were in steps, each once however often it was trained."""
    return sum(ledger.get(name, 0) for name in ("scheduled", "delivered", "committed"))


def command() -> str:
    """Return how to call `penstock` from this shell: by name if it is on the PATH, else by the path used now."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "penstock" and shutil.which("penstock") is None else "penstock"


def _dropped(reasons: dict[str, int]) -> str:
    """Say how many samples were dropped, by reason.

    >>> _dropped({"stale": 1200, "evicted": 3})
    '1,203 dropped (3 evicted, 1,200 stale)'
    """
    why = ", ".join(f"{count:,} {reason}" for reason, count in sorted(reasons.items()) if count)
    return f"{sum(reasons.values()):,} dropped" + (f" ({why})" if why else "")
