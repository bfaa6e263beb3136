"""What the processes of a run do: serve the plane, generate, or train. Forked by the nursery, gone with it."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from penstock.errors import ConfigError, Fenced, PeerError
from penstock.train import TrainConfig, load

ABORTED = 3
"""Exit code of a rank that stopped because another process failed: start all ranks again."""
REFUSED = 4
"""Exit code of a process that its settings do not let start: starting it again would end the same way."""


def plane(config: TrainConfig) -> None:
    from penstock.demo.planes import run_plane

    run_plane(config)


def worker(config: TrainConfig, index: int) -> None:
    from penstock.demo.planes import address
    from penstock.demo.worker import work

    work(config, address(config), index)


def rank(config: TrainConfig, index: int) -> None:
    from penstock.demo.planes import address
    from penstock.train import train
    from penstock.view import TokenExporter

    exporter = None
    if config.export_every:
        # The rendezvous port is new each time the ranks start, and the same for all of them.
        attempt = os.environ.get("MASTER_PORT", "")
        exporter = TokenExporter(
            config.folder, rank=index, world=config.ranks, every=config.export_every, attempt=attempt
        )
    train(config, rank=index, url=address(config), observer=exporter)


def run(name: str, config: Path, index: int) -> int:
    """Be one process of a run until it ends; returns its exit code."""
    os.umask(0o077)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(message)s", force=True)
    settings = load(config)
    try:
        if name == "plane":
            plane(settings)
        elif name == "worker":
            worker(settings, index)
        else:
            rank(settings, index)
    except (PeerError, Fenced) as error:
        print(f"{name} {index}: {type(error).__name__}: {error}", file=sys.stderr)
        return ABORTED
    except ConfigError as error:
        print(f"{name} {index}: {error}", file=sys.stderr)
        return REFUSED
    return 0


def preload(config: Path) -> None:
    """Import everything a role needs, before any thread exists; a model is built because that imports the most."""
    import torch

    from penstock.demo import planes, worker  # noqa: F401
    from penstock.train import (
        build_model,
        trainer,  # noqa: F401
    )
    from penstock.view import TokenExporter  # noqa: F401

    torch.set_num_threads(1)
    build_model(load(config).model)
