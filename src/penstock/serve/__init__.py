"""The plane: hold, pack and send composed over a durable log, with its clients and its server process."""

from penstock.serve.clients.api import connect, open, open_settings  # noqa: A004
from penstock.serve.clients.plane import Plane
from penstock.serve.clients.source import Source, SourceStep
from penstock.serve.decisions.recorded_run import RecordedRun
from penstock.serve.process.plane_process import PlaneProcess
from penstock.serve.process.server import Server
from penstock.serve.settings import PlaneSettings, Replay, Target

__all__ = [
    "Plane",
    "PlaneProcess",
    "PlaneSettings",
    "RecordedRun",
    "Replay",
    "Server",
    "Source",
    "SourceStep",
    "Target",
    "connect",
    "open",
    "open_settings",
]
