"""Look for stalls: run many rounds of the text step, systems in turns, and explain rounds far above the median.

  python scripts/find_stalls.py --rounds 100
  python scripts/find_stalls.py --rivals FOLDER/rivals/bin/python     TransferQueue too (scripts/setup_rivals)
  python scripts/find_stalls.py --disturb                             beside a process that syncs small files

For each slow round it prints what the plane recorded (turns, commits and writes above 100 ms), the longest put, and
what the kernel counted meanwhile: how long threads of the system could have run and got no core (schedstat), seconds
in which some task of the machine waited for a core, the disk or memory (/proc/pressure), and TCP timeouts. A slow round
in which none of these is about as long as the round waited for something of ours.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.disk import disk_folder  # noqa: E402
from benchmarks.programs.serving import tree_of  # noqa: E402
from benchmarks.running import Program, Wanted, started  # noqa: E402

_DISTURB = """
import os, sys, tempfile
with tempfile.TemporaryDirectory(dir=sys.argv[1]) as folder:
    number = 0
    while os.getppid() == int(sys.argv[2]):
        with open(f"{folder}/{number % 5000}", "wb") as file:
            file.write(bytes(8192))
            os.fsync(file.fileno())
        number += 1
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--case", default="fixed", choices=("fixed", "ragged"))
    parser.add_argument("--rivals", metavar="PYTHON", help="an interpreter with TransferQueue and Ray")
    parser.add_argument("--above", type=float, default=3.0, help="explain rounds above this many medians")
    parser.add_argument("--disturb", action="store_true", help="sync small files beside it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every round there, a line each")
    args = parser.parse_args()
    wanted = {name: Wanted(module="plane") for name in ("direct", "tcp")}
    if args.rivals:
        wanted["TransferQueue"] = Wanted(module="rivals", python=args.rivals, needs="transfer_queue", alone=True)
    with ExitStack() as opened:
        folder = opened.enter_context(disk_folder())
        programs, why = opened.enter_context(started(wanted, folder, 2))
        for name, reason in why.items():
            print(f"{name}: left out: {reason}")
        if args.disturb:
            opened.enter_context(_disturbance(folder))
        rounds = _run(programs, args)
    _report(rounds, args.above)


@contextmanager
def _disturbance(folder: Path) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", _DISTURB, str(folder), str(os.getpid())])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _run(programs: dict[str, Program], args: argparse.Namespace) -> list[dict[str, Any]]:
    rounds = []
    for number in range(args.rounds + 1):
        for name, program in programs.items():
            system = "queue" if name == "TransferQueue" else "plane"
            before, began = _counted(program.pid), time.time()
            took = program.round(system=system, case=args.case, ranks=2, transport=name, round=number)
            after = _counted(program.pid)
            kernel = {key: after[key] - before[key] for key in after}
            one = {"system": name, "round": number, "at": began, "load": os.getloadavg()[0], **took, **kernel}
            if args.json:
                with args.json.open("a") as file:
                    file.write(json.dumps(one) + "\n")
            if number:  # the first one opens and maps everything
                rounds.append(one)
    return rounds


def _counted(root: int) -> dict[str, float]:
    """Seconds that some task waited, by what for, that threads of a system waited for a core, and TCP timeouts."""
    found = {"waited_own_s": _waited_for_core_s(root)}
    for kind in ("cpu", "io", "memory"):
        try:
            line = Path(f"/proc/pressure/{kind}").read_text().splitlines()[0]
        except OSError:  # a kernel without pressure information
            continue
        found[f"waited_{kind}_s"] = int(line.rpartition("=")[2]) / 1e6
    names, values = (line.split() for line in Path("/proc/net/netstat").read_text().splitlines()[:2])
    return found | {"tcp_timeouts": float(values[names.index("TCPTimeouts")])}


def _waited_for_core_s(root: int) -> float:
    """Seconds that the threads of a process and its descendants could have run and did not."""
    total_ns = 0
    for pid in tree_of(root):
        for stat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with suppress(OSError):
                total_ns += int(stat.read_text().split()[1])
    return total_ns / 1e9


def _report(rounds: list[dict[str, Any]], above: float) -> None:
    for name in dict.fromkeys(one["system"] for one in rounds):
        mine = [one for one in rounds if one["system"] == name]
        times = sorted(one["seconds"] * 1e3 for one in mine)
        usual, cpu = median(times), median(one["cpu_s"] for one in mine) * 1e3
        p95 = times[int(0.95 * (len(times) - 1))]
        print(
            f"{name}: {len(times)} rounds, min {times[0]:.0f}, median {usual:.0f}, p95 {p95:.0f}, max {times[-1]:.0f} "
            f"ms, CPU {cpu:.0f} ms"
        )
        for one in sorted(mine, key=lambda one: -one["seconds"]):
            if one["seconds"] * 1e3 > above * usual:
                _explain(one)


def _explain(one: dict[str, Any]) -> None:
    waited = ", ".join(f"{key[7:-2]} {one[key]:.2f}" for key in one if key.startswith("waited_") and key[7:10] != "own")
    clock = time.strftime("%H:%M:%S", time.localtime(one["at"]))
    print(
        f"  round {one['round']} at {clock}: {one['seconds'] * 1e3:.0f} ms, CPU {one['cpu_s'] * 1e3:.0f} ms, longest "
        f"put {one['longest_put_s'] * 1e3:.0f} ms; its threads waited {one['waited_own_s']:.2f} s for a core; some of "
        f"the machine waited, s: {waited}; TCP timeouts {one['tcp_timeouts']:.0f}; load {one['load']:.1f}"
    )
    for line in one["slow"]:
        print(f"    {line}")


if __name__ == "__main__":
    main()
