"""What a run needs of the machine, checked before any of its processes starts.

Settings are checked where they are read. This is about the rest: packages, the model's folder, addresses that must be
free, and a folder in which no other run is at work.
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
    """Raise with the setting and the remedy for the first thing that would keep the run from starting."""
    check_installed(list(config.metrics))
    if config.model.path and not (Path(config.model.path) / "config.json").is_file():
        raise ConfigError(f"model.path: {config.model.path!r} has no config.json; give the folder of a saved model")
    if is_vision(config.model):
        image_processor(config.model)
    for url in config.listen:
        _check_listen(url)
    if config.prometheus:
        require("prometheus", "prometheus_client")
        metrics_token(config.prometheus, None)  # refuses what other hosts can reach
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
    """Bind it for a moment; whoever takes it between now and then is found when the plane starts."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        return  # a name that only ZeroMQ knows, such as that of an interface
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
    """Refuse where a plane is at work in the run's folder: its ranks and ours would meet."""
    lock = folder / "plane" / "lock"
    if not lock.exists():
        return
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(
                f"folder: {str(folder)!r}: a run is at work in it; end that first, or use another folder"
            ) from None
