"""The table without its lock: what is held, what leaves and what is drawn, one call at a time.

Nothing here waits. `Table` checks `may_insert` and `may_sample` first, and only then calls.

Items lie in a fixed number of slots. A slot is a small integer that selectors work with; it is reused when its item has
gone. A handle never names the wrong item: it is `arrival << bits | slot` and unique forever. With 4 bits, item 9 in
slot 3 has handle 147. If a priority arrives for an item that has left, no slot holds its handle any more: one
vectorised comparison finds all such stale updates. Handles also sort by arrival, so an item's age needs no column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.replay.batch import BYTES, TIMES, TOKENS, VERSION, Batch, Key
from penstock.replay.limiters import passes_inserts
from penstock.replay.selector import Draw, Index
from penstock.replay.table_metrics import Counters, Reason
from penstock.replay.table_settings import Settings
from penstock.replay.windowed_fifo import DispatchIndex

WIDTH = 4
_ROW = Struct(f"{WIDTH}q")

FREE = -1
"""The handle of an empty slot."""


class Slots:
    """What lies in each slot: key, item, handle, and a row of numbers."""

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


OnEvict = Callable[[Key, Reason], None]


class Store:
    """Slots, the indices over them, counters and the generator of one table."""

    def __init__(self, settings: Settings, on_evict: OnEvict | None) -> None:
        self.settings = settings
        self.slots = Slots(settings.capacity)
        self.counters = Counters()
        self.rng = np.random.Generator(np.random.PCG64(settings.seed))
        self.policy_version = 0
        self.oldest_version = -float("inf")
        """Items of an earlier version are too stale."""
        self.sampling: Index = settings.sampler.build(settings.capacity, "sample")
        remover = settings.remover
        self.removing: Index | None = None if remover is None else remover.build(settings.capacity, "remove")
        self._limiter = settings.limiter
        self._passes_inserts = passes_inserts(settings.limiter)
        self._capacity = settings.capacity
        self._max_bytes = _unlimited(settings.capacity_bytes)
        self._max_tokens = _unlimited(settings.capacity_tokens)
        self._limits_size = settings.capacity_bytes is not None or settings.capacity_tokens is not None
        self._on_evict = on_evict

    def may_insert(self, key: Key, num_bytes: int, num_tokens: int) -> bool:
        slots, counters = self.slots, self.counters
        held = len(slots.slot_of) - (key in slots.slot_of)
        if not self._passes_inserts and not self._limiter.may_insert(counters.inserted, counters.sampled, held):
            return False
        return self.removing is not None or self._fits(key, num_bytes, num_tokens)

    def has_room(self, ahead: int) -> bool:
        """Return whether the limiter and the number of items allow an insert after `ahead` others."""
        held = len(self.slots.slot_of) + ahead
        if self.removing is not None:
            held = min(held, self._capacity)
        elif held >= self._capacity:
            return False
        if self._passes_inserts:
            return True
        return self._limiter.may_insert(self.counters.inserted + ahead, self.counters.sampled, held)

    def is_stuck(self, key: Key) -> bool:
        """Return whether neither side could ever proceed: full by bytes or tokens, with too few items to sample."""
        held = len(self.slots) - (key in self.slots.slot_of)
        leaves_otherwise = self.removing is not None or self.settings.max_staleness is not None
        return held < self._limiter.min_size and not leaves_otherwise

    def may_sample(self, count: int, *, replace: bool) -> bool:
        held = len(self.slots.slot_of)
        if held < (1 if replace else count) or min(count, held) > self.reach():
            return False
        return self._limiter.may_sample(count, self.counters.inserted, self.counters.sampled, held)

    def reach(self) -> int:
        """Return how many items the sampler would let go now."""
        sampling = self.sampling
        return sampling.reach() if isinstance(sampling, DispatchIndex) else len(self.slots.slot_of)

    @property
    def waits_for(self) -> str:
        """What the sampler waits for although items are held, or ""."""
        return self.sampling.waits_for if isinstance(self.sampling, DispatchIndex) else ""

    def _fits(self, key: Key, num_bytes: int, num_tokens: int) -> bool:
        """Return whether an item would fit now, in place of the one it replaces."""
        slots = self.slots
        held, held_bytes, held_tokens = len(slots.slot_of), slots.num_bytes, slots.num_tokens
        replaced = slots.slot_of.get(key)
        if replaced is not None:
            old_bytes, old_tokens = slots.sizes(replaced)
            held, held_bytes, held_tokens = held - 1, held_bytes - old_bytes, held_tokens - old_tokens
        return (
            held < self._capacity
            and held_bytes + num_bytes <= self._max_bytes
            and held_tokens + num_tokens <= self._max_tokens
        )

    def insert(
        self,
        key: Key,
        item: Any,
        priority: float,
        num_bytes: int,
        num_tokens: int,
        policy_version: int,
        dispatch: int | None = None,
    ) -> int:
        """Store an item after evicting what must go. No limit is exceeded even briefly."""
        slots, removing, counters = self.slots, self.removing, self.counters
        if key in slots.slot_of:
            self.evict([slots.slot_of[key]], "replaced")
        while len(slots.slot_of) >= self._capacity or (
            self._limits_size
            and (slots.num_bytes + num_bytes > self._max_bytes or slots.num_tokens + num_tokens > self._max_tokens)
        ):
            assert removing is not None
            self._evict_one(removing, removing.victim(self.rng))
        counters.inserted += 1
        counters.inserted_bytes += num_bytes
        counters.inserted_tokens += num_tokens
        slot, handle = slots.put(key, item, counters.inserted, policy_version, num_bytes, num_tokens)
        if dispatch is not None and isinstance(self.sampling, DispatchIndex):
            self.sampling.insert_at(slot, dispatch)
        else:
            self.sampling.insert(slot, priority, policy_version)
        if removing is not None:
            removing.insert(slot, priority, policy_version)
        return handle

    def sample(self, count: int, *, replace: bool) -> Batch:
        return self.take(self.sampling.draw(count, self.rng, replace=replace), replace=replace)

    def take(self, draw: Draw, *, replace: bool) -> Batch:
        """Count one use of the drawn items and return them."""
        # Copy everything first: counting the last uses evicts items and frees their slots.
        slots = self.slots
        pairs, handles, rows = slots.gather(draw.slots)
        rows.setflags(write=False)
        self.counters.note_batch(rows, self.policy_version, draw.num_filled)
        return Batch(
            keys=pairs[:, 0].copy(),  # a view would keep the items alive as long as the keys
            items=pairs[:, 1],
            handles=handles,
            rows=rows,
            arrivals=handles >> slots.bits,
            probabilities=draw.probabilities,
            inclusion=draw.inclusion,
            last_use=self._count_uses(draw, rows, replace=replace),
            num_filled=draw.num_filled,
            num_inserted=self.counters.inserted,
            policy_version=self.policy_version,
        )

    def _count_uses(self, draw: Draw, rows: NDArray[np.int64], *, replace: bool) -> NDArray[np.bool_]:
        """Count one use of each slot and evict those that had their last. Returns which ones."""
        times = self.slots.rows[:, TIMES]
        limit = self.settings.max_times_sampled
        if replace:
            np.add.at(times, draw.slots, 1)  # counts a slot drawn twice twice, which `times[slots] += 1` would not
        else:
            times[draw.slots] = rows[:, TIMES] + 1
        if limit is None:
            return np.zeros(len(rows), dtype=np.bool_)
        last_use: NDArray[np.bool_] = rows[:, TIMES] + 1 >= limit
        if last_use.any():
            self.evict(draw.slots[last_use].tolist(), "sampled_out")
        return last_use

    def update(self, slots: NDArray[np.int64], priorities: NDArray[np.float64], num_stale: int) -> None:
        self.counters.updates += len(slots)
        self.counters.stale_updates += num_stale
        if len(slots):
            self.sampling.update(slots, priorities)
            if self.removing is not None:
                self.removing.update(slots, priorities)

    def advance(self, policy_version: int) -> int:
        """Set the trainer's version and evict what is now too stale. Returns how many."""
        self.policy_version = policy_version
        if self.settings.max_staleness is None:
            return 0
        self.oldest_version = policy_version - self.settings.max_staleness
        live = self.slots.live()
        stale = live[self.slots.rows[live, VERSION] < self.oldest_version]
        return self.evict(stale.tolist(), "stale")

    def evict(self, slots: Sequence[int], reason: Reason) -> int:
        """Evict slots in use and return how many. `on_evict` is called after all counters are updated."""
        dropped = [self.slots.drop(slot) for slot in slots]
        self.sampling.remove(slots)
        if self.removing is not None:
            self.removing.remove(slots)
        self.counters.evicted[reason] += len(slots)
        for key, times in dropped:
            if times == 0:
                self.counters.evicted_unsampled += 1
            if self._on_evict is not None:
                self._on_evict(key, reason)
        return len(slots)

    def _evict_one(self, removing: Index, slot: int) -> None:
        """`evict` for the one victim that makes room: the hot path of a full table."""
        key, times = self.slots.drop(slot)
        gone = (slot,)
        self.sampling.remove(gone)
        removing.remove(gone)
        self.counters.evicted["overflow"] += 1
        if times == 0:
            self.counters.evicted_unsampled += 1
        if self._on_evict is not None:
            self._on_evict(key, "overflow")

    def occupancy(self) -> str:
        """Describe how full the table is, for messages."""
        slots, settings = self.slots, self.settings
        parts = [f"{len(slots)} of {settings.capacity} items"]
        if settings.capacity_bytes is not None:
            parts.append(f"{slots.num_bytes} of {settings.capacity_bytes} bytes")
        if settings.capacity_tokens is not None:
            parts.append(f"{slots.num_tokens} of {settings.capacity_tokens} tokens")
        return ", ".join(parts)

    def report(self) -> dict[str, float]:
        """Return one number per name. The table adds the waiting times."""
        counters, slots, policy_version = self.counters, self.slots, self.policy_version
        counters.fold()
        live = np.flatnonzero(slots.handles[: slots.num_used] != FREE)
        rows = slots.rows[live]
        ages = counters.inserted - (slots.handles[live] >> slots.bits)
        staleness = np.maximum(policy_version - rows[:, VERSION], 0)
        sampled = max(counters.sampled, 1)
        found: dict[str, float] = {
            "gen/items": counters.inserted,
            "gen/tokens": counters.inserted_tokens,
            "gen/bytes": counters.inserted_bytes,
            "gen/refused_stale": counters.refused_stale,
            "buffer/items": len(slots),
            "buffer/tokens": slots.num_tokens,
            "buffer/bytes": slots.num_bytes,
            "buffer/policy_version": policy_version,
            "buffer/evicted_unsampled": counters.evicted_unsampled,
            "train/items": counters.sampled,
            "train/batches": counters.batches,
            "train/tokens": counters.sampled_tokens,
            "train/first_uses": counters.first_uses,
            "train/filled": counters.filled,
            "train/reuse_mean": counters.reuse_sum / sampled,
            "train/staleness_mean": counters.staleness_sum / sampled,
            "train/staleness_max": counters.staleness_max,
            "train/priority_updates": counters.updates,
            "train/priority_updates_stale": counters.stale_updates,
        }
        found |= {f"buffer/evicted/{reason}": count for reason, count in counters.evicted.items()}
        for name, values in (("age", ages), ("times_sampled", rows[:, TIMES]), ("staleness", staleness)):
            found[f"buffer/{name}_mean"] = float(values.mean()) if len(values) else 0.0
            found[f"buffer/{name}_max"] = float(values.max(initial=0))
        return found


def _unlimited(limit: int | None) -> float:
    return float("inf") if limit is None else limit
