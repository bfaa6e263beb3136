"""What grows, and how: groups held, ranks, length of samples, length of a run, producers, exported steps.

Nothing is compared with a rival. A row is either a cost at the larger size over that at the smaller one, measured in
turns where both can be there at once, or an absolute figure with the spread of its rounds. Times are CPU time where
one process does the work, and wall time where producers wait for acknowledgements.
"""

from __future__ import annotations

import itertools
import shutil
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.disk import disk_folder
from benchmarks.ingest import produce
from benchmarks.log import EngineRun, settings_of
from benchmarks.programs.inputs import CASES, Case, make_groups
from benchmarks.programs.plane import SEQ_LEN, samples_of
from benchmarks.report import Row, Seconds, Spread, best
from penstock.arrays import Sample
from penstock.client.api import open as open_plane
from penstock.frames import check_group, encode
from penstock.packing import Packing
from penstock.plane.step_builder import Place, PlannedStep, StepBuilder
from penstock.server.plane_process import PlaneProcess
from penstock.storage import MemoryStorage, Writer
from penstock.view import Export
from penstock.view.library import Library

Progress = Callable[[str], None]
FLAT = 1.5
"""A cost that should not grow may be this many times as high at the larger size: noise of a shared machine."""
_FEW, _PUT_P99_MS = 2, 8.0
"""How long the slowest hundredth of the puts of two producers may take."""
_STEPS = 20
"""Rounds of steps trained while groups are held."""
_GROUP_BYTES = 300.0
"""Of the log, for ever, for each group that was trained."""


def run(*, full: bool = False, progress: Progress = lambda _: None, scale: float = 1.0) -> list[Row]:
    """`scale` below 1 is for tests."""
    with disk_folder() as folder:
        progress("groups held")
        steps = max(int(_STEPS * scale), 3)
        rows = _held(folder / "held", *_sized(scale, 1_000, 100_000 if full else 20_000), steps=steps)
        progress("a long run")
        late = max(int((10_000 if full else 1_500) * scale), 30)
        rows += _run_length(folder / "long", max(int(100 * scale), 10), late)
        progress("ranks")
        rows += _ranks(*_sized(scale, 64, 256, 1_024), groups=max(int(256 * scale), 4))
        progress("lengths of samples")
        rows += _lengths(*(max(length, 64) for length in _sized(scale, 512, 4_096, 32_768, 131_072)))
        progress("producers")
        rows += _producers(folder / "producers", *((1, 2, 8, 32) if full else (1, 2, 8)), each=max(int(160 * scale), 8))
        progress("exported steps")
        rows += _exports(*_sized(scale, 10, 1_000))
    return rows


def _sized(scale: float, *sizes: int) -> tuple[int, ...]:
    return tuple(max(int(size * scale), 2 + at) for at, size in enumerate(sizes))


def _flat(name: str, small: Seconds, large: Seconds) -> Row:
    """Cost at the larger size over that at the smaller one."""
    note = f"{small.spread}, then {large.spread}, CPU"
    ratio = large.spread.median / small.spread.median
    return Row(name=name, ours=ratio, unit="x", target=FLAT, bound="max", note=note)


def _absolute(name: str, seconds: Seconds, target_ms: float | None = None) -> Row:
    spread = seconds.spread
    return Row(name=name, ours=spread.median, unit="ms", target=target_ms, bound="max", ours_ms=spread)


def _timed(rounds: int, call: Callable[[], object]) -> Seconds:
    """CPU seconds of each call."""
    taken = []
    for _ in range(rounds):
        begin = time.process_time_ns()
        call()
        taken.append(max(time.process_time_ns() - begin, 1) / 1e9)
    return Seconds(taken)


# ------------------------------------------------------------------ groups held, length of a run


def _held(folder: Path, few: int, many: int, *, steps: int) -> list[Row]:
    """Two planes at once, one that holds few groups and one that holds many."""
    runs = [EngineRun(folder / str(held), settings_of(None, "held"), synced=False) for held in (few, many)]
    for one, held in zip(runs, (few, many), strict=True):
        for at in range(0, held, 500):
            one.accept(min(500, held - at))
    small, large = runs
    accept = best(lambda: small.accept(4), lambda: large.accept(4), repeats=steps + 5)
    for one in runs:  # a slow machine makes fewer rounds than these, and a step needs its groups
        one.accept(4 * (steps + 1))
    train = best(small.train, large.train, repeats=steps)
    for one in runs:
        one.log.close()
    sizes = f"{many:,} groups held over {few:,}"
    return [
        _flat(f"accept 4 groups, {sizes}", *accept),
        _flat(f"draw, record and commit a step, {sizes}", *train),
    ]


def _run_length(folder: Path, early: int, late: int) -> list[Row]:
    """One plane, step by step."""
    settings = replace(settings_of(None, "long"), retain_steps=8)
    one = EngineRun(folder, settings, synced=False)

    def step() -> None:
        one.accept(4)
        one.train()

    window = early // 2
    _timed(early - window, step)
    first, first_bytes = _timed(window, step), _log_bytes(folder)
    _timed(late - early - window, step)
    last, last_bytes = _timed(window, step), _log_bytes(folder)
    one.log.close()
    per_group = (last_bytes - first_bytes) / (4 * (late - early))
    name = f"a step of 4 groups, CPU at step {late:,} over step {early:,}"
    note = f"{last_bytes:,} bytes after {late:,} steps; ids of 5 characters"
    return [
        _flat(name, first, last),
        Row(
            name="log, for each group ever trained",
            ours=per_group,
            unit="B",
            target=_GROUP_BYTES,
            bound="max",
            note=note,
        ),
    ]


def _log_bytes(folder: Path) -> int:
    """Pages in use; what waits in the write-ahead log is written into the file first."""
    with closing(sqlite3.connect(folder / "log.sqlite")) as log:
        log.execute("PRAGMA wal_checkpoint(FULL)").fetchone()
        names = ("page_count", "freelist_count", "page_size")
        pages, free, size = (int(log.execute(f"PRAGMA {name}").fetchone()[0]) for name in names)
    return (pages - free) * size


# ------------------------------------------------------------------ ranks, lengths


def _ranks(*worlds: int, groups: int) -> list[Row]:
    """What the plane spends on ranks that cannot read storage, and when the first of them has its samples."""
    storage, names = MemoryStorage(), itertools.count()
    writer = Writer(storage, lambda: f"{next(names):016x}")
    places, metadata = [], []
    for group in make_groups(CASES["ragged"], range(groups), "ranks"):
        frame = encode(samples_of(group))
        metadata.append(check_group(frame, group=group.id, seq_len=SEQ_LEN))
        (location,) = writer.write([[frame]])
        places.append(Place(group.id, location, metadata[-1].num_samples, metadata[-1].to_bytes()))
    rows = []
    for world in worlds:
        builder = StepBuilder(Packing(ranks=world, seq_len=SEQ_LEN), storage)
        planned = builder.plan(metadata)
        rounds = [_build(builder, planned, places, world) for _ in range(4)]
        taken, first = ([one[k] for one in rounds[1:]] for k in (0, 1))
        name = f"{groups * 16:,} samples for {world:,} inline ranks"
        rows.append(_absolute(f"{name}: gather all", Seconds(taken)))
        rows.append(_absolute(f"{name}: until the first ranks are sent theirs", Seconds(first)))
    return rows


def _build(builder: StepBuilder, planned: PlannedStep, places: list[Place], world: int) -> tuple[float, float]:
    """CPU seconds until all ranks have their samples, and until the first ones are sent theirs."""
    parts: list[int] = []
    begin = time.process_time_ns()
    staged = builder.build(1, planned, places, range(world), lambda _: parts.append(time.process_time_ns()))
    parts.append(time.process_time_ns())
    assert staged.serves(range(world))
    return (parts[-1] - begin) / 1e9, (parts[0] - begin) / 1e9


def _lengths(*lengths: int) -> list[Row]:
    """CPU to encode and check the same number of tokens in samples of each length."""
    total = 16 * lengths[-1]
    rows = []
    for length in lengths:
        groups = max(total // (16 * length), 1)
        case = Case(name="length", tokens=length, groups=groups)
        made = {group.id: samples_of(group) for group in make_groups(case, range(groups), "length")}
        (seconds,) = best(partial(_encode_and_check, made, length), repeats=5, budget_s=3.0)
        tokens = groups * 16 * length
        name = f"encode and check 16 samples of {length:,} tokens, a token"
        note = f"{seconds / groups * 1e3:.2f} ms a group; {seconds.spread} for {groups} groups"
        rows.append(Row(name=name, ours=seconds / tokens * 1e9, unit="ns", note=note))
    return rows


def _encode_and_check(groups: dict[str, list[Sample]], length: int) -> None:
    for name, samples in groups.items():
        check_group(encode(samples), group=name, seq_len=length)


# ------------------------------------------------------------------ producers, exports


def _producers(folder: Path, *counts: int, each: int) -> list[Row]:
    """Threads that put groups of 16 x 512 tokens to a served plane, each waiting for its acknowledgement."""
    case = Case(name="small", tokens=512, groups=1)
    (group,) = make_groups(case, range(1), "producers")
    samples = samples_of(group)
    serve = ["--ranks=1", f"--seq-len={SEQ_LEN}", "--groups-per-step=65536", "--listen=tcp://127.0.0.1:*"]
    rows: list[Row] = []
    rates: list[float] = []
    with (
        PlaneProcess([str(folder), *serve], stderr=subprocess.DEVNULL) as plane,
        open_plane(plane.url) as opened,
    ):
        for count in (counts[0], *counts):  # the first one warms up
            frames = []
            for number in range(each):
                name = f"p{count}-{len(rates)}-{number}"
                named = [one.replace(group=name, id=f"{name}/{i}") for i, one in enumerate(samples)]
                frames.append((name, encode(named)))
            puts = produce(opened, frames, count)
            rates.append(len(frames) / puts.seconds)
            p50, p99 = np.percentile(puts.acks, [50, 99]) * 1e3
            note = f"put p50 {p50:.1f}, p99 {p99:.1f} ms"
            rows.append(Row(name=f"{count} producers: groups of 16 x 512 tokens", ours=rates[-1], unit="/s", note=note))
            if count == _FEW and len(rates) > 1:
                rows.append(
                    Row(name=f"{count} producers: put p99", ours=p99, unit="ms", target=_PUT_P99_MS, bound="max")
                )
    kept = rates[-1] / max(rates[1:])
    name = f"{counts[-1]} producers: throughput over that of the best number"
    return [*rows[1:], Row(name=name, ours=kept, unit="x", target=0.5, bound="min")]


def _exports(few: int, many: int) -> list[Row]:
    """The viewer on a short and on a long export, of steps of two samples."""
    from tests.support.exports import make_export

    opened: dict[int, Library] = {}
    with tempfile.TemporaryDirectory(prefix="penstock-growth-") as folder:
        for count in (few, many):
            home = Path(folder) / str(count)
            make_export(home, steps=1, ranks=1, groups=1, size=2)
            for number in range(2, count + 1):
                shutil.copytree(home / "token_exports/step_1", home / f"token_exports/step_{number}")
            opened[count] = Library(exports={"": Export(home)})
        short, long = opened[few], opened[many]
        clicks = best(
            lambda: [short.sample("", "", few, 1) for _ in range(20)],
            lambda: [long.sample("", "", many, 1) for _ in range(20)],
        )
        curves = best(lambda: short.points("", ""), lambda: long.points("", ""), repeats=5)
        new = best(lambda: long.points("", "", many), repeats=5)
    click = clicks[1].spread
    each = Spread(click.min / 20, click.median / 20, click.p95 / 20, click.rounds)
    name = f"viewer, {many:,} exported steps"
    return [
        Row(name=f"{name}: one sample", ours=each.median, unit="ms", target=0.5, bound="max", ours_ms=each),
        _flat(f"{name} over {few:,}: one sample", *clicks),
        _absolute(f"{name}: curves, read before", curves[1]),
        _absolute(f"{name}: the last point of the curves", new[0]),
    ]
