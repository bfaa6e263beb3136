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

    def __init__(self, folder: Path, storage: str, seed: int, sign_puts_s: float | None = None) -> None:
        """`sign_puts_s`: producers have no credentials, and write with URLs that the plane signs."""
        super().__init__(folder, "direct", seed)
        self._storage, self.result.transport, self._sign_puts_s = storage, "objects", sign_puts_s

    def options(self, name: str) -> list[str]:
        if not name.startswith("plane"):
            return []
        signs = [] if self._sign_puts_s is None else [f"--sign-puts-s={self._sign_puts_s}"]
        return [f"--storage={self._storage}", *signs]

    def prefix(self, name: str) -> list[str]:
        if self._sign_puts_s is None or not name.startswith("producer"):
            return []
        return ["env", *(word for key in s3_environment("") for word in ("-u", key))]

    def settings(self) -> PlaneSettings:
        return settings(self.ranks, storage=self._storage)


def torture_objects(
    folder: Path,
    *,
    kills: int,
    seed: int = 0,
    rates: dict[str, float] | None = None,
    sign_puts_s: float | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Result, ObjectProxy]:
    """Kill a run's processes `kills` times. `rates`: how often requests fail, and how; see `ObjectProxy`.

    The folder is kept if anything was wrong."""
    folder.mkdir(parents=True)
    with s3_server() as endpoint, ObjectProxy(endpoint, seed=seed) as proxy:
        before = dict(os.environ)
        os.environ.update(s3_environment(proxy.url))
        try:
            run = ObjectsRun(folder, f"s3://{make_bucket(endpoint)}/runs/torture", seed, sign_puts_s)
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
