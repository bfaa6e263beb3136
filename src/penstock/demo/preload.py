"""Everything a process of a run imports. The fork server loads this module once, before it forks them."""

from __future__ import annotations

from penstock.client import open as open_plane
from penstock.client import plane_transport
from penstock.demo.worker import work
from penstock.plane import PlaneLoop, open_log
from penstock.train import build_model, train
from penstock.view import TokenExporter

__all__ = ["PlaneLoop", "TokenExporter", "build_model", "open_log", "open_plane", "plane_transport", "train", "work"]
