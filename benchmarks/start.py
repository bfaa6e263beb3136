"""Starting: what `import penstock`, opening a plane over tcp, connecting a rank and `penstock --help` take.

Each is a process of its own, with bytecode written before; they take turns, round by round. Names of `penstock` load
when they are used, so the cost of importing is in the first call. Times are CPU time, because imports are work: on an
idle machine that is the wall time. For --help it is that of the process.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable

from benchmarks import ROOT
from benchmarks.report import Row, Seconds
from penstock.server.plane_process import PlaneProcess

_PROGRAM = """
import json, sys, time
{before}
a = time.process_time_ns()
{timed}
b = time.process_time_ns()
ours = sum(name.split(".")[0] == "penstock" for name in sys.modules)
print(json.dumps([(b - a) / 1e9, ours]))
"""
_PUT = """import penstock as ps
with ps.open(sys.argv[1]) as plane, plane.group(f"prompt-{a}") as group:
    for reward in (0.0, 1.0):
        group.add(ps.Trajectory(turns=[ps.Turn([1, 2]), ps.Turn([3], logprobs=[-0.5])], reward=reward))"""
_HELP, _PUTS = "penstock --help", "a producer: import, open, put a group, close"
PROGRAMS = {
    "import penstock, beyond numpy": ("import numpy", "import penstock"),
    "every name of penstock, beyond numpy": (
        "import numpy",
        "import penstock as ps\nfor n in ps.__all__: getattr(ps, n)",
    ),
    "ps.open of tcp://": ("import numpy\nimport penstock as ps", "ps.open(sys.argv[1])"),
    "ps.connect of a rank": ("import numpy\nimport penstock as ps", "ps.connect(sys.argv[1], rank=0, world=1)"),
    _HELP: ("", ""),
    _PUTS: ("", _PUT),
}
TARGETS_MS = {
    "import penstock, beyond numpy": 80.0,
    "ps.open of tcp://": 120.0,
    "ps.connect of a rank": 120.0,
    _HELP: 250.0,
}
MODULES = 90
"""Of ours, in a process that put a group over tcp."""
Progress = Callable[[str], None]


def run(*, full: bool = False, progress: Progress = lambda _: None, rounds: int | None = None) -> list[Row]:
    """`rounds` is for tests."""
    rounds = rounds or (25 if full else 9)
    seconds: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    modules: dict[str, int] = {}
    serve = ["--ranks=1", "--seq-len=64", "--groups-per-step=65536", "--listen=tcp://127.0.0.1:*"]
    with (
        tempfile.TemporaryDirectory(prefix="penstock-start-") as folder,
        PlaneProcess([f"{folder}/run", *serve], stderr=subprocess.DEVNULL) as plane,
    ):
        for number in range(rounds + 1):  # the first one writes bytecode and reads files
            progress(f"round {number} of {rounds}")
            for name in PROGRAMS:
                took, modules[name] = _measured(name, plane.url)
                if number:
                    seconds[name].append(took)
    rows = [_row(name, Seconds(taken)) for name, taken in seconds.items()]
    name = "modules of ours in a producer that put a group"
    return [*rows, Row(name=name, ours=modules[_PUTS], target=MODULES, bound="max")]


def _row(name: str, seconds: Seconds) -> Row:
    target = TARGETS_MS.get(name)
    return Row(name=name, ours=seconds * 1e3, unit="ms", target=target, bound="max", ours_ms=seconds.spread)


def _measured(name: str, url: str) -> tuple[float, int]:
    """CPU seconds, and how many of our modules were loaded."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    code = "import sys\nsys.argv[1:] = ['--help']\nfrom penstock.cli import main\nmain()"
    if name != _HELP:
        before, timed = PROGRAMS[name]
        code = _PROGRAM.replace("{before}", before).replace("{timed}", timed)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", code, url]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd="/")
    if name == _HELP:
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        return now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime, 0
    took, loaded = json.loads(done.stdout.splitlines()[-1])
    return float(took), int(loaded)
