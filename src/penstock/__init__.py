"""Penstock: the data plane for RL post-training of language and vision-language models.

This module has what most programs need. The docs describe the rest (`penstock.train`, `penstock.integrations`, ...).
Names are imported when they are first used, so `import penstock` is cheap: it loads no torch, no ray and no image
library, and a rollout worker never loads the server.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.arrays import Column, Sample
    from penstock.assets import AssetStore
    from penstock.capture import Trajectory, Turn
    from penstock.client import Plane, Source, Step, connect, open  # noqa: A004
    from penstock.convert import Group, grpo
    from penstock.errors import PenstockError
    from penstock.frames import decode, encode
    from penstock.packing import MicroBatch, pack
    from penstock.protocol import Timeouts
    from penstock.replay import (
        DifficultyPools,
        Fifo,
        Lifo,
        MinSize,
        Paced,
        Prioritized,
        SamplesPerInsert,
        Sequential,
        Table,
        Thompson,
        Uniform,
        WindowedFifo,
    )
    from penstock.train import to_torch
    from penstock.version import __version__
    from penstock.view import TokenExporter

_HOMES = {
    "AssetStore": "assets",
    "Column": "arrays",
    "DifficultyPools": "replay",
    "Fifo": "replay",
    "Group": "convert",
    "Lifo": "replay",
    "MicroBatch": "packing",
    "MinSize": "replay",
    "Paced": "replay",
    "PenstockError": "errors",
    "Plane": "client",
    "Prioritized": "replay",
    "Sample": "arrays",
    "SamplesPerInsert": "replay",
    "Sequential": "replay",
    "Source": "client",
    "Step": "client",
    "Table": "replay",
    "Thompson": "replay",
    "Timeouts": "protocol",
    "TokenExporter": "view",
    "Trajectory": "capture",
    "Turn": "capture",
    "Uniform": "replay",
    "WindowedFifo": "replay",
    "__version__": "version",
    "connect": "client",
    "decode": "frames",
    "encode": "frames",
    "grpo": "convert",
    "open": "client",
    "pack": "packing",
    "to_torch": "train",
}

__all__ = [
    "AssetStore",
    "Column",
    "DifficultyPools",
    "Fifo",
    "Group",
    "Lifo",
    "MicroBatch",
    "MinSize",
    "Paced",
    "PenstockError",
    "Plane",
    "Prioritized",
    "Sample",
    "SamplesPerInsert",
    "Sequential",
    "Source",
    "Step",
    "Table",
    "Thompson",
    "Timeouts",
    "TokenExporter",
    "Trajectory",
    "Turn",
    "Uniform",
    "WindowedFifo",
    "__version__",
    "connect",
    "decode",
    "encode",
    "grpo",
    "open",
    "pack",
    "to_torch",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(f"penstock.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
