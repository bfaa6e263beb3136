"""Kills a run again and again, with its frames in an object store behind a bad network.

Producers and ranks use the store themselves, as they do a folder. Afterwards nothing may be lost, doubled or changed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from penstock.plane.settings import PlaneSettings
from tests.support.object_proxy import ObjectProxy
from tests.support.processes import settings
from tests.support.s3_server import make_bucket, s3_environment, s3_server
from tests.support.torture import Result, Run


class ObjectsRun(Run):
    """A run of real processes on an object store; they find it by the environment of this one."""

    def __init__(self, folder: Path, storage: str, seed: int) -> None:
        super().__init__(folder, "direct", seed)
        self._storage, self.result.transport = storage, "objects"

    def options(self, name: str) -> list[str]:
        return [f"--storage={self._storage}"] if name.startswith("plane") else []

    def settings(self) -> PlaneSettings:
        return settings(self.ranks, storage=self._storage)


def torture_objects(
    folder: Path,
    *,
    kills: int,
    seed: int = 0,
    rates: dict[str, float] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Result, ObjectProxy]:
    """Kill a run's processes `kills` times. `rates`: how often requests fail, and how; see `ObjectProxy`.

    The folder is kept if anything was wrong."""
    folder.mkdir(parents=True)
    with s3_server() as endpoint, ObjectProxy(endpoint, seed=seed) as proxy:
        before = dict(os.environ)
        os.environ.update(s3_environment(proxy.url))
        try:
            run = ObjectsRun(folder, f"s3://{make_bucket(endpoint)}/runs/torture", seed)
            proxy.rates = rates or {}
            result = run.go(kills, progress)
        finally:
            os.environ.clear()
            os.environ.update(before)
    if not rates:
        result.check_ways()
    if result.good:
        shutil.rmtree(folder)
    return result, proxy
