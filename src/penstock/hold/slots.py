"""Where a table keeps its items: a fixed number of slots, and handles that never name the wrong one.

A slot is a small integer that selectors work with; it is reused when its item has gone. A handle is
`arrival << bits | slot`, unique for ever: a priority that comes back for an item that has left names a
handle no slot holds any more, and is recognised as stale in one vectorised comparison. Handles also sort by
arrival, so an item's age needs no column of its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

Key = str | int
"""What the caller names an item by."""

HANDLE, VERSION, TIMES, BYTES, TOKENS = range(5)
"""Columns of a row. One row per slot, not one array per column: a draw touches one cache line per item."""

WIDTH = 5
_ROW = Struct(f"{WIDTH}q")

FREE = -1
"""In the handle column: no item here."""


class Slots:
    def __init__(self, capacity: int) -> None:
        self.bits = max(1, (capacity - 1).bit_length())
        self._mask = (1 << self.bits) - 1
        # array.array for single reads and writes (numpy takes longer), viewed by numpy for the rest.
        self._cells = array("q", bytes(8 * WIDTH * capacity))
        self._flat = np.frombuffer(self._cells, dtype=np.int64)
        self.rows: NDArray[np.int64] = self._flat.reshape(capacity, WIDTH)
        self.rows[:, HANDLE] = FREE
        # Object arrays, not lists: gathering 512 of a million with `take` costs a third of a list's loop.
        self.keys: NDArray[np.object_] = np.empty(capacity, dtype=object)
        self.items: NDArray[np.object_] = np.empty(capacity, dtype=object)
        self.slot_of: dict[Key, int] = {}
        self.num_bytes = 0
        self.num_tokens = 0
        self.num_used = 0
        """Slots 0 .. num_used - 1 have been in use at some time."""
        self.free: list[int] = []

    def __len__(self) -> int:
        return len(self.slot_of)

    def put(self, key: Key, item: Any, arrival: int, version: int, num_bytes: int, num_tokens: int) -> tuple[int, int]:
        """Store an item under a key that is not in use; its slot and handle."""
        if self.free:
            slot = self.free.pop()
        else:
            slot = self.num_used
            self.num_used += 1
        handle = arrival << self.bits | slot
        self.keys[slot] = key
        self.items[slot] = item
        self.slot_of[key] = slot
        # One call for the whole row takes 0.4 of the time of five assignments.
        _ROW.pack_into(self._cells, slot * _ROW.size, handle, version, 0, num_bytes, num_tokens)
        self.num_bytes += num_bytes
        self.num_tokens += num_tokens
        return slot, handle

    def drop(self, slot: int) -> tuple[Key, int]:
        """Empty a slot in use; the key it had, and how often it was sampled."""
        key: Key = self.keys[slot]
        cells, start = self._cells, slot * WIDTH
        cells[start] = FREE
        self.num_bytes -= cells[start + BYTES]
        self.num_tokens -= cells[start + TOKENS]
        self.items[slot] = None  # the key may stay, the item's memory may not
        del self.slot_of[key]
        self.free.append(slot)
        return key, cells[start + TIMES]

    def sizes(self, slot: int) -> tuple[int, int]:
        """Bytes and tokens of the item in a slot."""
        start = slot * WIDTH
        return self._cells[start + BYTES], self._cells[start + TOKENS]

    def find(self, handles: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The slots that handles name, and whether each still holds that very item."""
        slots = handles & self._mask
        # The flat view: `take` on a strided column would first copy the whole column.
        held = self._flat.take(slots * WIDTH, mode="clip") == handles
        held &= handles >= 0
        return slots, held

    def live(self) -> NDArray[np.int64]:
        """Slots in use, oldest item first."""
        handles = self.rows[: self.num_used, HANDLE]
        slots = np.flatnonzero(handles != FREE)
        return slots[np.argsort(handles[slots], kind="stable")]

    def restore(self, rows: NDArray[np.int64], free: Sequence[int], keys: Sequence[Key], items: Sequence[Any]) -> None:
        """Fill empty slots again; keys and items belong to the rows in use, in order of slot."""
        self.num_used = len(rows)
        self.rows[: self.num_used] = rows
        self.free = list(free)
        slots = np.flatnonzero(rows[:, HANDLE] != FREE)
        for slot, key, item in zip(slots.tolist(), keys, items, strict=True):
            self.keys[slot] = key
            self.items[slot] = item
            self.slot_of[key] = slot
        self.num_bytes = int(rows[slots, BYTES].sum())
        self.num_tokens = int(rows[slots, TOKENS].sum())
