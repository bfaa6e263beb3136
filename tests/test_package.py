"""What a user gets from `import penstock`: these names, quickly, and nothing heavy behind them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import penstock as ps

pytestmark = pytest.mark.process

NAMES = [
    "AssetStore",
    "Column",
    "DifficultyPools",
    "Fifo",
    "Group",
    "Lifo",
    "MicroBatch",
    "MinSize",
    "Paced",
    "PenstockError",
    "Plane",
    "Prioritized",
    "Sample",
    "SamplesPerInsert",
    "Sequential",
    "Source",
    "Step",
    "Table",
    "Thompson",
    "Timeouts",
    "TokenExporter",
    "Trajectory",
    "Turn",
    "Uniform",
    "WindowedFifo",
    "__version__",
    "connect",
    "decode",
    "encode",
    "grpo",
    "open",
    "pack",
    "to_torch",
]
"""Adding a name is a promise; removing one breaks somebody."""

HEAVY = ("torch", "ray", "PIL", "zmq", "transformers", "pyarrow", "matplotlib", "hypothesis", "asyncio", "sqlite3")


def test_public_names_are_these() -> None:
    assert dir(ps) == sorted(NAMES)
    assert all(hasattr(ps, name) for name in NAMES)


def run_python(program: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True)
    return done.stdout


def test_import_is_light() -> None:
    loaded = run_python("import sys, penstock; print(*sys.modules)").split()
    assert not set(HEAVY) & set(loaded)


TIMED = """
from time import process_time as now
start = now()
import numpy
middle = now()
import penstock
print(middle - start, now() - start)
"""


def test_import_takes_a_quarter_of_a_second_at_most() -> None:
    # CPU seconds, the best of five. On a machine so busy that numpy alone takes more than its usual tenth of a
    # second, the limit grows with it: what else runs must not decide.
    runs = [tuple(map(float, run_python(TIMED).split())) for _ in range(5)]
    assert min(whole / max(1.0, numpy / 0.1) for numpy, whole in runs) <= 0.25


def test_import_prints_and_starts_nothing() -> None:
    program = "import threading, penstock; print(threading.active_count())"
    assert run_python(program) == "1\n"


def test_package_ships_its_types() -> None:
    assert (Path(ps.__file__).parent / "py.typed").is_file()
