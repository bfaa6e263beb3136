"""Write metrics: always one JSON line per step; optionally TensorBoard, Weights & Biases, Trackio and Prometheus.

Prefixes separate generation (`gen/`), the buffer (`buffer/`), training (`train/`) and speed (`perf/`).
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from penstock.errors import MissingExtra
from penstock.extras import install
from penstock.packing import Accounting
from penstock.server import MetricsPage, expose


class Sink(Protocol):
    def write(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class JsonLines:
    """Appends one line per step to metrics.jsonl and flushes it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        clean = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **clean}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Event files in the run's folder."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Tracker:
    """A run of project "penstock" at Weights & Biases or in Trackio.

    Weights & Biases stores it in the run's folder with WANDB_MODE=offline, Trackio where TRACKIO_DIR says. A run of
    Trackio that is started again goes on.
    """

    def __init__(self, package: str, run: str, **settings: Any) -> None:
        tracker: Any = import_module(package)
        self._run = tracker.init(project="penstock", name=run, **settings)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Prometheus:
    """Serves the last step's metrics at http://HOST:PORT/metrics, named like `penstock_train_reward`."""

    def __init__(self, address: str, run: str) -> None:
        self._run = run
        self._values: dict[str, float] = {}
        self._page = MetricsPage(address, lambda: self._values, self._text)
        self.url = self._page.url

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._values = {"train/step": step, **values}  # one assignment, so a reader never sees a mix of two steps

    def _text(self, values: dict[str, float]) -> str:
        return expose(
            (
                ("penstock_" + path.replace("/", "_"), "gauge", {}, value)
                for path, value in values.items()
                if math.isfinite(value)
            ),
            run=self._run,
        )

    def close(self) -> None:
        self._page.close()


class MetricsFile:
    """Writes each step's metrics to every sink."""

    def __init__(self, folder: Path, run: str, extra: list[str], prometheus: str = "") -> None:
        """`extra` names additional sinks. `prometheus` is the address of its page, "" for none."""
        check_installed(extra)
        self._sinks: list[Sink] = [JsonLines(folder / "metrics.jsonl")]
        try:
            if prometheus:
                self._sinks.append(Prometheus(prometheus, run))
            if "tensorboard" in extra:
                self._sinks.append(TensorBoard(folder / "tensorboard"))
            if "wandb" in extra:
                self._sinks.append(Tracker("wandb", run, dir=str(folder)))
            if "trackio" in extra:
                self._sinks.append(Tracker("trackio", run, resume="allow", embed=False))
        except BaseException:
            self.close()
            raise

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.write(step, values)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def check_installed(extra: list[str]) -> None:
    """Raise if the package of a sink is missing. Called before a run starts."""
    for name in extra:
        if find_spec(name) is None:
            raise MissingExtra(f"metrics: {name!r} is not installed; {install(name)}")


# ------------------------------------------------------------------ of packing and of this process


def packed(accounting: Accounting, rank: int) -> dict[str, float]:
    """Return packing counts of one rank (`local`) and of all ranks (`total`)."""
    found: dict[str, float] = {}
    for scope, counts in (("local", accounting.ranks[rank]), ("total", accounting.total)):
        for name in ("tokens", "loss_tokens", "samples", "micro_batches", "max_micro_batch_tokens"):
            found[f"pack/{scope}_{name}"] = getattr(counts, name)
    return found | {
        "pack/micro_batch_max_tokens": accounting.micro_batch_max_tokens,
        "pack/over_cap": accounting.over_cap,
        "pack/truncated_tokens": accounting.truncated_tokens,
    }


def memory() -> dict[str, float]:
    """Return the resident bytes of this process and the peak bytes of its device, without those that are unknown."""
    found = {"perf/memory_bytes": resident_bytes()}
    import torch

    if torch.cuda.is_available():
        found["perf/device_bytes"] = float(torch.cuda.max_memory_allocated())
    return {name: value for name, value in found.items() if value}


def resident_bytes() -> float:
    """Return the resident bytes now, or the peak on systems without /proc."""
    try:
        with Path("/proc/self/statm").open(encoding="ascii") as file:
            return float(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return float(most if sys.platform == "darwin" else most * 1024)
