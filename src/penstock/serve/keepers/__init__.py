"""Keepers: one process per node that checks, keeps and gives frames, and vouches for them to the plane."""

from penstock.serve.keepers.keeper_process import KeeperProcess
from penstock.serve.keepers.keeper_server import KeeperServer
from penstock.serve.keepers.keeper_settings import KeeperSettings

__all__ = ["KeeperProcess", "KeeperServer", "KeeperSettings"]
