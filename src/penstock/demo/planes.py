"""The plane of a run, from its configuration."""

from __future__ import annotations

import hashlib
import signal
import tempfile
from pathlib import Path

from penstock.client import plane_transport
from penstock.plane import PlaneLoop, open_log
from penstock.train import TrainConfig

_LONGEST = 100
"""A socket's path has room for 107 characters."""


def address(config: TrainConfig) -> str:
    """Where ranks and workers of a run find its plane: in its folder, unless that name is too long for a socket."""
    if config.plane:
        return config.plane
    path = Path(config.folder).resolve() / "plane.sock"
    if len(str(path)) > _LONGEST:
        path = Path(tempfile.gettempdir()) / f"penstock-{hashlib.sha256(str(path).encode()).hexdigest()[:16]}.sock"
    return f"ipc://{path}"


def run_plane(config: TrainConfig) -> None:
    """Serve until SIGTERM: the run's own processes at `address`, others at `config.listen`."""
    urls = [address(config), *config.listen]
    log = open_log(Path(config.folder) / "plane", config)  # first: it refuses where another run is at work there
    Path(urls[0].partition("ipc://")[2]).unlink(missing_ok=True)
    transports = [plane_transport(url, config.keys, max_message=config.max_message_bytes) for url in urls]
    server = PlaneLoop(config, log, transports)
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server.run()
