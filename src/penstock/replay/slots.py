"""A table's items in a fixed number of slots, with handles that never name the wrong item.

A slot is a small integer that selectors work with; it is reused when its item has gone. A handle is `arrival << bits |
slot` and unique forever. With 4 bits, item 9 in slot 3 has handle 147. If a priority arrives for an item that has left,
no slot holds its handle any more: one vectorised comparison finds all such stale updates. Handles also sort by arrival,
so an item's age needs no column.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

Key = str | int
"""The caller's name for an item."""

VERSION, TIMES, BYTES, TOKENS = range(4)
"""Columns of a row. One row per slot, not one array per column: a draw touches one cache line per item."""

WIDTH = 4
_ROW = Struct(f"{WIDTH}q")

FREE = -1
"""The handle of an empty slot."""


class Slots:
    def __init__(self, capacity: int) -> None:
        self.bits = max(1, (capacity - 1).bit_length())
        self._mask = (1 << self.bits) - 1
        self.rows: NDArray[np.int64] = np.zeros((capacity, WIDTH), dtype=np.int64)
        # Separate from the rows: finding 512 of a million handles takes 7 us here, 12 us in a column of the rows.
        self.handles: NDArray[np.int64] = np.full(capacity, FREE, dtype=np.int64)
        # Memoryviews for single reads and writes, which take longer through numpy.
        self._cells, self._handles = self.rows.data, self.handles.data
        # An object array, not lists: gathering 512 of a million with `take` costs a third of a list's loop. Key
        # and item side by side: both are gathered in 53 us, from two arrays it takes 95 us.
        self._pairs: NDArray[np.object_] = np.empty((capacity, 2), dtype=object)
        self._addresses: NDArray[np.intp] = np.frombuffer(self._pairs, dtype=np.intp).reshape(capacity, 2)
        self.keys, self.items = self._pairs[:, 0], self._pairs[:, 1]
        self.slot_of: dict[Key, int] = {}
        self.num_bytes = 0
        self.num_tokens = 0
        self.num_used = 0
        """Slots 0 .. num_used - 1 have been in use at some time."""
        self.free: list[int] = []

    def __len__(self) -> int:
        return len(self.slot_of)

    def put(self, key: Key, item: Any, arrival: int, version: int, num_bytes: int, num_tokens: int) -> tuple[int, int]:
        """Store an item under a key that is not in use. Returns its slot and handle."""
        if self.free:
            slot = self.free.pop()
        else:
            slot = self.num_used
            self.num_used += 1
        handle = arrival << self.bits | slot
        self.keys[slot] = key
        self.items[slot] = item
        self.slot_of[key] = slot
        self._handles[slot] = handle
        # One call for all four columns takes 0.4 of the time of one assignment each.
        _ROW.pack_into(self._cells, slot * _ROW.size, version, 0, num_bytes, num_tokens)
        self.num_bytes += num_bytes
        self.num_tokens += num_tokens
        return slot, handle

    def drop(self, slot: int) -> tuple[Key, int]:
        """Empty a slot in use. Returns its key, and how often its item was sampled."""
        key: Key = self.keys[slot]
        _, times, num_bytes, num_tokens = _ROW.unpack_from(self._cells, slot * _ROW.size)
        self._handles[slot] = FREE
        self.num_bytes -= num_bytes
        self.num_tokens -= num_tokens
        self.items[slot] = None  # the key may stay, the item's memory may not
        del self.slot_of[key]
        self.free.append(slot)
        return key, times

    def sizes(self, slot: int) -> tuple[int, int]:
        """Return bytes and tokens of the item in a slot."""
        num_bytes, num_tokens = _ROW.unpack_from(self._cells, slot * _ROW.size)[BYTES:]
        return num_bytes, num_tokens

    def gather(self, slots: NDArray[np.int64]) -> tuple[NDArray[np.object_], NDArray[np.int64], NDArray[np.int64]]:
        """Return copies for slots in use: [n, 2] keys and items, [n] handles, [n, WIDTH] rows."""
        # A prefetch: reading the object addresses as plain numbers loads many cache lines at a time. Without this line
        # the next `take` waits for each address in turn: 53 us instead of 41 us.
        self._addresses.take(slots, axis=0)
        return self._pairs.take(slots, axis=0), self.handles.take(slots), self.rows.take(slots, axis=0)

    def find(self, handles: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the slots that handles name, and whether each still holds exactly that item."""
        slots = handles & self._mask
        # Handle 147 above means slot 3. If slot 3 now holds arrival 20, its handle is 323: not equal, so the item is
        # gone. A made-up handle may name a slot beyond the table: "clip" compares it with the last slot instead of
        # raising.
        held = self.handles.take(slots, mode="clip") == handles
        held &= handles >= 0
        return slots, held

    def live(self) -> NDArray[np.int64]:
        """Return slots in use, oldest item first."""
        handles = self.handles[: self.num_used]
        slots = np.flatnonzero(handles != FREE)
        return slots[np.argsort(handles[slots], kind="stable")]

    def table(self) -> NDArray[np.int64]:
        """Return a copy of every slot's handle and row, [num_used, 1 + WIDTH]."""
        return np.column_stack((self.handles[: self.num_used], self.rows[: self.num_used]))

    def restore(self, table: NDArray[np.int64], free: Sequence[int], keys: Sequence[Key], items: Sequence[Any]) -> None:
        """Fill empty slots from a checkpoint. Keys and items belong to the slots in use, in order of slot."""
        handles, rows = table[:, 0], table[:, 1:]
        self.num_used = len(table)
        self.handles[: self.num_used] = handles
        self.rows[: self.num_used] = rows
        self.free = list(free)
        slots = np.flatnonzero(handles != FREE)
        for slot, key, item in zip(slots.tolist(), keys, items, strict=True):
            self.keys[slot] = key
            self.items[slot] = item
            self.slot_of[key] = slot
        self.num_bytes = int(rows[slots, BYTES].sum())
        self.num_tokens = int(rows[slots, TOKENS].sum())
