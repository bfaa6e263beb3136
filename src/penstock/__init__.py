"""Penstock: the data plane for RL post-training of language and vision-language models.

What most programs need is here; the docs name the rest (`penstock.train`, `penstock.integrations`, ...). Names are
imported when they are first used, so `import penstock` stays light: it pulls in neither torch nor ray nor an image
library, and a rollout worker that only captures never loads the server.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

# These two are named like the stages they live in. Imported here, the names mean the functions, for good: Python
# binds a submodule to its package's name only when it is first imported.
from penstock.encode import decode, encode
from penstock.pack import MicroBatch, Step, pack

if TYPE_CHECKING:
    from penstock.arrays import Column, Sample
    from penstock.assets import AssetStore
    from penstock.capture import Trajectory, Turn
    from penstock.convert import Group, grpo
    from penstock.errors import PenstockError
    from penstock.hold import Fifo, Lifo, MinSize, Prioritized, SamplesPerInsert, Table, Uniform
    from penstock.serve import Plane, Source, connect, open  # noqa: A004
    from penstock.train import to_torch
    from penstock.version import __version__
    from penstock.view import TokenExporter

_HOMES = {
    "AssetStore": "assets",
    "Column": "arrays",
    "Fifo": "hold",
    "Group": "convert",
    "Lifo": "hold",
    "MinSize": "hold",
    "PenstockError": "errors",
    "Plane": "serve",
    "Prioritized": "hold",
    "Sample": "arrays",
    "SamplesPerInsert": "hold",
    "Source": "serve",
    "Table": "hold",
    "TokenExporter": "view",
    "Trajectory": "capture",
    "Turn": "capture",
    "Uniform": "hold",
    "__version__": "version",
    "connect": "serve",
    "grpo": "convert",
    "open": "serve",
    "to_torch": "train",
}

__all__ = [
    "AssetStore",
    "Column",
    "Fifo",
    "Group",
    "Lifo",
    "MicroBatch",
    "MinSize",
    "PenstockError",
    "Plane",
    "Prioritized",
    "Sample",
    "SamplesPerInsert",
    "Source",
    "Step",
    "Table",
    "TokenExporter",
    "Trajectory",
    "Turn",
    "Uniform",
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
        raise AttributeError(f"penstock has no {name!r}; public are {', '.join(__all__)}")
    value = getattr(importlib.import_module(f"penstock.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
