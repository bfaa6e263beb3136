"""What a small group costs: processor time of every process, and of every part of the work.

A group of 16 samples of 512 tokens is 39 kB. Copying it takes microseconds, so what is measured here is what every
group costs whatever is in it. The processes are those of `bench path`: two producers, a served plane, two ranks. Their
processor time is read from the kernel's clock of each process, in nanoseconds, over steps of 64 groups. Wall time
is not compared: it depends on what else the machine does.

The parts run in this process, in the order of the path, on one group after another: what one leaves in the caches is
what the next one finds. They are the work of one group: a rank's parts are those of one rank that takes half of the
group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import numpy as np

from benchmarks.disk import disk_folder
from benchmarks.programs.inputs import CASES, Case, Group, make_groups
from benchmarks.programs.plane import samples_of
from benchmarks.report import Row, skipped
from benchmarks.running import Program, Wanted, WayFailed, started
from penstock.arrays import sample_digests
from penstock.frames import (
    GroupMetadata,
    Pieces,
    RangedFrame,
    assemble,
    check_group,
    encode_group,
    gather,
    metadata_of_pieces,
    open_frame,
)

TARGET_MS = 2.0
"""Processor time of a group of 16 x 512 tokens, over all processes."""
TRANSPORTS = {"direct": ("plane", "direct"), "put_many": ("many", "direct"), "tcp": ("plane", "tcp")}
"""What `benchmarks.programs.plane` is asked for: how producers put, and over which transport."""
PROCESSES = ("producer", "plane", "rank")
LABELS = {"small": "16 x 512", "fixed": "16 x 4k"}


def run(*, full: bool, progress: Callable[[str], None], rounds: int | None = None, cases: Any = None) -> list[Row]:
    """Measure groups of 16 x 512 tokens; with `full` also the groups of the text step, 16 x 4k."""
    rows: list[Row] = []
    for name in cases or (LABELS if full else ("small",)):
        target = TARGET_MS if name == "small" else None
        rows += process_rows(CASES[name], progress, rounds or (15 if full else 7), target)
        progress(f"{name}: the parts of a group")
        rows += part_rows(CASES[name])
    return rows


# ------------------------------------------------------------------ processes


def process_rows(case: Case, progress: Callable[[str], None], rounds: int, target: float | None) -> list[Row]:
    """Processor time of a group, by transport and process: the median over rounds in which the transports take turns.
    The first round, which opens and maps everything, does not count.
    """
    found: dict[str, list[dict[str, float]]] = {transport: [] for transport in TRANSPORTS}
    wanted = {transport: Wanted(module="plane") for transport in TRANSPORTS}
    with disk_folder() as folder, started(wanted, folder, 2) as (programs, why):
        for number in range(rounds + 1):
            for transport in [name for name in TRANSPORTS if name in programs and name not in why]:
                progress(f"{case.name}, {transport}, round {number} of {rounds}")
                try:
                    took = _round(programs[transport], case, transport, number)
                except WayFailed as error:
                    why[transport] = f"{transport}: {error}"
                    continue
                if number:
                    found[transport].append(took)
    rows: list[Row] = []
    for transport in TRANSPORTS:
        rows += _rows_of(case, transport, found[transport], why.get(transport, ""), target)
    return rows


def _round(program: Program, case: Case, transport: str, number: int) -> dict[str, float]:
    system, over = TRANSPORTS[transport]
    return program.round(system=system, case=case.name, ranks=2, transport=over, round=number)


def _rows_of(
    case: Case, transport: str, rounds: list[dict[str, float]], why: str, target: float | None
) -> Iterator[Row]:
    name = f"{LABELS.get(case.name, case.name)}, {transport}: CPU of a group"
    if why or not rounds:
        yield skipped(f"{name}, all processes", why, unit="ms", target=target, bound="max")
        return
    spent = {who: [took[f"{who}_cpu_s"] * 1e3 / case.groups for took in rounds] for who in PROCESSES}
    totals = [sum(one) for one in zip(*spent.values(), strict=True)]
    note = f"{min(totals):.2f} to {max(totals):.2f} ms in {len(totals)} rounds of {case.groups} groups"
    yield Row(name=f"{name}, all processes", ours=median(totals), unit="ms", target=target, bound="max", note=note)
    for who in PROCESSES:
        yield Row(name=f"{name}, {who}", ours=median(spent[who]), unit="ms")


# ------------------------------------------------------------------ parts


class Clock:
    """Processor time of this thread, by part."""

    def __init__(self) -> None:
        self.parts: dict[str, list[int]] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        begin = time.thread_time_ns()
        yield
        self.parts.setdefault(name, []).append(time.thread_time_ns() - begin)


def part_rows(case: Case, *, groups: int = 60) -> list[Row]:
    """Median microseconds of each part, over that many groups."""
    clock = Clock()
    made = make_groups(case, range(min(groups, 20)), "part")
    for number in range(groups):
        _one_group(made[number % len(made)], clock)
    label = LABELS.get(case.name, case.name)
    return [Row(name=f"{label}, {name}", ours=median(took) / 1e3, unit="us") for name, took in clock.parts.items()]


def _one_group(group: Group, clock: Clock) -> None:
    rows = list(range(0, len(group.samples), 2))
    with clock.part("producer: Sample"):
        samples = samples_of(group)
    with clock.part("producer: encode"):
        made = encode_group(samples)
    with clock.part("producer: metadata"):
        data = metadata_of_pieces(made, group=group.id, seq_len=1 << 16).to_bytes()
    frame = b"".join(made.pieces)
    with clock.part("plane: read metadata"):
        metadata = GroupMetadata.from_bytes(data)
    with clock.part("plane, tcp: check the frame"):
        assert check_group(frame, group=group.id, seq_len=1 << 16) == metadata
    with clock.part("plane, tcp: open the frame"):
        opened = open_frame(frame)
    with clock.part("plane, tcp: gather half of it"):
        gather([(opened, np.array(rows, np.intp))])
    with clock.part("rank: read the front, plan ranges"):
        ranged = RangedFrame(metadata.front)
        ranges = ranged.plan(rows)
    fetch = Pieces(ranges, [frame[a:b] for a, b in ranges])
    with clock.part("rank: assemble half of it"):
        taken = assemble([(ranged, rows, fetch)])
    with clock.part("rank: digests"):
        assert sample_digests(taken) == [metadata.digests[i] for i in rows]
