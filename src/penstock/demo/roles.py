"""What each process of a run does. The fork server imports this module, with torch, once before it forks them."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

from penstock.client import open as open_plane
from penstock.client import plane_transport
from penstock.demo.processes import ABORTED, REFUSED, address
from penstock.demo.tasks import Prompt, make_task
from penstock.demo.worker import work
from penstock.errors import ConfigError, Fenced, PeerError
from penstock.plane import PlaneLoop, open_log
from penstock.train import TrainConfig, load, train
from penstock.view import TokenExporter


def run_role(name: str, folder: Path) -> int:
    """Run "plane", "rank-N", "worker-N" or "judge-N" of the run in a folder. Returns the exit code."""
    os.umask(0o077)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(message)s", force=True)
    role, _, index = name.partition("-")
    try:
        config = load(folder / "config.toml")
        if role == "plane":
            _serve(config)
        elif role == "worker":
            work(config, address(config), int(index))
        elif role == "judge":
            _judge(config)
        else:
            _train(config, int(index))
    except (PeerError, Fenced) as error:
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
        return ABORTED
    except ConfigError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return REFUSED
    return 0


def _serve(config: TrainConfig) -> None:
    """Run the plane until SIGTERM. The run's own processes connect at `address`, others at `config.listen`."""
    urls = [address(config), *config.listen]
    # Before the socket is removed: this fails if another plane uses the folder, and the socket is that plane's.
    log = open_log(Path(config.folder) / "plane", config)
    Path(urls[0].partition("ipc://")[2]).unlink(missing_ok=True)
    transports = [plane_transport(url, config.keys, max_message=config.max_message_bytes) for url in urls]
    server = PlaneLoop(config, log, transports)
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    server.run()


def _judge(config: TrainConfig) -> None:
    """Score what workers put without rewards, until the process is killed."""
    assert config.task is not None
    task = make_task(config.task, Path(config.folder))
    with open_plane(address(config), timeouts=config.timeouts) as plane:
        for lease in plane.lacking("rewards", groups=32):
            rewards = {
                sample.id: task.reward(Prompt(sample.prompt, []), sample.token_ids[sample.loss_mask].tolist())
                for sample in lease.samples
            }
            lease.attach(rewards)


def _train(config: TrainConfig, index: int) -> None:
    """Run one rank of the trainer."""
    exporter = None
    if config.export_every:
        # The rendezvous port is new at each start of the ranks and the same for all of them.
        attempt = os.environ.get("MASTER_PORT", "")
        exporter = TokenExporter(
            config.folder, rank=index, world=config.ranks, every=config.export_every, attempt=attempt
        )
    train(config, rank=index, url=address(config), observer=exporter)
