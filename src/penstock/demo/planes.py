"""The plane of a run, from its configuration."""

from __future__ import annotations

import hashlib
import signal
import tempfile
from pathlib import Path

from penstock.hold import Fifo, MinPriority, Prioritized, Selector, Uniform
from penstock.pack import Packing
from penstock.send.timeouts import Timeouts
from penstock.serve import PlaneSettings, Replay, Server, Target
from penstock.serve.clients.api import plane_carrier
from penstock.serve.decisions.log import Log
from penstock.train.config import TrainConfig

_LONGEST = 100
"""A socket's path has room for 107 characters."""


def address(config: TrainConfig) -> str:
    """Where ranks and workers of a run find its plane: in its folder, unless that name is too long for a socket."""
    path = Path(config.folder).resolve() / "plane.sock"
    if len(str(path)) > _LONGEST:
        path = Path(tempfile.gettempdir()) / f"penstock-{hashlib.sha256(str(path).encode()).hexdigest()[:16]}.sock"
    return f"shm+ipc://{path}"


def settings_of(config: TrainConfig, timeouts: Timeouts) -> PlaneSettings:
    data, replay = config.data, config.replay
    samplers: dict[str, Selector] = {
        "fifo": Fifo(),
        "uniform": Uniform(),
        "prioritized": Prioritized(replay.exponent),
    }
    return PlaneSettings(
        packing=Packing(
            ranks=config.ranks,
            seq_len=data.seq_len,
            micro_batch_max_tokens=data.micro_batch_max_tokens,
            pad_to_multiple_of=data.pad_to_multiple_of,
            long_rows=data.long_rows,
        ),
        target=Target(groups=data.groups_per_step),
        run=config.run,
        replay=Replay(
            capacity=max(int(replay.capacity_steps * data.groups_per_step), data.groups_per_step),
            sampler=samplers[replay.sampler],
            remover=None if replay.sampler == "fifo" else MinPriority(),
            max_times_sampled=replay.max_times_sampled,
            max_staleness=replay.max_staleness,
            seed=config.seed,
        ),
        timeouts=timeouts,
    )


def run_plane(config: TrainConfig, timeouts: Timeouts) -> None:
    """Serve until SIGTERM: the run's own processes at `address`, others at `config.listen`."""
    urls = [address(config), *filter(None, [config.listen])]
    log = Log(Path(config.folder) / "plane")  # first: it refuses where another run is at work in this folder
    Path(urls[0].partition("ipc://")[2]).unlink(missing_ok=True)
    carriers = [plane_carrier(url, config.keys or None) for url in urls]
    server = Server(settings_of(config, timeouts), log, carriers)
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server.run()
