"""The plane: hold, pack and send composed over a durable log, with its clients and its server process."""

from penstock.serve.opening import connect, open, open_settings  # noqa: A004
from penstock.serve.plane import Plane
from penstock.serve.server import Server
from penstock.serve.settings import PlaneSettings, Replay, Target
from penstock.serve.source import Source, SourceStep

__all__ = [
    "Plane",
    "PlaneSettings",
    "Replay",
    "Server",
    "Source",
    "SourceStep",
    "Target",
    "connect",
    "open",
    "open_settings",
]
