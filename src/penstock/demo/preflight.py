"""Check what a run needs from the machine, before any of its processes starts.

Settings are validated where they are read. This checks the rest: packages, the model's folder, free ports, and that no
other run uses the folder.
"""

from __future__ import annotations

import errno
import fcntl
import socket
from pathlib import Path
from urllib.parse import urlsplit

from penstock.errors import ConfigError, Conflict
from penstock.extras import require
from penstock.server import metrics_token, parse_address
from penstock.train import TrainConfig, check_installed, image_processor, is_vision


def check_surroundings(config: TrainConfig) -> None:
    """Raise for the first problem that would keep the run from starting, with the setting and the remedy."""
    check_installed(list(config.metrics))
    if config.model.path and not (Path(config.model.path) / "config.json").is_file():
        raise ConfigError(f"model.path: {config.model.path!r} has no config.json; give the folder of a saved model")
    if is_vision(config.model):
        image_processor(config.model)
    for url in config.listen:
        _check_listen(url)
    if config.prometheus:
        require("prometheus", "prometheus_client")
        metrics_token(config.prometheus, None)  # rejects an address that other hosts can reach
        host, port = parse_address(config.prometheus, "metrics")
        _check_port("prometheus", config.prometheus, host, port)
    _make_folder(Path(config.folder))
    if not config.plane:
        _check_alone(Path(config.folder))


def _check_listen(url: str) -> None:
    scheme, _, rest = url.rpartition("://")
    if scheme.endswith("ipc"):
        if not Path(rest).parent.is_dir():
            raise ConfigError(f"listen: {url!r}: {Path(rest).parent} is not a folder; make it, or use another path")
        return
    if scheme != "tcp" or rest.endswith(":*"):
        return
    parts = urlsplit(url)
    if parts.hostname and parts.port is not None:
        _check_port("listen", url, parts.hostname, parts.port)


def _check_port(setting: str, given: str, host: str, port: int) -> None:
    """Bind the port for a moment. If it is taken between now and the plane's start, the plane reports it."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        return  # a name that only ZeroMQ resolves, such as that of a network interface
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            busy = "another process listens there" if error.errno == errno.EADDRINUSE else error.strerror
            raise ConfigError(f"{setting}: {given!r}: {busy}; use another port") from None


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"folder: {str(folder)!r}: {error.strerror}; give a folder that can be made") from None


def _check_alone(folder: Path) -> None:
    """Raise if a plane is running in the run's folder: its ranks and ours would join each other."""
    lock = folder / "plane" / "lock"
    if not lock.exists():
        return
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(
                f"folder: {str(folder)!r}: a run is using it; stop that run first, or use another folder"
            ) from None
