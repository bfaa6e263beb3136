"""Run a configuration file: trainer ranks, and with a [task] also the plane and rollout workers.

  penstock demo --write-config my.toml    write a file with every setting and its meaning
  penstock train my.toml                  run it, or continue it from its last checkpoint
  penstock train my.toml --set packing.ranks=4    any setting, by its path in the file
  penstock train my.toml --json           one JSON line at the end

Without a [task], set `listen` and put groups from your own processes: ps.open("tcp://127.0.0.1:7440").put(group).
With [fake] there is no plane: synthetic micro-batches measure the trainer alone. The exit code is 1 if a target_reward
was set and not reached.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from penstock.commands.demo import run_config
from penstock.errors import ConfigError
from penstock.train import load
from penstock.transport import PlaneKeys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, help="a TOML file, as written by penstock demo --write-config")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any setting, by its path")
    parser.add_argument("--json", action="store_true", help="print one JSON line at the end, and nothing else")


def run(args: argparse.Namespace) -> int:
    if not args.config.is_file():
        raise ConfigError(f"{args.config}: not a file; write one with `penstock demo --write-config {args.config}`")
    config = load(args.config, args.set)
    if config.task is None and config.fake is None and not config.listen:
        raise ConfigError(f"{args.config}: no [task], no [fake] and no listen address; set one, or no groups arrive")
    if not config.folder:
        config = replace(config, folder=str(Path("runs") / config.run))
    if config.keys:
        PlaneKeys.load(config.keys)  # report bad keys now, not when the plane starts
    announce = ""
    if config.listen:
        keys = ', keys="FOLDER"' if config.keys else ""
        announce = f'Groups are accepted at {", ".join(config.listen)}: ps.open("{config.listen[0]}"{keys}).put(group)'
    again = f"  penstock train {args.config}          with a higher max_steps, to continue"
    return run_config(
        config, name="train", goal=config.target_reward, following=(again,), announce=announce, as_json=args.json
    )
