"""The plane: accepts groups, draws and plans steps, records each decision in the log, follows what ranks report."""

from penstock.plane.loop import Server
from penstock.plane.settings import PlaneSettings, Replay, Target

__all__ = ["PlaneSettings", "Replay", "Server", "Target"]
