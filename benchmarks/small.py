"""Small groups, 16 samples of 512 tokens: what a group costs in all processes, from its arrays to the ranks' tensors.

The programs are those of `bench path`: two producers that put one group after another, a plane, two ranks. Systems take
turns, round by round, and the first round of each does not count. Medians of processor time over the groups of a round.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from benchmarks.disk import disk_folder
from benchmarks.path import LISTS, OURS, QUEUE, System
from benchmarks.programs.inputs import CASES
from benchmarks.report import Row, Seconds, Spread, faster, skipped
from benchmarks.running import Program, Wanted, WayFailed, started

CASE = "small"
CPU_MS = 2.0
"""Of a group, in all processes."""
Progress = Callable[[str], None]


def run(
    *, full: bool = False, progress: Progress = lambda _: None, rivals: str | None = None, rounds: int | None = None
) -> list[Row]:
    """`rounds` is for tests."""
    rounds = rounds or (25 if full else 9)
    systems = [*OURS.values(), QUEUE, LISTS]
    wanted = {transport: Wanted(module="plane") for transport in OURS} | {
        "lists": Wanted(module="lists"),
        "rivals": Wanted(module="rivals", python=rivals, absent="no --rivals interpreter", needs="ray", alone=True),
    }
    found: dict[str, list[dict[str, float]]] = {}
    with disk_folder() as folder, started(wanted, folder, 2) as (programs, why):
        for number in range(rounds + 1):
            for system in systems:
                if system.program in programs and system.name not in why:
                    progress(f"round {number} of {rounds}: {system.name}")
                    _round(programs[system.program], system, number, found, why)
    return [row for ours in OURS.values() for row in _rows(ours, found, why)]


def _round(
    program: Program, system: System, number: int, found: dict[str, list[dict[str, float]]], why: dict[str, str]
) -> None:
    try:
        took = program.round(system=system.system, case=CASE, ranks=2, transport=system.transport, round=number)
    except WayFailed as error:
        why[system.name] = f"{system.name}: {error}"
        return
    if number:
        found.setdefault(system.name, []).append(took)


def _rows(ours: System, found: dict[str, list[dict[str, float]]], why: dict[str, str]) -> list[Row]:
    name, target = f"16 x 512 tokens, {ours.transport}", CPU_MS if ours.transport == "direct" else None
    if ours.name not in found:
        return [skipped(f"{name}: CPU of a group", why[ours.name], unit="ms", target=target, bound="max")]
    groups, mine = CASES[CASE].groups, found[ours.name]
    parts = {part: median(took[f"{part}cpu_s"] for took in mine) / groups * 1e3 for part in ("", "plane_", "rank_")}
    spread = Spread.of([took["cpu_s"] / groups for took in mine])
    note = f"plane {parts['plane_']:.2f} ms, ranks {parts['rank_']:.2f} ms, the rest in producers"
    rows = [
        Row(
            name=f"{name}: CPU of a group",
            ours=parts[""],
            unit="ms",
            target=target,
            bound="max",
            note=note,
            ours_ms=spread,
        )
    ]
    for rival in (QUEUE, LISTS):
        if rival.name not in found:
            absent = why.get(rival.name) or why[rival.program]
            rows.append(skipped(f"{name}: a step", absent, unit="ms", rival_name=rival.name))
            continue
        times = [Seconds([took["seconds"] for took in found[one.name]]) for one in (ours, rival)]
        rows.append(faster(f"{name}: a step of {groups} groups", times[0], times[1], rival.name))
    return rows
