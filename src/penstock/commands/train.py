"""Run a configuration: the trainer ranks, and the plane and rollout workers if the file has a [task].

  penstock demo --write-config my.toml    a file with every knob and what it means
  penstock train my.toml                  run it, or continue it from its last checkpoint
  penstock train my.toml --json           one JSON line at the end

Without a [task], set `listen` and put groups from your own processes: ps.open("tcp://127.0.0.1:7440").put(group).
With [data.fake] there is no plane: synthetic micro-batches measure the trainer alone. The exit code is 1 when a
target_reward was set and not reached.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from penstock.commands.demo import run_config
from penstock.errors import ConfigError
from penstock.send.keys import PlaneKeys
from penstock.train.config import load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, help="a TOML file, as written by penstock demo --write-config")
    parser.add_argument("--json", action="store_true", help="print one JSON line at the end, and nothing else")


def run(args: argparse.Namespace) -> int:
    if not args.config.is_file():
        raise ConfigError(f"{args.config}: not a file; write one with `penstock demo --write-config {args.config}`")
    config = load(args.config)
    if config.task is None and config.data.fake is None and not config.listen:
        raise ConfigError(
            f"{args.config}: no [task], no [data.fake] and no listen address; nobody would generate anything"
        )
    if not config.folder:
        config = msgspec.structs.replace(config, folder=str(Path("runs") / config.run))
    if config.keys:
        PlaneKeys.load(config.keys)  # what is wrong with them is said now, and not when the plane starts
    announce = ""
    if config.listen:
        keys = ', keys="FOLDER"' if config.keys else ""
        announce = f'Groups are taken at {config.listen}: ps.open("{config.listen}"{keys}).put(group)'
    again = f"  penstock train {args.config}          with a higher max_steps, to continue"
    return run_config(config, goal=config.target_reward, following=(again,), announce=announce, as_json=args.json)
