"""A durable storage backend for TransferQueue, over a folder, a shared filesystem or an object store. No server.

`register()` adds the backend "Penstock" to TransferQueue in this process. Every process of a job needs it: use Ray's
`worker_process_setup_hook`. In verl it happens by itself (`verl_plugin.py`). Each process writes and reads the storage
itself, see `journal.py`. TransferQueue's controller, which is in memory, knows which keys exist and where their columns
are. After a crash `restore()` gives this to a new controller.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import ConfigError, CorruptFile, PlaneLost, UnknownKey
from penstock.integrations.transfer_queue.journal import (
    ClearNote,
    History,
    Journal,
    Kept,
    RowFront,
    Stamp,
    TagNote,
    begin,
    copy_rows,
    parse_place,
    read_history,
    save_copy,
)
from penstock.integrations.transfer_queue.typed_cells import (
    VALUE,
    Cell,
    cells_of,
    decode_value,
    encode_value,
    values_of,
)
from penstock.storage import FolderStorage, KeptStorage, address_of, is_object_url, open_storage

logger = logging.getLogger("penstock.transfer_queue")
NAME = "Penstock"
"""The value of `backend.storage_backend`."""
_ANSWER_S = 60.0
"""How long the controller may take to answer."""
_KEYS_AT_ONCE = 4096
_SAVED = "penstock"
"""The folder of a checkpoint that holds rows."""
_LAST_PUT: ContextVar[Any] = ContextVar("penstock_last_put", default=None)
"""The metadata of this task's last put. TransferQueue sets its tags right after it, which the put has saved already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What `restore` restored in the controller."""

    keys: int
    columns: int
    """Values of all keys."""
    dropped: int
    """Keys of a loaded checkpoint that were cleared after it was saved."""
    keyless: int
    """Rows that were put without a key. They are in the storage, but only a checkpoint can name them."""
    damaged: tuple[str, ...]
    """Pieces of the storage that could not be read: where, and why."""


def register() -> None:
    """Add the backend to TransferQueue in this process."""
    from transfer_queue.client import AsyncTransferQueueClient
    from transfer_queue.storage.bootstrap import StorageBootstrapProvider
    from transfer_queue.storage.managers.base import StorageManagerFactory

    if NAME not in StorageManagerFactory._registry:
        StorageBootstrapProvider.register_provider(NAME)(_start)
        StorageManagerFactory.register(NAME)(_manager_class())
        _extend(AsyncTransferQueueClient)


def restore() -> Restored:
    """Give the controller every acknowledged key, tag and column back. Call it after `tq.init`, before others put."""
    import transfer_queue as tq

    manager = tq.get_client().storage_manager
    found: Restored = asyncio.run_coroutine_threadsafe(manager.restore(), manager._notify_loop).result()
    return found


def _extend(client: Any) -> None:
    """Report two calls to the storage manager that TransferQueue's client makes to the controller only."""
    set_tags, load = client.async_set_custom_meta, client.async_load_controller_checkpoint

    @functools.wraps(set_tags)
    async def async_set_custom_meta(self: Any, metadata: Any, *args: Any, **keywords: Any) -> Any:
        if isinstance(getattr(self, "storage_manager", None), _Storage):
            await self.storage_manager.save_tags(metadata)
        return await set_tags(self, metadata, *args, **keywords)

    @functools.wraps(load)
    async def async_load_controller_checkpoint(self: Any, *args: Any, **keywords: Any) -> Any:
        found = await load(self, *args, **keywords)
        if isinstance(getattr(self, "storage_manager", None), _Storage) and self.storage_manager.restores:
            await self.storage_manager.restore()
        return found

    client.async_set_custom_meta = async_set_custom_meta
    client.async_load_controller_checkpoint = async_load_controller_checkpoint


def _start(conf: Any) -> dict[str, Any]:
    """Take the storage for this job, and restore what earlier ones left if `restore` is set. Runs once per job."""
    settings = conf.backend[NAME]
    unknown = sorted(set(settings) - {"storage", "restore", "epoch"})
    if unknown:
        raise ConfigError(f"backend.{NAME}: unknown {', '.join(unknown)}; the settings are storage and restore")
    address = settings.get("storage")
    if not address or not (is_object_url(address) or Path(address).is_absolute()):
        raise ConfigError(
            f"backend.{NAME}.storage: {address!r}; give the absolute path of a folder that all nodes see, or the URL "
            "of an object store, one for each run"
        )
    settings.storage = address_of(address)
    settings.epoch = begin(open_storage(settings.storage))
    if settings.get("restore"):
        manager = _manager_class()(conf.controller.zmq_info, settings)
        try:
            asyncio.run_coroutine_threadsafe(manager.restore(), manager._notify_loop).result()
        finally:
            manager.close()
    return {}


class _Storage:
    """A storage manager's methods for TransferQueue."""

    journal: Journal
    restores: bool
    """Whether the journal, and not a checkpoint, says what the controller should know after a restart."""
    # Of TransferQueue's StorageManager:
    notify_data_update: Callable[..., Any]
    notify_pool: Any
    controller_info: Any
    storage_manager_id: str
    _notify_loop: asyncio.AbstractEventLoop

    # -------------------------------------------------------------- rows

    async def put_data(self, data: Any, metadata: Any, data_parser: Any = None) -> None:
        from transfer_queue.metadata import extract_field_schema

        if data_parser is not None:
            raise NotImplementedError(f"{NAME} stores what it is given; parse before the put")
        if metadata.size == 0:
            return
        partition, indexes = metadata.partition_ids[0], list(metadata.global_indexes)
        (keys, stamp), columns = await asyncio.gather(
            self._keys(partition, indexes), asyncio.to_thread(_encoded, data, len(indexes))
        )
        rows = []
        for i, key in enumerate(keys):
            tag = encode_value(metadata.custom_meta[i], f"tags[{i}]")
            cells = {name: column[0][i] for name, column in columns.items()}
            rows.append((RowFront(partition, key, stamp, tag, cells), [pieces[i] for _, pieces in columns.values()]))
        places = await asyncio.wrap_future(self.journal.write_rows(rows))
        for known, new in zip(metadata._custom_backend_meta, places, strict=True):
            known.update(new)
        await self.notify_data_update(
            partition, indexes, extract_field_schema(data), dict(zip(indexes, places, strict=True))
        )
        _LAST_PUT.set(metadata)

    async def get_data(self, metadata: Any) -> Any:
        from tensordict import TensorDict

        rows, names = metadata.size, list(metadata.field_names)
        if not rows or not names:
            return TensorDict({}, batch_size=rows)
        places = {name: [self._place(metadata, i, name) for i in range(rows)] for name in names}
        found = await asyncio.to_thread(read_columns, self.journal.storage, places)
        return TensorDict(found, batch_size=rows)

    def _place(self, metadata: Any, i: int, name: str) -> str:
        found: str | None = metadata._custom_backend_meta[i].get(name)
        if found is None:
            raise UnknownKey(
                f"row {metadata.global_indexes[i]}: no column {name!r}; ask for its metadata after the put"
            )
        return found

    async def save_tags(self, metadata: Any) -> None:
        """Save the tags of rows that exist. Called before the controller gets them."""
        if metadata is _LAST_PUT.get():  # saved with the rows
            _LAST_PUT.set(None)
            return
        for partition, places in _by_partition(metadata).items():
            keys, stamp = await self._keys(partition, [metadata.global_indexes[i] for i in places])
            tags = {
                key: encode_value(metadata.custom_meta[i], f"tags[{i}]")
                for i, key in zip(places, keys, strict=True)
                if key is not None
            }
            if tags:
                await asyncio.wrap_future(self.journal.write_note(TagNote(partition, stamp, tags)))

    async def clear_data(self, metadata: Any) -> None:
        for partition, places in _by_partition(metadata).items():
            keys, stamp = await self._keys(partition, [metadata.global_indexes[i] for i in places])
            rows = sorted({text.split(" ", 1)[0] for i in places for text in metadata._custom_backend_meta[i].values()})
            note = ClearNote(partition, stamp, [key for key in keys if key is not None], rows)
            await asyncio.wrap_future(self.journal.write_note(note))
            self.journal.free(rows)

    # -------------------------------------------------------------- the controller

    async def ask(self, request: str, answer: str, **body: Any) -> Any:
        """Make a request to the controller, on the loop that its sockets belong to. Returns the message it answers."""
        from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQRequestType

        async def exchange() -> Any:
            async with self.notify_pool.alease(self.controller_info) as socket:
                sent = ZMQMessage.create(ZMQRequestType[request], self.storage_manager_id, body)
                await socket.send_multipart(sent.serialize())
                return ZMQMessage.deserialize(await asyncio.wait_for(socket.recv_multipart(copy=False), _ANSWER_S))

        try:
            found = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(exchange(), self._notify_loop))
        except TimeoutError:
            raise PlaneLost(f"TransferQueue's controller: no answer to {request} within {_ANSWER_S:g} s") from None
        if found.request_type != ZMQRequestType[answer] or not found.body.get("success", True):
            raise PlaneLost(f"TransferQueue's controller: {request} failed: {found.body.get('message', found.body)}")
        return found

    async def _keys(self, partition: str, indexes: Sequence[int]) -> tuple[list[str | None], Stamp]:
        """Return the keys of rows, and the stamp of a change to them."""
        found = await self.ask(
            "KV_RETRIEVE_KEYS", "KV_RETRIEVE_KEYS_RESPONSE", global_indexes=list(indexes), partition_id=partition
        )
        keys = found.body["keys"] or [None] * len(indexes)
        return keys, (self.journal.epoch, found.timestamp)

    async def restore(self) -> Restored:
        """Make the controller know exactly what the journal knows. Then delete what is no longer needed."""
        journal = self.journal
        history = await asyncio.to_thread(read_history, journal.storage)
        for partition, keys in history.rows.items():
            names = sorted(keys)
            for first in range(0, len(names), _KEYS_AT_ONCE):
                await self._announce(partition, {name: keys[name] for name in names[first : first + _KEYS_AT_ONCE]})
        dropped = await self._drop_others(history)
        # Of earlier jobs only: processes of this one may be putting, and what they put counts after the snapshot.
        earlier = history.replayed(before=journal.epoch)
        await asyncio.wrap_future(journal.write_snapshot((journal.epoch, 0.0), earlier.rows))
        await asyncio.to_thread(journal.storage.delete, history.dead(journal.epoch))
        found = Restored(
            keys=sum(map(len, history.rows.values())),
            columns=sum(len(kept.columns) for keys in history.rows.values() for kept in keys.values()),
            dropped=dropped,
            keyless=len(history.keyless),
            damaged=tuple(history.damaged),
        )
        logger.log(logging.WARNING if found.damaged else logging.INFO, "%s: %s", journal.storage.url, found)
        return found

    async def _announce(self, partition: str, keys: dict[str, Kept]) -> None:
        """Give the controller keys with their tags, and where their columns are."""
        found = await self.ask(
            "KV_RETRIEVE_META", "KV_RETRIEVE_META_RESPONSE", keys=list(keys), partition_id=partition, create=True
        )
        indexes = dict(zip(keys, found.body["metadata"].global_indexes, strict=True))
        tags = {indexes[key]: decode_value(kept.tag) for key, kept in keys.items()}
        await self.ask("SET_CUSTOM_META", "SET_CUSTOM_META_RESPONSE", partition_custom_meta={partition: tags})
        alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for key, kept in keys.items():
            alike[tuple(sorted(kept.columns))].append(key)
        for names, some in alike.items():
            if names:
                await self.ask(
                    "NOTIFY_DATA_UPDATE",
                    "NOTIFY_DATA_UPDATE_ACK",
                    partition_id=partition,
                    global_indexes=[indexes[key] for key in some],
                    field_schema={
                        name: _schema({indexes[key]: keys[key].columns[name] for key in some}) for name in names
                    },
                    custom_backend_meta={indexes[key]: keys[key].columns for key in some},
                )

    async def _drop_others(self, history: History) -> int:
        """Remove keys from the controller that the journal does not have: a loaded checkpoint is older than a clear."""
        found = (await self.ask("KV_LIST", "KV_LIST_RESPONSE", partition_id=None)).body["partition_info"]
        count = 0
        for partition, keys in found.items():
            others = sorted(set(keys) - history.rows.get(partition, {}).keys())
            if others:
                answer = await self.ask(
                    "KV_RETRIEVE_META", "KV_RETRIEVE_META_RESPONSE", keys=others, partition_id=partition, create=False
                )
                meta = answer.body["metadata"]
                body = {"global_indexes": meta.global_indexes, "partition_ids": meta.partition_ids}
                await self.ask("CLEAR_META", "CLEAR_META_RESPONSE", **body)
                count += len(others)
        return count

    # -------------------------------------------------------------- checkpoints

    async def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Copy all rows into a checkpoint, unless they stay in an object store or the job restores.

        NotImplementedError tells TransferQueue that the checkpoint holds no rows.
        """
        storage = self.journal.storage
        if self.restores or not isinstance(storage, FolderStorage):
            raise NotImplementedError(f"{NAME}: the rows stay in {storage.url}")
        history = await asyncio.to_thread(read_history, storage)
        await asyncio.to_thread(save_copy, history, storage, Path(checkpoint_dir) / _SAVED)

    async def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Make the storage hold what a checkpoint does. The controller's own checkpoint names the same places."""
        storage, folder = self.journal.storage, Path(checkpoint_dir) / _SAVED
        if not isinstance(storage, FolderStorage):
            raise ConfigError(f"{folder}: rows that were saved from a folder; {storage.url} is an object store")
        if not folder.is_dir():
            raise CorruptFile(f"{folder}: missing; the checkpoint was saved by another backend; nothing was loaded")
        source = FolderStorage(folder, create=False)
        saved = await asyncio.to_thread(read_history, source)
        if saved.damaged:
            raise CorruptFile(f"{saved.damaged[0]}; nothing was loaded")
        await asyncio.to_thread(copy_rows, saved, source, storage)
        answer = await self.ask("GET_LIST_PARTITIONS", "LIST_PARTITIONS_RESPONSE")
        await asyncio.wrap_future(self.journal.write_snapshot((self.journal.epoch, answer.timestamp), saved.rows))


@functools.cache
def _manager_class() -> type:
    from transfer_queue.storage.managers.base import StorageManager

    class PenstockStorageManager(_Storage, StorageManager):  # type: ignore[misc, unused-ignore]
        """The backend "Penstock"."""

        def __init__(self, controller_info: Any, config: Any, zmq_context: Any = None) -> None:  # noqa: ARG002
            StorageManager.__init__(self, controller_info, config)
            self.journal = Journal(open_storage(config["storage"], create=False), int(config["epoch"]))
            self.restores = bool(config.get("restore"))

        def close(self) -> None:
            if hasattr(self, "journal"):
                self.journal.close()
            super().close()

    return PenstockStorageManager


def _by_partition(metadata: Any) -> dict[str, list[int]]:
    """Return partition -> positions of its rows in a batch."""
    found: dict[str, list[int]] = defaultdict(list)
    for i, partition in enumerate(metadata.partition_ids):
        found[partition].append(i)
    return found


def _encoded(data: Any, rows: int) -> dict[str, tuple[list[Cell], list[Any]]]:
    return {name: cells_of(name, data[name], rows) for name in sorted(data.keys())}


def read_columns(storage: KeptStorage, columns: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Read columns, given the place of each row's value. Reads all bytes with one call, into one buffer per column."""
    wanted, found = [], {}
    for name, texts in columns.items():
        places = [parse_place(text) for text in texts]
        data = np.empty(sum(place.cell.size for place in places), np.uint8)
        view, at = data.data, 0
        for place in places:
            wanted.append((place.location, place.start, view[at : at + place.cell.size]))
            at += place.cell.size
        found[name] = ([place.cell for place in places], data)
    storage.read_into(sorted(wanted, key=lambda one: (one[0].segment, one[1])))
    return {name: values_of(cells, data) for name, (cells, data) in found.items()}


def _schema(texts: Mapping[int, str]) -> dict[str, Any]:
    """Describe a column to the controller as TransferQueue does at a put, given the place of each row's value."""
    import torch

    cells = {index: parse_place(text).cell for index, text in texts.items()}
    first = next(iter(cells.values()))
    if first.kind == VALUE:
        return {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}
    is_nested = any(cell.is_ragged for cell in cells.values()) or len({cell.shape for cell in cells.values()}) > 1
    found = {"dtype": getattr(torch, first.kind), "shape": torch.Size(first.shape), "is_nested": is_nested}
    shapes = {"per_sample_shapes": {index: cell.shape for index, cell in cells.items()}} if is_nested else {}
    return {**found, "is_non_tensor": False, **shapes}
