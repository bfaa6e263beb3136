"""A replay table: items held between generation and training, composed of a sampler, a remover and a limiter.

    Table = sampler (what is trained on next) + remover (what makes room) + limiter (which side waits)

A queue, uniform replay and prioritized replay are three choices of these parts, not three classes. Items are opaque and
held by reference; the table knows an item's key, priority, size and policy version. One lock protects everything; one
seeded generator makes every random choice.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterable, Mapping
from dataclasses import fields
from os import PathLike
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.arrays import MAX_PRIORITY
from penstock.config import build, signature_of
from penstock.errors import ConfigError, InvalidInput, shown
from penstock.protocol import seconds_of
from penstock.replay import table_checkpoint
from penstock.replay.batch import VERSION, Batch, Key
from penstock.replay.core import OnEvict, Store
from penstock.replay.drawing import Drawing
from penstock.replay.fair_wait import WaitQueue
from penstock.replay.limiters import Limiter
from penstock.replay.selector import Selector
from penstock.replay.table_checkpoint import Dump, Load
from penstock.replay.table_settings import Replay, Settings
from penstock.replay.windowed_fifo import DispatchIndex

if TYPE_CHECKING:
    from penstock.replay.table_keywords import TableKeywords

_KEY_TYPES = (str, int)
_MOST = 2**53
"""The largest size and version of an item. Larger ones do not fit a row, or their sums become inexact."""
_MAX_PRIORITY_BITS = np.float64(MAX_PRIORITY).view(np.uint64)


class Table:
    """Holds items between generation and training.

    The default is a queue: each item is sampled once, in order, and inserts wait while the table is full.

    >>> table = Table(capacity=2)
    >>> _ = table.insert("prompt-1", {"reward": 0.5}), table.insert("prompt-2", {"reward": 1.0})
    >>> table.sample(2).items.tolist()
    [{'reward': 0.5}, {'reward': 1.0}]
    >>> len(table)
    0

    Prioritized replay with reuse, keeping the thousand best items, dropping those four versions behind:

    >>> from penstock.replay import MinPriority, Prioritized
    >>> replay = Table(capacity=1000, sampler=Prioritized(0.6), remover=MinPriority(),
    ...                max_times_sampled=None, max_staleness=4, seed=17)
    """

    def __init__(self, *, on_evict: OnEvict | None = None, **settings: Unpack[TableKeywords]) -> None:
        """Settings are those of `Settings`. `on_evict(key, reason)` is called for every item that leaves. It runs under
        the table's lock, so it must be quick and must not call the table."""
        self._set_up(_store(build(Settings, settings, "Table"), on_evict))

    @classmethod
    def from_settings(cls, settings: Replay, *, on_evict: OnEvict | None = None) -> Table:
        """Build a table from a settings record."""
        table = cls.__new__(cls)
        values = {field.name: getattr(settings, field.name) for field in fields(settings)}
        table._set_up(_store(Settings(**values), on_evict))
        return table

    def _set_up(self, store: Store) -> None:
        self._store = store
        self._slots = store.slots
        limits = (store.settings.capacity_bytes, store.settings.capacity_tokens)
        self._most = tuple(_MOST if limit is None else min(limit, _MOST) for limit in limits)
        """The largest size of an item, in bytes and tokens."""
        self._closed = False
        self._lock = threading.Lock()
        self._inserters = WaitQueue(self._lock)
        self._samplers = WaitQueue(self._lock)

    @property
    def settings(self) -> Settings:
        return self._store.settings

    # -- in and out ----------------------------------------------------------------------------------------

    def insert(
        self,
        key: Key,
        item: Any,
        *,
        priority: float = 1.0,
        num_bytes: int = 0,
        num_tokens: int = 0,
        policy_version: int = 0,
        dispatch: int | None = None,
        timeout: float | None = None,
    ) -> int | None:
        """Store an item and return its handle, or None if it is already too stale ever to be sampled.

        Waits while the limiter holds inserts back, or while the table is full and has no remover. Raises WaitTimeout
        after `timeout` seconds (0 tries once). An item with the same key is replaced. `dispatch` is the number that
        `WindowedFifo` sorts by: when its generation began. Without one an item sorts behind those before it.
        """
        if not _is_priority(priority):
            _refuse_priority(f"insert({key!r}): priority", priority)
        if timeout is not None and (type(timeout) is not int or timeout):  # 0 is what planes pass
            timeout = seconds_of(timeout)
        most_bytes, most_tokens = self._most
        if not (
            type(num_bytes) is int is type(num_tokens)
            and 0 <= num_bytes <= most_bytes
            and 0 <= num_tokens <= most_tokens
        ):
            self._check_size(key, num_bytes, num_tokens)
        if type(policy_version) is not int or not -_MOST <= policy_version <= _MOST:
            policy_version = _whole(f"insert({key!r}): policy_version", policy_version, -_MOST, _MOST)
        if not isinstance(key, _KEY_TYPES):
            raise InvalidInput(f"insert: key {key!r} is a {type(key).__name__}; give a str or an int")
        store = self._store
        with self._lock:
            # Threads that already wait go first, even if there is room now: otherwise newcomers could starve them.
            if self._closed or self._inserters.turns or not store.may_insert(key, num_bytes, num_tokens):
                self._wait_to_insert(key, num_bytes, num_tokens, policy_version, timeout)
            if policy_version < store.oldest_version:
                store.counters.refused_stale += 1
                if dispatch is not None and isinstance(store.sampling, DispatchIndex):
                    store.sampling.unexpect(dispatch)
                return None
            handle = store.insert(key, item, priority, num_bytes, num_tokens, policy_version, dispatch)
            if self._samplers.turns:
                self._samplers.wake()
            return handle

    def sample(self, n: int, *, replace: bool = False, timeout: float | None = None) -> Batch:
        """Return exactly `n` items, distinct unless `replace`; never fewer.

        Waits until the limiter allows the batch and enough items are held. Raises WaitTimeout after `timeout` seconds
        (0 tries once), with nothing taken.
        """
        self._check_count(n, replace=replace)
        timeout = seconds_of(timeout)
        store = self._store
        with self._lock:
            if self._closed or self._samplers.turns or not store.may_sample(n, replace=replace):
                self._wait_to_sample(n, timeout, replace=replace)
            batch = store.sample(n, replace=replace)
            self._inserters.wake()
            return batch

    def drawing(self, *, undoable: bool) -> Drawing:
        """Draw items one at a time. No other thread may use the table until the drawing is taken or undone.

        `undoable` costs a copy of the sampler's state.
        """
        return Drawing(self._store, self._inserters.wake, undoable=undoable)

    @property
    def may_sample_all(self) -> bool:
        """Whether everything held may be sampled now, in one batch."""
        most = self.settings.limiter.max_batch
        return (most is None or most >= len(self)) and self.may_sample(len(self))

    def _check_size(self, key: Key, num_bytes: int, num_tokens: int) -> None:
        for name, size, most in zip(("num_bytes", "num_tokens"), (num_bytes, num_tokens), self._most, strict=True):
            _whole(f"insert({key!r}): {name}", size, 0, most)

    def _check_count(self, n: int, *, replace: bool) -> None:
        settings = self._store.settings
        most = settings.limiter.max_batch
        _whole("sample: n", n, -_MOST, _MOST)
        if n < 1 or (n > settings.capacity and not replace) or (most is not None and n > most):
            raise InvalidInput(
                f"sample: {n} items with capacity {settings.capacity} and {settings.limiter}; such a batch can "
                "never be filled"
            )
        if replace and settings.max_times_sampled is not None:
            raise InvalidInput(
                f"sample: replace=True could use an item more than max_times_sampled="
                f"{settings.max_times_sampled} times; sample without replacement, or set it to None"
            )

    def _wait_to_insert(
        self, key: Key, num_bytes: int, num_tokens: int, policy_version: int, timeout: float | None
    ) -> None:
        store = self._store

        def ready() -> bool:
            if policy_version < store.oldest_version or store.may_insert(key, num_bytes, num_tokens):
                return True
            if store.is_stuck(key):
                self._refuse_deadlock(key)
            return False

        def what() -> str:
            return f"insert({key!r}): {store.occupancy()}, {store.settings.limiter}; sample, or give a remover"

        self._inserters.wait(ready, closed=lambda: self._closed, timeout=timeout, what=what)

    def _refuse_deadlock(self, key: Key) -> None:
        limiter = self._store.settings.limiter
        raise ConfigError(
            f"insert({key!r}): full with {self._store.occupancy()}, yet {limiter} samples from "
            f"{limiter.min_size} items on; raise the limit, lower min_size or give a remover"
        )

    def _wait_to_sample(self, n: int, timeout: float | None, *, replace: bool) -> None:
        store = self._store
        self._samplers.wait(
            lambda: store.may_sample(n, replace=replace),
            closed=lambda: self._closed,
            timeout=timeout,
            what=lambda: f"sample({n}): {store.occupancy()}, {store.waits_for or store.settings.limiter}; insert more",
        )

    # -- changing what is held -----------------------------------------------------------------------------

    def update_priorities(self, priorities: Mapping[Key, float]) -> int:
        """Set priorities by key and return how many were applied. Keys no longer held are counted as stale."""
        for key, priority in priorities.items():
            if not _is_priority(priority):
                _refuse_priority(f"update_priorities: {key!r} has priority", priority)
        with self._lock:
            slot_of = self._slots.slot_of
            held = {slot_of[key]: priority for key, priority in priorities.items() if key in slot_of}
            slots = np.fromiter(held.keys(), dtype=np.int64, count=len(held))
            values = np.fromiter(held.values(), dtype=np.float64, count=len(held))
            self._store.update(slots, values, len(priorities) - len(held))
        return len(held)

    def update_handles(self, handles: NDArray[np.int64], priorities: ArrayLike) -> int:
        """Set priorities for aligned arrays of `Batch.handles`: faster, and exact even if a key was inserted again.

        Where a handle appears twice, as it may in a batch with replacement, its last priority counts.
        """
        values = np.asarray(priorities, dtype=np.float64)
        if values.ndim != 1 or values.shape != handles.shape:
            raise InvalidInput(
                f"update_handles: priorities {values.shape} for handles {handles.shape}; give one per handle"
            )
        # Viewed as unsigned bits, floats from 0 to MAX_PRIORITY come first, then larger ones, infinity, NaN and all
        # negatives. One maximum rules out all errors; only if it fails does the exact test run (-0.0 is valid).
        if len(values) and np.maximum.reduce(values.view(np.uint64)) > _MAX_PRIORITY_BITS:
            bad = np.flatnonzero(~((values >= 0.0) & (values <= MAX_PRIORITY)))
            if len(bad):
                _refuse_priority(f"update_handles: priorities[{bad[0]}]", values[bad[0]])
        with self._lock:
            slots, held = self._slots.find(handles)
            if np.count_nonzero(held) < len(held):
                slots, values = slots[held], values[held]
            self._store.update(slots, values, len(handles) - len(slots))
        return len(slots)

    def advance(self, policy_version: int) -> int:
        """Set the trainer's version. Evicts items that are now too stale and returns how many."""
        with self._lock:
            now = self._store.policy_version
            if policy_version < now:
                raise InvalidInput(f"advance: version {policy_version} after {now}; versions only grow")
            num_stale = self._store.advance(policy_version)
            self._inserters.wake()
        return num_stale

    def remove(self, keys: Iterable[Key]) -> int:
        """Remove items by key and return how many were held."""
        with self._lock:
            slot_of = self._slots.slot_of
            slots = [slot_of[key] for key in dict.fromkeys(keys) if key in slot_of]
            self._store.evict(slots, "removed")
            self._inserters.wake()
        return len(slots)

    def clear(self) -> int:
        """Remove everything and return how many items that was. Counters, version and generator stay."""
        with self._lock:
            slots = self._slots.live().tolist()
            self._store.evict(slots, "cleared")
            self._inserters.wake()
        return len(slots)

    def expect(self, dispatch: int) -> None:
        """Note that an item with this dispatch number is being generated. Only `WindowedFifo` waits for it."""
        with self._lock:
            if isinstance(self._store.sampling, DispatchIndex):
                self._store.sampling.expect(dispatch)

    def unexpect(self, dispatch: int) -> None:
        """Note that an expected item will not arrive."""
        with self._lock:
            if isinstance(self._store.sampling, DispatchIndex):
                self._store.sampling.unexpect(dispatch)
                self._samplers.wake()

    def close(self) -> None:
        """Wake every waiting thread with `Closed`. Inserts and samples raise it from now on."""
        with self._lock:
            self._closed = True
            self._inserters.wake()
            self._samplers.wake()

    # -- looking -------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: object) -> bool:
        return key in self._slots.slot_of

    def may_insert(self, *, ahead: int = 0) -> bool:
        """Return whether one more insert would pass without waiting, after `ahead` others that are still to come.

        Checks the limiter and the number of items, not bytes and tokens.
        """
        with self._lock:
            return self._store.has_room(ahead)

    def may_sample(self, n: int) -> bool:
        """Return whether a sample of `n` distinct items would pass without waiting."""
        with self._lock:
            return self._store.may_sample(n, replace=False)

    @property
    def waits_for(self) -> str:
        """What the sampler waits for although items are held, or ""."""
        with self._lock:
            return self._store.waits_for

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version held; None if the table is empty."""
        with self._lock:
            live = self._slots.live()
            return int(self._slots.rows[live, VERSION].min()) if len(live) else None

    def keys(self) -> list[Key]:
        """Return the keys held, oldest item first."""
        with self._lock:
            keys: list[Key] = self._slots.keys[self._slots.live()].tolist()
        return keys

    def metrics(self) -> dict[str, float]:
        """Return all counts of one moment: `gen/` what arrived, `buffer/` what is held, `train/` what was sampled."""
        with self._lock:
            store = self._store
            found = store.report()
            found["gen/wait_s"] = self._inserters.waited_s
            found["train/wait_s"] = self._samplers.waited_s
            found["buffer/waiting_inserts"] = len(self._inserters.turns)
            found["buffer/waiting_samples"] = len(self._samplers.turns)
        return found

    # -- keeping -------------------------------------------------------------------------------------------

    def checkpoint(self, path: str | PathLike[str], *, dump: Dump | None = None) -> None:
        """Write everything to a file, so that `restore` continues as if nothing had happened.

        Items must be bytes-like, or `dump` converts each to bytes. The lock is held only while references and numbers
        are copied, so items must not be changed in place once they are in a table.
        """
        with self._lock:
            snapshot = table_checkpoint.take(self._store)
        table_checkpoint.write(path, snapshot, dump)

    def to_bytes(self, *, dump: Dump | None = None) -> bytes:
        """Return the checkpoint as bytes, to be stored elsewhere."""
        with self._lock:
            snapshot = table_checkpoint.take(self._store)
        return table_checkpoint.to_bytes(snapshot, dump)

    @classmethod
    def restore(
        cls,
        source: str | PathLike[str] | bytes,
        *,
        load: Load | None = None,
        sampler: Selector | None = None,
        remover: Selector | None = None,
        limiter: Limiter | None = None,
        on_evict: OnEvict | None = None,
    ) -> Table:
        """Rebuild a table from a checkpoint's file or bytes: items, priorities, generator, counters.

        Without `load`, items are read-only views into the memory-mapped file. Parts of your own must be passed again;
        those of Penstock are rebuilt from the file.
        """
        table = cls.__new__(cls)
        parts = {"sampler": sampler, "remover": remover, "limiter": limiter}
        if isinstance(source, bytes):
            table._set_up(table_checkpoint.from_bytes(source, parts, load, on_evict))
        else:
            table._set_up(table_checkpoint.read(source, parts, load, on_evict))
        return table


Table.__init__.__signature__ = signature_of(Table.__init__, Settings)  # type: ignore[attr-defined]


def _is_priority(priority: Any) -> bool:
    try:
        return bool(0.0 <= priority <= MAX_PRIORITY)
    except (TypeError, ValueError):
        return False


def _whole(where: str, value: Any, least: int, most: int) -> int:
    """Return a whole number, also one of numpy's, or raise."""
    try:
        found = operator.index(value)
    except TypeError:
        found = least - 1
    if not least <= found <= most or isinstance(value, bool):
        raise InvalidInput(f"{where}: {shown(value)}; give a whole number from {least} to {most}")
    return found


def _refuse_priority(where: str, priority: object) -> None:
    raise InvalidInput(f"{where} {shown(priority)}; give a finite number from 0 to {MAX_PRIORITY:g}")


def _store(settings: Settings, on_evict: OnEvict | None) -> Store:
    try:
        return Store(settings, on_evict)
    except MemoryError:
        raise ConfigError(
            f"capacity: {settings.capacity}: not enough memory on this machine; lower it, or bound the table by "
            "capacity_bytes"
        ) from None
