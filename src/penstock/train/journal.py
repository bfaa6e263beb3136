"""Metrics: one JSON line per step, always; TensorBoard and Weights & Biases where they are asked for.

Names keep apart what was generated (`gen/`), what waits (`buffer/`), what was trained (`train/`) and how fast
(`perf/`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from penstock.errors import ConfigError


class Sink(Protocol):
    def write(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class JsonLines:
    """metrics.jsonl: appended to, one line per step, flushed each time."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        clean = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **clean}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError("metrics: 'tensorboard' is not installed; pip install tensorboard") from None
        self._writer: Any = SummaryWriter(str(folder))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    def __init__(self, folder: Path, run: str) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError("metrics: 'wandb' is not installed; pip install wandb") from None
        self._run: Any = wandb.init(project="penstock", name=run, dir=str(folder))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Journal:
    """Writes each step's metrics to every sink."""

    def __init__(self, folder: Path, run: str, extra: list[str]) -> None:
        self._sinks: list[Sink] = [JsonLines(folder / "metrics.jsonl")]
        if "tensorboard" in extra:
            self._sinks.append(TensorBoard(folder / "tensorboard"))
        if "wandb" in extra:
            self._sinks.append(WeightsAndBiases(folder, run))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.write(step, values)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
