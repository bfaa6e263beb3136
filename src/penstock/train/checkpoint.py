"""Weights on disk: checkpoints that carry the data cursor, and versions published for rollout workers.

    checkpoints/step_00000060/model.safetensors
                              optimizer.safetensors     two moments and a count per parameter
                              state.json                the step and the format version
    weights/v00000060.safetensors                       published

Files are tensors and JSON, never pickles. Each is written under a temporary name, synced and renamed, so a reader sees
a complete one or none. To resume, ask the plane for the step after the checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.atomic import beside, rename, sync
from penstock.errors import CorruptFile

_PREFIX = "step_"
_KEPT = 3
"""Checkpoints kept: the last ones."""
_VERSION = re.compile(r"v(\d{8})\.safetensors")


def full(tensor: Tensor) -> Tensor:
    """Gather a tensor that may be sharded over ranks. Collective: all ranks must call it."""
    gather = getattr(tensor, "full_tensor", None)
    whole: Tensor = tensor if gather is None else gather()
    return whole.detach()


def like(whole: Tensor, part: Tensor) -> Tensor:
    """Shard a full tensor like `part`."""
    placements = getattr(part, "placements", None)
    if placements is None:
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, part.device_mesh, placements)


def model_state(model: Any) -> dict[str, Tensor]:
    """Return the full weights by name. Tied weights appear once: safetensors rejects shared memory."""
    seen: set[int] = set()
    state = {}
    for name, parameter in model.named_parameters():
        if id(parameter) not in seen:
            seen.add(id(parameter))
            state[name] = full(parameter)
    return state


def load_model_state(model: Any, state: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name not in state or state[name].shape != parameter.shape:
                raise CorruptFile(
                    f"checkpoint: {name} is missing or has another shape; the checkpoint is of another model"
                )
            parameter.copy_(like(state[name], parameter))


def optimizer_state(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}|{key}": full(value) if isinstance(value, Tensor) else torch.tensor(value)
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
    }


def load_optimizer_state(model: Any, optimizer: torch.optim.Optimizer, state: dict[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    for entry, value in state.items():
        name, _, key = entry.rpartition("|")
        parameter = parameters[name]
        same = value.shape == parameter.shape
        optimizer.state[parameter][key] = like(value, parameter) if same else value


def save(folder: Path, step: int, model: Any, optimizer: torch.optim.Optimizer, *, writes: bool) -> None:
    """Write a checkpoint. All ranks call this, because gathering is collective. The rank with `writes` writes."""
    from safetensors.torch import save_file

    weights, moments = model_state(model), optimizer_state(model, optimizer)
    if not writes:
        return
    final = folder / f"{_PREFIX}{step:08d}"
    temporary = beside(final)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, temporary / "model.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in moments.items()}, temporary / "optimizer.safetensors")
    (temporary / "state.json").write_text(json.dumps({"step": step, "format": 1}))
    for path in (*temporary.iterdir(), temporary):
        sync(path)
    shutil.rmtree(final, ignore_errors=True)
    rename(temporary, final)
    for old in steps(folder)[:-_KEPT]:
        shutil.rmtree(folder / f"{_PREFIX}{old:08d}", ignore_errors=True)


def steps(folder: Path) -> list[int]:
    """List the steps of the checkpoints in a folder, ascending."""
    if not folder.is_dir():
        return []
    names = [path.name.removeprefix(_PREFIX) for path in folder.iterdir() if path.name.startswith(_PREFIX)]
    return sorted(int(name) for name in names if name.isdecimal())


def restore(folder: Path, step: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Load a checkpoint into a model and its optimizer."""
    from safetensors.torch import load_file

    path = folder / f"{_PREFIX}{step:08d}"
    load_model_state(model, load_file(path / "model.safetensors"))
    load_optimizer_state(model, optimizer, load_file(path / "optimizer.safetensors"))


class Weights:
    """A folder of published weights. The trainer publishes versions, rollout workers load the latest."""

    def __init__(self, folder: str | Path, *, keep: int = 4) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._keep = keep

    def publish(self, version: int, state: dict[str, Any]) -> Path:
        """Write a version. Removes old ones but keeps the last few, which workers may be reading."""
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
        found = (_VERSION.fullmatch(name) for name in os.listdir(self.folder))  # noqa: PTH208
        return sorted(int(match[1]) for match in found if match)

    def latest(self) -> int:
        """Return the newest version, -1 if there is none."""
        return max(self.versions(), default=-1)

    def load(self, version: int) -> dict[str, Any] | None:
        """Load the weights of a version, None if it was removed in the meantime."""
        from safetensors.torch import load_file

        try:
            state: dict[str, Any] = load_file(self._path(version))
        except FileNotFoundError:
            return None
        return state

    def _path(self, version: int) -> Path:
        return self.folder / f"v{version:08d}.safetensors"
