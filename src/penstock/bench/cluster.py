"""One step through a plane alone, through keepers and through a Ray cluster: its time, and what passes the plane.

512 samples of 4,096 tokens as text, and with the experts that a router chose ([T, 48, 8] uint8; 128 samples unless
`--full`). From arrays in two producers to tensors on two ranks, as `path` has it. Beside the time stand the puts' time,
the CPU seconds of the plane's process and the bytes over its connections, as the kernel counts them. `ray://` needs an
interpreter that has Ray and Penstock (`--ray`); TransferQueue and bare Ray references stand beside it (`--rivals`). On
one machine a cluster does more work on the same cores: its ratios are printed as they are, without a target.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from penstock.bench.disk import disk_folder
from penstock.bench.path import Rounds
from penstock.bench.programs import Program, Wanted, WayFailed, started
from penstock.bench.report import Row, faster, skipped

RANKS = 2
OURS = ("tcp", "shm", "keepers-1", "keepers-2", "ray-1", "ray-2")
RIVALS = {"queue": "TransferQueue", "refs": "bare Ray refs"}
NAMES = {
    "tcp": "tcp",
    "shm": "shm",
    "keepers-1": "keepers, copies=1",
    "keepers-2": "keepers, copies=2",
    "ray-1": "ray://, copies=1",
    "ray-2": "ray://, copies=2",
}
MOST_SHARE, MOST_CPU_S = 0.001, 0.1
"""Of the payload, through the plane; of its CPU, per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    case: str
    label: str
    payload_bytes: int
    """Of the arrays that producers hold."""
    rounds: int = 2


def settings(*, full: bool) -> list[Setting]:
    tokens = 512 * 4096
    text = Setting(case="fixed", label="text 512 x 4k", payload_bytes=tokens * 9)
    if full:
        return [text, Setting(case="router", label="router replay 512 x 4k", payload_bytes=tokens * (9 + 48 * 8))]
    return [
        text,
        Setting(case="router-small", label="router replay 128 x 4k", payload_bytes=tokens // 4 * (9 + 48 * 8)),
    ]


def run(
    *,
    full: bool,
    progress: Callable[[str], None],
    rivals: str | None = None,
    ray: str | None = None,
    only: list[Setting] | None = None,
) -> list[Row]:
    """`ray` is an interpreter that has Ray and Penstock."""
    wanted = {
        "ours": Wanted(module="cluster", python=ray or sys.executable, alone=ray is not None),
        "rivals": Wanted(module="rivals", python=rivals, absent="no --rivals interpreter", needs="ray", alone=True),
    }
    rows = []
    with disk_folder() as folder, started(wanted, folder, RANKS) as (programs, why):
        for setting in settings(full=full) if only is None else only:
            found = {way: _measure(setting, way, programs, why, progress) for way in [*OURS, *RIVALS]}
            rows += _rows(setting, found, why)
    return rows


def _measure(
    setting: Setting, way: str, programs: dict[str, Program], why: dict[str, str], progress: Callable[[str], None]
) -> Rounds:
    program = programs.get("rivals" if way in RIVALS else "ours")
    if program is None:
        why.setdefault(way, why["rivals" if way in RIVALS else "ours"])
        return []
    if way not in program.offers:
        why.setdefault(way, "no --ray interpreter" if way.startswith("ray") else f"{way} is not installed there")
        return []
    found: Rounds = []
    for number in range(1, setting.rounds + 1):
        progress(f"{setting.label}, round {number} of {setting.rounds}: {way}")
        try:
            found.append(program.round(way=way, case=setting.case, ranks=RANKS, round=number))
        except WayFailed as error:
            why[way] = str(error)
            break
    return found


def _rows(setting: Setting, found: dict[str, Rounds], why: dict[str, str]) -> list[Row]:
    rows = []
    for way in OURS:
        name = f"{setting.label}, {NAMES[way]}"
        if not found[way]:
            rows.append(skipped(name, why[way], unit="ms"))
            continue
        rows += [_against(name, found[way], rival, found, why) for rival in RIVALS]
        if way not in ("tcp", "shm"):
            rows += _through_the_plane(setting, name, found[way])
    return rows


def _against(name: str, mine: Rounds, rival: str, found: dict[str, Rounds], why: dict[str, str]) -> Row:
    best = min(mine, key=lambda took: took["seconds"])
    note = (
        f"puts {best['put_s'] * 1e3:,.0f} ms; CPU {best['cpu_s']:.2f} s, the plane {best['plane_cpu_s']:.2f}; "
        f"through the plane {best['plane_in'] / 1e6:,.2f} MB in, {best['plane_out'] / 1e6:,.2f} MB out"
    )
    if not found[rival]:
        absent = skipped(name, why[rival], ours=best["seconds"] * 1e3, unit="ms", rival_name=RIVALS[rival])
        return replace(absent, note=note if rival == "queue" else "")
    theirs = min(took["seconds"] for took in found[rival])
    return faster(name, best["seconds"], theirs, RIVALS[rival], note=note if rival == "queue" else "")


def _through_the_plane(setting: Setting, name: str, rounds: Rounds) -> list[Row]:
    share = min(took["plane_in"] + took["plane_out"] for took in rounds) / setting.payload_bytes
    cpu = min(took["plane_cpu_s"] for took in rounds)
    return [
        Row(
            name=f"{name}: bytes through the plane over the payload",
            ours=share * 100,
            unit="%",
            target=MOST_SHARE * 100,
            bound="max",
            note=f"of {setting.payload_bytes / 1e6:,.0f} MB",
        ),
        Row(name=f"{name}: CPU of the plane for the step", ours=cpu, unit="s", target=MOST_CPU_S, bound="max"),
    ]
