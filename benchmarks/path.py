"""The complete path in real processes: arrays in producers, durable at the plane, packed, tensors on the ranks.

Two producers hold prepared groups as plain arrays: 512 samples in 32 groups of 16, token ids, masks and
log-probabilities, and for router replay the experts chosen per token. The clock starts when they begin to put, and ends
when every rank has int64 id tensors (masks, log-probabilities and uint8 experts beside them) and has read every byte;
the sums they read must equal those sent. Systems take turns, round by round; the median is compared, and the
notes carry spread, CPU seconds and peak memory. Ours writes and syncs every group, plans, packs and gives the step to
all ranks or none, with heartbeats and credit; the rivals do less, as the docstrings in `programs` explain.

`direct`: workers and ranks use the storage themselves, with keys. `tcp`: all bytes pass the plane, without keys.
`put_many`: as `direct`, and each producer puts all its groups with one call, beside TransferQueue doing the same.
Each system has its own processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeAlias

from benchmarks import plane_work
from benchmarks.disk import disk_folder
from benchmarks.report import Row, Spread, faster, skipped
from benchmarks.running import Program, Wanted, WayFailed, started

PREVIOUS = "462be9a"
"""The last version in which all bytes passed the plane, or storage processes of our own."""
TRANSPORTS = ("direct", "tcp")
ROUTER_BYTES = 512 * 4096 * 48 * 8

Rounds: TypeAlias = list[dict[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One comparison: what travels to how many ranks, and how often."""

    case: str
    ranks: int
    rounds: int
    label: str
    targets: dict[str, float]
    """How many times faster than TransferQueue each of our transports must be."""
    many_target: float | None
    """How many times faster than one put of the whole batch into TransferQueue `put_many` must be."""
    previous_target: float
    """How many times faster than the previous version over tcp `direct` must be."""
    plane_cpu_s: float
    """CPU seconds that the plane may take for a step of `direct`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One thing that is compared."""

    name: str
    program: str
    system: str
    transport: str = ""
    rounds: int | None = None
    """At most this many rounds: what is far slower needs fewer."""


OURS = {
    transport: System(name=f"ours, {transport}", program=transport, system="plane", transport=transport)
    for transport in TRANSPORTS
}
MANY = System(name="ours, put_many", program="direct", system="many", transport="direct")
BEFORE = System(name=f"{PREVIOUS}, tcp", program="previous", system="plane", transport="tcp")
QUEUE = System(name="TransferQueue", program="rivals", system="queue")
WHOLE = System(name="TransferQueue, whole batch", program="rivals", system="whole")
REFS = System(name="bare Ray refs", program="rivals", system="refs")
LISTS = System(name="ZeroMQ + msgpack lists", program="lists", system="lists", rounds=2)


def settings(*, full: bool) -> list[Setting]:
    text, router = (15, 5) if full else (7, 3)
    cases = (
        ("fixed", "text 512 x 4k", text, {"direct": 1.5, "tcp": 1.1}, 1.0, 1.5, 0.05),
        ("ragged", "text 512 x up to 4k", text, {"direct": 3.0, "tcp": 1.1}, 1.2, 1.5, 0.05),
        ("router", "router replay 512 x 4k", router, {"direct": 1.8}, None, 2.0, 0.1),
    )
    return [
        Setting(
            case=case,
            ranks=ranks,
            rounds=rounds,
            label=label,
            targets=targets,
            many_target=many,
            previous_target=previous,
            plane_cpu_s=plane_cpu_s,
        )
        for ranks in ((2, 4) if full else (2,))
        for case, label, rounds, targets, many, previous, plane_cpu_s in cases
    ]


def run(
    *,
    full: bool,
    progress: Callable[[str], None],
    rivals: str | None = None,
    baseline: str | None = None,
    only: list[Setting] | None = None,
) -> list[Row]:
    rows = []
    chosen = settings(full=full) if only is None else only
    ranks = max(setting.ranks for setting in chosen)
    with disk_folder() as folder, started(_wanted(rivals, baseline), folder, ranks) as (programs, why):
        for setting in chosen:
            found = _measure(setting, programs, why, progress)
            rows += _rows(setting, found, why)
        if only is None:
            rows += plane_work.rows(folder, progress)
    return rows


def _wanted(rivals: str | None, baseline: str | None) -> dict[str, Wanted]:
    wanted = {
        **{transport: Wanted(module="plane") for transport in TRANSPORTS},
        "lists": Wanted(module="lists"),
        "rivals": Wanted(module="rivals", python=rivals, absent="no --rivals interpreter", needs="ray", alone=True),
    }
    absent = f"no --baseline interpreter, which has commit {PREVIOUS}"
    wanted["previous"] = Wanted(module="plane", python=baseline, absent=absent, needs="penstock")
    return wanted


def _systems(setting: Setting) -> list[System]:
    """In the order of their turns."""
    ours = [*OURS.values(), MANY]
    lists = [] if setting.case == "router" else [LISTS]  # as lists, 805 MB of experts take 6.4 GB in each process
    return [*ours, QUEUE, WHOLE, REFS, *lists, BEFORE]


def _measure(
    setting: Setting,
    programs: dict[str, Program],
    why: dict[str, str],
    progress: Callable[[str], None],
) -> dict[str, Rounds]:
    """Measure each system in each round. The first round, which opens and maps everything, does not count."""
    found: dict[str, Rounds] = {}
    systems = [system for system in _systems(setting) if _offered(system, programs, why)]
    for number in range(setting.rounds + 1):
        for system in [*systems[number % len(systems) :], *systems[: number % len(systems)]]:
            if system.name in why or number > (system.rounds or setting.rounds):
                continue
            progress(f"{setting.label}, {setting.ranks} ranks, round {number} of {setting.rounds}: {system.name}")
            try:
                took = programs[system.program].round(
                    system=system.system,
                    case=setting.case,
                    ranks=setting.ranks,
                    transport=system.transport,
                    round=number,
                )
            except WayFailed as error:
                why[system.name] = f"{system.name}: {error}"
                continue
            if number:
                found.setdefault(system.name, []).append(took)
    return found


def _offered(system: System, programs: dict[str, Program], why: dict[str, str]) -> bool:
    program = programs.get(system.program)
    if program is None:
        why.setdefault(system.name, why[system.program])
    elif system.system not in program.offers:
        why.setdefault(system.name, f"{system.name} is not installed in the --rivals interpreter")
    return system.name not in why


# ------------------------------------------------------------------ the rows


def _rows(setting: Setting, found: dict[str, Rounds], why: dict[str, str]) -> list[Row]:
    rows = []
    for transport, ours in OURS.items():
        name = f"{setting.label}, {setting.ranks} ranks, {transport}"
        rivals: list[tuple[System, float | None]] = [(QUEUE, setting.targets.get(transport)), (REFS, None)]
        rivals += [(LISTS, None)] if setting.case != "router" else []
        rivals += [(BEFORE, setting.previous_target if transport == "direct" else None)]
        rows += [_row(name, ours, rival, target, found, why) for rival, target in rivals]
    name = f"{setting.label}, {setting.ranks} ranks, put_many"
    rows.append(_row(name, MANY, WHOLE, setting.many_target, found, why))
    name = f"{setting.label}, {setting.ranks} ranks, direct"
    rows.append(_absolute(f"{name}: CPU seconds of the plane", "plane_cpu_s", setting.plane_cpu_s, found, why))
    rows.append(_cpu(f"{name}: CPU of all processes", found, why))
    rows += _measured(name, found, why, with_memory=setting.case in ("router", "tiny"))
    rows.append(_read_over_needed(f"{name}: bytes read over bytes needed", found, why))
    return rows


def _measured(name: str, found: dict[str, Rounds], why: dict[str, str], *, with_memory: bool) -> list[Row]:
    """Page faults of a step and peak memory, by kind of process: of the one that had most of them."""
    everybody = ("plane", "rank", "producer")
    memory = {"plane": 150.0, "rank": None, "producer": None} if with_memory else {}
    return [_absolute(f"{name}: page faults, {who}", f"{who}_faults", None, found, why) for who in everybody] + [
        _absolute(f"{name}: peak memory in MB, {who}", f"{who}_bytes", most, found, why, scale=1e-6)
        for who, most in memory.items()
    ]


def _read_over_needed(name: str, found: dict[str, Rounds], why: dict[str, str]) -> Row:
    """What ranks read of the storage over what their samples take there."""
    ours = OURS["direct"]
    if ours.name not in found:
        return skipped(name, why[ours.name])
    return Row(name=name, ours=median(took["read_bytes"] / took["needed_bytes"] for took in found[ours.name]))


def _cpu(name: str, found: dict[str, Rounds], why: dict[str, str]) -> Row:
    """CPU of a step against that of the previous version."""
    ours, before = OURS["direct"], BEFORE
    if ours.name not in found or before.name not in found:
        return skipped(name, why.get(before.name) or why[ours.name], unit="ms", rival_name=before.name)
    mine, theirs = (median(took["cpu_s"] for took in found[system.name]) for system in (ours, before))
    return faster(name, mine, theirs, before.name, target=1 / 0.6)


def _absolute(
    name: str, key: str, most: float | None, found: dict[str, Rounds], why: dict[str, str], scale: float = 1.0
) -> Row:
    ours = OURS["direct"]
    if ours.name not in found:
        return skipped(name, why[ours.name], target=most, bound="max")
    values = [took[key] * scale for took in found[ours.name]]
    return Row(name=name, ours=max(values) if key.endswith("bytes") else median(values), target=most, bound="max")


def _row(
    name: str, ours: System, rival: System, target: float | None, found: dict[str, Rounds], why: dict[str, str]
) -> Row:
    if ours.name not in found:
        return skipped(name, why[ours.name], unit="ms", rival_name=rival.name, target=target)
    mine = _typical(found[ours.name])
    if rival.name not in found:
        absent = skipped(name, why[rival.name], ours=mine * 1e3, unit="ms", rival_name=rival.name, target=target)
        return replace(absent, note=_spent(ours, found[ours.name]) if rival in (QUEUE, WHOLE) else "")
    both = (ours, rival) if rival in (QUEUE, WHOLE) else (rival,)
    note = "; ".join(_spent(system, found[system.name]) for system in both)
    return faster(name, mine, _typical(found[rival.name]), rival.name, target=target, note=note)


def _typical(rounds: Rounds) -> float:
    return median(took["seconds"] for took in rounds)


def _spent(system: System, rounds: Rounds) -> str:
    """Describe spread, CPU and memory."""
    spread = Spread.of([took["seconds"] for took in rounds])
    cpu, plane, ranks = (sum(took[f"{name}cpu_s"] for took in rounds) / len(rounds) for name in ("", "plane_", "rank_"))
    peaks = {name: max(took[f"{name}_bytes"] for took in rounds) / 1e6 for name in ("plane", "rank")}
    memory = f"a rank {peaks['rank']:,.0f} MB" + (f", in between {peaks['plane']:,.0f}" if peaks["plane"] else "")
    spent = f"CPU {cpu:.2f} s (plane {plane:.2f}, ranks {ranks:.2f})"
    return f"{system.name} {spread}, {spent}, {memory}"
