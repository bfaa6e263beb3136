"""Run a configuration: the trainer ranks, and the plane and rollout workers if the file has a [task].

  penstock demo --write-config my.toml    a file with every knob and what it means
  penstock train my.toml                  run it, or continue it from its last checkpoint
  penstock train my.toml --json           one JSON line at the end

With [data.fake] there is no plane: synthetic micro-batches measure the trainer alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from penstock.commands.demo import run_config
from penstock.errors import ConfigError
from penstock.train.config import load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, help="a TOML file, as written by penstock demo --write-config")
    parser.add_argument("--json", action="store_true", help="print one JSON line at the end, and nothing else")


def run(args: argparse.Namespace) -> int:
    config = load(args.config)
    if config.task is None and config.data.fake is None and not config.listen:
        raise ConfigError(
            f"{args.config}: no [task], no [data.fake] and no listen address; nobody would generate anything"
        )
    if not config.folder:
        config = msgspec.structs.replace(config, folder=str(Path("runs") / config.run))
    return run_config(config, as_json=args.json)
