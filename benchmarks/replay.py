"""Replay tables against cpprb and torchrl: sampling, updates, inserts, mixed use, checkpoints.

Ours goes through the public `Table`: lock, limiter, counters, items and weights included. cpprb goes through its
`PrioritizedReplayBuffer` with one number per item, torchrl through its bare `PrioritizedSampler`, which fetches
no items; the rows "sampler alone" compare like with like, our index without its table. Both rivals keep
float32 sums. Neither samples without replacement, so "sample distinct" compares ours without replacement to
theirs with. Rates are per CPU second, each the best of many short rounds in which the implementations take turns:
on a busy machine every one of them then meets some quiet moment. Priorities are uniform, which suits our sampler;
the rows "heavy tails" (lognormal, weights with sigma 2) show it where they do not.
"""

from __future__ import annotations

import gc
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, cycle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import Row, best, skipped
from penstock.replay import Fifo, Index, Prioritized, Table, importance_weights

_EXPONENT = 0.6
_LARGEST = 1_000_000
_BATCHES = (64, 60), (512, 20)
"""Items per batch, and batches per round: 2 to 15 ms, so that a round fits between two disturbances."""
_CHECKPOINT_ITEMS, _CHECKPOINT_BYTES = 1000, 150_000

Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """One implementation, filled, behind the calls that are timed."""

    name: str
    sample: Callable[[int], object]
    sample_distinct: Callable[[int], object] | None
    """None where the implementation has no sampling without replacement."""
    update: Callable[[], object]
    """New priorities for the next 512 of a fixed sequence of random items."""
    draw: Callable[[int], object] | None
    """The sampler alone, without items; None where it cannot be called apart from them."""
    mixed: Callable[[int], object]
    """Sample, then update what was sampled."""
    insert: Callable[[], object] | None
    """One more item into the full buffer."""


def run(*, full: bool, progress: Callable[[str], None]) -> list[Row]:
    try:
        return _rows(50 if full else 15, progress)
    finally:
        gc.unfreeze()


def _rows(repeats: int, progress: Callable[[str], None]) -> list[Row]:
    rows: list[Row] = []
    for size in (10_000, 100_000, _LARGEST):
        progress(f"filling buffers of {size:,} items")
        buffers, absent = _buffers(size, np.random.default_rng(size).random(size) + 0.01)
        gc.freeze()  # each round collects garbage first; without this, torch's objects make that 0.2 s a time
        rows += _compared(size, buffers, absent, repeats, progress)
    del buffers
    progress("heavy-tailed priorities")
    rows += _heavy(repeats)
    progress("inserting at capacity")
    rows += _inserting(repeats)
    progress("saving and loading a checkpoint")
    return rows + _checkpoint()


# -- the implementations ---------------------------------------------------------------------------------------


def _buffers(size: int, priorities: NDArray[np.float64]) -> tuple[list[Buffer], dict[str, str]]:
    """Ours first; and why a rival is not there: not installed, or it does not load."""
    rng = np.random.default_rng(size + 1)
    chosen = [rng.integers(0, size, 512) for _ in range(64)]
    found, absent = [_ours(size, priorities, chosen)], {}
    for name, build in (("cpprb", _cpprb), ("torchrl", _torchrl)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found.append(build(size, priorities, chosen))
        except (ImportError, RuntimeError) as error:
            absent[name] = str(error).splitlines()[0][:120]
    return found, absent


def _ours(size: int, priorities: NDArray[np.float64], chosen: list[NDArray[np.int64]]) -> Buffer:
    table = _full_table(size, priorities)
    handles = np.sort(table.sample(size).handles)
    index, rng = _index(priorities), np.random.default_rng(1)
    batches, values, keys = cycle([handles[slots] for slots in chosen]), priorities[:512].copy(), count(size)

    def take(n: int, replace: bool) -> object:
        batch = table.sample(n, replace=replace)
        return batch.items, batch.weights

    def mixed(n: int) -> object:
        batch = table.sample(n, replace=True)
        return batch.weights, table.update_handles(batch.handles, values[:n])

    return Buffer(
        name="penstock",
        sample=lambda n: take(n, True),
        sample_distinct=lambda n: take(n, False),
        update=lambda: table.update_handles(next(batches), values),
        draw=lambda n: importance_weights(index.draw(n, rng, replace=True).inclusion),
        mixed=mixed,
        insert=lambda: table.insert(next(keys), None, priority=0.5),
    )


def _index(priorities: NDArray[np.float64]) -> Index:
    """The sampler of such a table, apart from it."""
    index = Prioritized(_EXPONENT).build(len(priorities), "sample")
    for slot, priority in enumerate(priorities.tolist()):
        index.insert(slot, priority, 0)
    return index


def _full_table(size: int, priorities: NDArray[np.float64]) -> Table:
    table = Table(capacity=size, sampler=Prioritized(_EXPONENT), remover=Fifo(), max_times_sampled=None)
    for key, priority in enumerate(priorities.tolist()):
        table.insert(key, float(key), priority=priority)  # an object of its own, as real items are
    return table


def _cpprb(size: int, priorities: NDArray[np.float64], chosen: list[NDArray[np.int64]]) -> Buffer:
    from cpprb import PrioritizedReplayBuffer

    buffer = PrioritizedReplayBuffer(size, {"item": {"shape": 1}}, alpha=_EXPONENT)
    buffer.add(item=np.arange(size, dtype=np.float32).reshape(size, 1), priorities=priorities)
    batches, values = cycle(chosen), priorities[:512].copy()

    def mixed(n: int) -> object:
        batch = buffer.sample(n, beta=1.0)
        return buffer.update_priorities(batch["indexes"], values[:n])

    return Buffer(
        name="cpprb",
        sample=lambda n: buffer.sample(n, beta=1.0),
        sample_distinct=None,
        update=lambda: buffer.update_priorities(next(batches), values),
        draw=None,
        mixed=mixed,
        insert=lambda: buffer.add(item=1.0, priorities=0.5),
    )


def _torchrl(size: int, priorities: NDArray[np.float64], chosen: list[NDArray[np.int64]]) -> Buffer:
    import torch
    from torchrl.data.replay_buffers.samplers import PrioritizedSampler

    class Filled:
        """As much of a storage as the sampler looks at."""

        ndim, shape = 1, (size,)

        def __len__(self) -> int:
            return size

    sampler = PrioritizedSampler(size, alpha=_EXPONENT, beta=1.0)
    everything = torch.arange(size)
    sampler.extend(everything)
    sampler.update_priority(everything, torch.from_numpy(priorities).float())
    storage: Any = Filled()
    batches = cycle([torch.from_numpy(slots) for slots in chosen])
    values = torch.from_numpy(priorities[:512]).float()

    def mixed(n: int) -> object:
        index, _ = sampler.sample(storage, n)
        return sampler.update_priority(index, values[:n])

    return Buffer(
        name="torchrl",
        sample=lambda n: sampler.sample(storage, n),
        sample_distinct=None,
        update=lambda: sampler.update_priority(next(batches), values),
        draw=lambda n: sampler.sample(storage, n),
        mixed=mixed,
        insert=None,
    )


# -- the rows --------------------------------------------------------------------------------------------------


def _repeat(call: Callable[[int], object], n: int, times: int) -> Call:
    def loop() -> None:
        for _ in range(times):
            call(n)

    return loop


def _updates(buffer: Buffer, times: int) -> Call:
    """Deferred work counts: a draw after the updates makes an implementation finish them."""

    def loop() -> None:
        for _ in range(times):
            buffer.update()
        buffer.sample(1)

    return loop


def _inserts(buffer: Buffer, times: int) -> Call:
    """Deferred work counts here as well."""
    insert = buffer.insert
    assert insert is not None

    def loop() -> None:
        for _ in range(times):
            insert()
        buffer.sample(1)

    return loop


def _compared(
    size: int, buffers: list[Buffer], absent: dict[str, str], repeats: int, progress: Callable[[str], None]
) -> list[Row]:
    ours, rivals = buffers[0], buffers[1:]
    assert ours.sample_distinct is not None
    rows = []
    for n, times in _BATCHES:
        progress(f"{size:,} items, batches of {n}")
        sampling = [_repeat(rival.sample, n, times) for rival in rivals]
        for what, mine, theirs in (
            ("sample", ours.sample, sampling),
            ("sample distinct", ours.sample_distinct, sampling),
            ("sample + update", ours.mixed, [_repeat(rival.mixed, n, times) for rival in rivals]),
        ):
            seconds = best(_repeat(mine, n, times), *theirs, repeats=repeats)
            rows += _rates(what, n, size, n * times, seconds, rivals, absent)
        bare = [buffer for buffer in buffers if buffer.draw is not None]
        seconds = best(*(_repeat(b.draw, n, times) for b in bare if b.draw), repeats=repeats)
        rows += _rates("sampler alone", n, size, n * times, seconds, bare[1:], absent)
    progress(f"{size:,} items, updates")
    seconds = best(*(_updates(buffer, 64) for buffer in buffers), repeats=2 * repeats)
    return rows + _rates("update", 512, size, 64 * 512, seconds, rivals, absent)


def _heavy(repeats: int) -> list[Row]:
    """The same sampling where few items hold most weight, and draws are made by the tree."""
    priorities = np.random.default_rng(0).lognormal(0.0, 2.0 / _EXPONENT, _LARGEST)
    buffers, absent = _buffers(_LARGEST, priorities)
    gc.freeze()
    rows = []
    for n, times in _BATCHES:
        seconds = best(*(_repeat(buffer.sample, n, times) for buffer in buffers), repeats=repeats)
        rows += _rates("heavy tails: sample", n, _LARGEST, n * times, seconds, buffers[1:], absent)
    return rows


def _target(what: str, n: int, size: int, rival: str) -> float | None:
    """Sampling from a million, and updates of 512 against cpprb; the other rows are shown without a target."""
    if size != _LARGEST:
        return None
    if n == 512 and (what == "sample" or (what, rival) == ("sampler alone", "torchrl")):
        return 1.5
    if what == "sample" and n == 64 and rival == "cpprb":
        return 0.7
    return 1.1 if what == "update" and rival == "cpprb" else None


def _rates(
    what: str, n: int, size: int, num_items: int, seconds: Sequence[float], rivals: list[Buffer], absent: dict[str, str]
) -> list[Row]:
    name, mine = f"{what} {n} of {size:,}", num_items / seconds[0] / 1e6
    rows = [
        Row(
            name=name,
            ours=mine,
            rival=num_items / theirs / 1e6,
            rival_name=rival.name,
            ratio=theirs / seconds[0],
            unit="M/s",
            target=_target(what, n, size, rival.name),
        )
        for rival, theirs in zip(rivals, seconds[1:], strict=True)
    ]
    for rival, why in absent.items():
        target = _target(what, n, size, rival)
        if target is not None or not rivals:
            rows.append(skipped(name, f"{rival}: {why}", ours=mine, unit="M/s", rival_name=rival, target=target))
    return rows


def _inserting(repeats: int) -> list[Row]:
    """One item into a full table, from a thousand items to a million, in interleaved rounds."""
    sizes, times = (1000, 10_000, 100_000, _LARGEST), 2000
    tables = [_ours(size, np.full(size, 0.5), [np.zeros(1, dtype=np.int64)]) for size in sizes]
    gc.freeze()
    seconds = best(*(_inserts(table, times) for table in tables), repeats=2 * repeats)
    rows = [
        Row(name=f"insert one at capacity {size:,}", ours=times / spent / 1e3, unit="k/s", target=200, bound="min")
        for size, spent in zip(sizes, seconds, strict=True)
    ]
    flat = Row(
        name="insert: rate at 1,000,000 over rate at 1,000",
        ours=seconds[0] / seconds[-1],
        unit="x",
        target=0.7,
        bound="min",
        note="flat is 1.0",
    )
    return [*rows, flat]


def _checkpoint() -> list[Row]:
    rng = np.random.default_rng(0)
    table = Table(capacity=_CHECKPOINT_ITEMS, sampler=Prioritized(_EXPONENT), remover=Fifo(), max_times_sampled=None)
    for key in range(_CHECKPOINT_ITEMS):
        table.insert(key, rng.bytes(_CHECKPOINT_BYTES), num_bytes=_CHECKPOINT_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table"
        saved, loaded = best(lambda: table.checkpoint(path), lambda: Table.restore(path), repeats=3)
    size = f"{_CHECKPOINT_ITEMS:,} groups, {_CHECKPOINT_ITEMS * _CHECKPOINT_BYTES / 1e6:.0f} MB"
    return [
        Row(
            name=f"checkpoint save, {size}",
            ours=saved * 1e3,
            unit="ms",
            note="CPU time; the disk's own time is not in it",
        ),
        Row(name=f"checkpoint load, {size}", ours=loaded * 1e3, unit="ms", note="mapped, every byte checked"),
    ]
