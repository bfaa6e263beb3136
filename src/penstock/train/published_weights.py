"""Weights by version: the trainer publishes, rollout workers take the latest. Files appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from penstock.atomic import beside, rename, sync

_NAME = re.compile(r"v(\d{8})\.safetensors")


class Weights:
    """A folder of published weights."""

    def __init__(self, folder: str | Path, *, keep: int = 4) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._keep = keep

    def publish(self, version: int, state: dict[str, Any]) -> Path:
        """Write a version and then point to it; older ones are removed, but for a few that may be being read."""
        from safetensors.torch import save_file

        path = self.folder / f"v{version:08d}.safetensors"
        part = beside(path)
        save_file({name: tensor.detach().contiguous().clone() for name, tensor in state.items()}, part)
        sync(part)
        rename(part, path)
        for old in self.versions()[: -self._keep]:
            with contextlib.suppress(FileNotFoundError):
                self._path(old).unlink()
        return path

    def versions(self) -> list[int]:
        found = (_NAME.fullmatch(name) for name in os.listdir(self.folder))  # noqa: PTH208
        return sorted(int(match[1]) for match in found if match)

    def latest(self) -> int:
        """The newest version; -1 when there is none."""
        return max(self.versions(), default=-1)

    def load(self, version: int) -> dict[str, Any] | None:
        """The weights of a version; None when it was removed meanwhile."""
        from safetensors.torch import load_file

        try:
            state: dict[str, Any] = load_file(self._path(version))
        except FileNotFoundError:
            return None
        return state

    def _path(self, version: int) -> Path:
        return self.folder / f"v{version:08d}.safetensors"
