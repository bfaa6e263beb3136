"""One process of a run: `python -m penstock.demo.role plane|worker|rank CONFIG [--index N]`.

Started by the launcher and gone with it, however it ends.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path

from penstock.errors import Fenced, PeerError
from penstock.send.timeouts import Timeouts
from penstock.serve.watchdog import die_with_parent
from penstock.train.config import TrainConfig, load

TIMEOUTS = Timeouts(heartbeat_s=1.0, peer_s=8.0, delivery_s=30.0, plane_s=60.0, resend_s=0.5)
ABORTED = 3
"""Exit code of a rank that stopped because another process failed: start all ranks again."""


def plane(config: TrainConfig) -> None:
    from penstock.demo.planes import run_plane

    run_plane(config, TIMEOUTS)


def worker(config: TrainConfig, index: int) -> None:
    from penstock.demo.planes import address
    from penstock.demo.worker import work

    work(config, address(config), index, timeouts=TIMEOUTS)


def rank(config: TrainConfig, index: int) -> None:
    from penstock.demo.planes import address
    from penstock.train.trainer import train
    from penstock.view import TokenExporter

    exporter = None
    if config.export_every:
        # The rendezvous port is new in every life of the ranks, and the same for all of them.
        attempt = os.environ.get("MASTER_PORT", "")
        exporter = TokenExporter(
            config.folder, rank=index, world=config.ranks, every=config.export_every, attempt=attempt
        )
    train(config, rank=index, url=address(config), timeouts=TIMEOUTS, observer=exporter)


def main() -> int:
    parser = argparse.ArgumentParser(prog="penstock.demo.role")
    parser.add_argument("role", choices=["plane", "worker", "rank"])
    parser.add_argument("config", type=Path)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--parent", type=int, default=0)
    args = parser.parse_args()
    if args.parent and not die_with_parent(args.parent, signal.SIGKILL):
        return 1
    os.umask(0o077)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    config = load(args.config)
    try:
        if args.role == "plane":
            plane(config)
        elif args.role == "worker":
            worker(config, args.index)
        else:
            rank(config, args.index)
    except (PeerError, Fenced) as error:
        print(f"{args.role} {args.index}: {type(error).__name__}: {error}", file=sys.stderr)
        return ABORTED
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
