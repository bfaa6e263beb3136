"""A durable storage backend for TransferQueue: puts are on disk, in folders of columns.

`register()` adds the backend "Penstock" to TransferQueue in this process. Every process of a job needs it: use Ray's
`worker_process_setup_hook`; in verl it happens by itself (`verl_plugin.py`). The storage units are Ray actors. Ray
restarts them when they die, and what they had acknowledged is in their folder. TransferQueue's controller knows which
keys exist, and its checkpoints store that.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.integrations.transfer_queue.column_store import Cells
from penstock.integrations.transfer_queue.column_unit import (
    Clear,
    Get,
    Load,
    Put,
    Request,
    Save,
    Unit,
    UnitConnection,
    Where,
)
from penstock.integrations.transfer_queue.typed_cells import cells_of, values_of

NAME = "Penstock"
"""The value of `backend.storage_backend`."""
_NAMESPACE = "transfer_queue"
_TIMEOUT_S = 300.0


def register() -> None:
    """Add the backend to TransferQueue in this process."""
    from transfer_queue.storage.bootstrap import StorageBootstrapProvider
    from transfer_queue.storage.managers.base import StorageManagerFactory

    if NAME not in StorageManagerFactory._registry:
        StorageBootstrapProvider.register_provider(NAME)(start_units)
        StorageManagerFactory.register(NAME)(_manager_class())


def start_units(conf: Any) -> dict[str, Any]:
    """Start the storage units. Settings in `backend.Penstock`: `folder`, `checkpoints`, `num_units`, `timeout_s`."""
    import ray
    from transfer_queue.utils.common import get_node_round_robin_scheduling_strategies

    settings = conf.backend[NAME]
    folder, units = settings.get("folder"), int(settings.get("num_units") or 1)
    if not folder or not Path(folder).is_absolute():
        raise ConfigError(f"backend.{NAME}.folder: {folder!r}; give the absolute path of a folder, one for each run")
    checkpoints = settings.get("checkpoints")
    if checkpoints and not Path(checkpoints).is_absolute():
        raise ConfigError(f"backend.{NAME}.checkpoints: {checkpoints!r}; give the absolute path of a folder")
    places = get_node_round_robin_scheduling_strategies(units)
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(_UnitActor)
    handles = {
        name: actor.options(name=name, namespace=_NAMESPACE, scheduling_strategy=places[i]).remote(
            folder, checkpoints or folder, i, units
        )
        for i, name in enumerate(_names(units))
    }
    ray.get([handle.where.remote() for handle in handles.values()])
    settings.num_units = units
    return handles


def _names(units: int) -> list[str]:
    return [f"PenstockUnit#{i}" for i in range(units)]


class _UnitActor:
    """A storage unit in a Ray actor. After a restart it serves what is in its folder."""

    def __init__(self, folder: str, checkpoints: str, unit: int, units: int) -> None:
        import ray

        host = ray.util.get_node_ip_address()
        self._unit = Unit(
            Path(folder) / f"unit-{unit}",
            host=host,
            unit=unit,
            units=units,
            saves_under=checkpoints,
            on_failure=lambda: os._exit(1),  # Ray restarts it
        )

    def where(self) -> Where:
        return self._unit.where


def _locator(name: str) -> Callable[[float], Where | None]:
    """Return a function that finds a unit's address; None while Ray restarts it."""

    def locate(timeout_s: float) -> Where | None:
        import ray

        try:
            handle = ray.get_actor(name, namespace=_NAMESPACE)
            found: Where = tuple(ray.get(handle.where.remote(), timeout=timeout_s))
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return None
        return found

    return locate


class UnitConnections:
    """Connections to all units: one per unit and thread, because a ZeroMQ socket belongs to one thread."""

    def __init__(self, names: Sequence[str], timeout_s: float) -> None:
        self._locators = [_locator(name) for name in names]
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(2 * len(names) + 2, thread_name_prefix="penstock-units")
        self._own = threading.local()
        self._all: list[UnitConnection] = []
        self.units = len(names)

    async def ask(self, unit: int, request: Request, data: Sequence[Any] = ()) -> tuple[tuple[Cells, ...], list[Any]]:
        answer: tuple[tuple[Cells, ...], list[Any]] = await self.beside(self.ask_now, unit, request, data)
        return answer

    async def beside(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, functools.partial(work, *arguments))

    def ask_now(self, unit: int, request: Request, data: Sequence[Any]) -> tuple[tuple[Cells, ...], list[Any]]:
        connections: dict[int, UnitConnection] = self._own.__dict__.setdefault("connections", {})
        if unit not in connections:
            connections[unit] = UnitConnection(self._locators[unit], timeout_s=self._timeout_s)
            self._all.append(connections[unit])
        return connections[unit].ask(request, data)

    def shared(self, rows: Sequence[int]) -> dict[int, list[int]]:
        """Return unit -> positions of its rows. A row always belongs to the same unit.

        Rows 4, 7, 8 over 2 units: unit 0 has positions [0, 2], unit 1 has [1].
        """
        found: dict[int, list[int]] = defaultdict(list)
        for position, row in enumerate(rows):
            found[row % self.units].append(position)
        return found

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        while self._all:
            self._all.pop().close()


class _Storage:
    """A backend's methods for TransferQueue. Its `StorageManager` reports puts to the controller."""

    _connections: UnitConnections
    notify_data_update: Callable[..., Any]

    async def put_data(self, data: Any, metadata: Any, data_parser: Any = None) -> None:
        from transfer_queue.metadata import extract_field_schema

        if data_parser is not None:
            raise NotImplementedError(f"{NAME} stores what it is given; parse before the put")
        if metadata.size == 0:
            return
        rows = list(metadata.global_indexes)
        shares = self._connections.shared(rows)
        await asyncio.gather(
            *(self._connections.beside(self._put, unit, data, rows, places) for unit, places in shares.items())
        )
        await self.notify_data_update(metadata.partition_ids[0], rows, extract_field_schema(data))

    def _put(self, unit: int, data: Any, rows: list[int], places: list[int]) -> None:
        columns = [cells_of(name, _selected(data[name], places, len(rows))) for name in sorted(data.keys())]
        request = Put(tuple(rows[place] for place in places), tuple(cells for cells, _ in columns))
        self._connections.ask_now(unit, request, [content for _, content in columns])

    async def get_data(self, metadata: Any) -> Any:
        from tensordict import TensorDict

        rows, names = list(metadata.global_indexes), list(metadata.field_names)
        if not rows or not names:
            return TensorDict({}, batch_size=len(rows))
        shares = self._connections.shared(rows)
        asked = (
            self._connections.ask(unit, Get(tuple(rows[place] for place in places), tuple(names)))
            for unit, places in shares.items()
        )
        answers = await asyncio.gather(*asked)
        found = await self._connections.beside(_joined, list(shares.values()), answers, len(rows))
        return TensorDict(found, batch_size=len(rows))

    async def clear_data(self, metadata: Any) -> None:
        rows = list(metadata.global_indexes)
        asked = (
            self._connections.ask(unit, Clear(tuple(rows[place] for place in places)))
            for unit, places in self._connections.shared(rows).items()
        )
        await asyncio.gather(*asked)

    async def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Have every unit write its data into its own folder."""
        await self._each(lambda unit: Save(str(_saved(checkpoint_dir, unit, self._connections.units))))

    async def load_checkpoint(self, checkpoint_dir: str) -> None:
        found = sorted(path.name for path in Path(checkpoint_dir).glob("penstock-*"))
        wanted = [_saved(checkpoint_dir, unit, self._connections.units).name for unit in range(self._connections.units)]
        if found != sorted(wanted):
            raise ConfigError(f"{checkpoint_dir}: saved {found}; {self._connections.units} units need {wanted}")
        await self._each(lambda unit: Load(str(_saved(checkpoint_dir, unit, self._connections.units))))

    async def _each(self, request: Callable[[int], Request]) -> None:
        await asyncio.gather(*(self._connections.ask(unit, request(unit)) for unit in range(self._connections.units)))


@functools.cache
def _manager_class() -> type:
    from transfer_queue.storage.managers.base import StorageManager

    class PenstockStorageManager(_Storage, StorageManager):  # type: ignore[misc, unused-ignore]
        """The backend "Penstock"."""

        def __init__(self, controller_info: Any, config: Any, zmq_context: Any = None) -> None:  # noqa: ARG002
            StorageManager.__init__(self, controller_info, config)
            timeout_s = float(config.get("timeout_s") or _TIMEOUT_S)
            self._connections = UnitConnections(_names(int(config.get("num_units") or 1)), timeout_s)

        def close(self) -> None:
            if hasattr(self, "_connections"):
                self._connections.close()
            super().close()

    return PenstockStorageManager


def _saved(folder: str, unit: int, units: int) -> Path:
    return Path(folder).absolute() / f"penstock-{unit}-of-{units}"


def _selected(column: Any, places: list[int], rows: int) -> Any:
    """Select rows of a column. Copies only if the positions are not evenly spaced: 0 2 4 is the view [0:5:2]."""
    import torch

    if isinstance(column, torch.Tensor) and not column.is_nested:
        if len(places) == rows:
            return column
        step = places[1] - places[0] if len(places) > 1 else 1
        if places == list(range(places[0], places[0] + step * len(places), step)):
            return column[places[0] : places[-1] + 1 : step]
        return column[torch.tensor(places)]
    values = column.unbind() if isinstance(column, torch.Tensor) else column.tolist()
    return [values[place] for place in places]


def _joined(
    places: list[list[int]], answers: Sequence[tuple[tuple[Cells, ...], list[Any]]], rows: int
) -> dict[str, Any]:
    """Join the answers of several units into columns, in the requested order of rows."""
    if len(answers) == 1:
        columns, data = answers[0]
        return {cells.name: values_of(cells, content, rows) for cells, content in zip(columns, data, strict=True)}
    found: dict[str, Any] = {}
    for k, cells in enumerate(answers[0][0]):
        parts = [(answer[0][k], answer[1][k]) for answer in answers]
        found[cells.name] = values_of(*_merged(parts, places, rows), rows)
    return found


def _merged(parts: list[tuple[Cells, Any]], places: list[list[int]], rows: int) -> tuple[Cells, bytes]:
    kinds, shapes, pieces = [""] * rows, [()] * rows, [b""] * rows  # type: list[str], list[tuple[int, ...]], list[Any]
    for (cells, content), own in zip(parts, places, strict=True):
        view, at = memoryview(content), 0
        for i, (place, size) in enumerate(zip(own, cells.all_sizes(len(own)).tolist(), strict=True)):
            kinds[place] = cells.kinds[i if len(cells.kinds) > 1 else 0]
            shapes[place] = cells.shapes[i if len(cells.shapes) > 1 else 0]
            pieces[place], at = view[at : at + size], at + size
    alike = (kinds[0],) if len(set(kinds)) == 1 else tuple(kinds)
    name = parts[0][0].name
    return Cells(name=name, kinds=alike, shapes=tuple(shapes), sizes=tuple(map(len, pieces))), b"".join(pieces)
