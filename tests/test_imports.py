"""Packages are entered by their `__init__`, and a process loads only what it uses."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import penstock as ps

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "penstock"
STUBS = sorted(path.parent.name for path in SRC.glob("*/__init__.pyi"))
PAST_THE_DOOR = 20
"""Imports that name a module inside another package. The demo and the integrations have no names of their own."""

PRODUCER = """
import sys
import penstock as ps
with ps.open(sys.argv[1]) as plane, plane.group("prompt-1") as group:
    for reward in (0.0, 1.0):
        group.add(ps.Trajectory(turns=[ps.Turn([1, 2]), ps.Turn([3], logprobs=[-0.5])], reward=reward))
print(*sorted(name for name in sys.modules))
"""


def imports_past_the_door() -> list[str]:
    found = []
    for path in SRC.rglob("*.py"):
        own = path.relative_to(SRC).parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                parts = node.module.split(".")
                if parts[0] == "penstock" and len(parts) > 2 and parts[1] != own:
                    found.append(f"{path.relative_to(SRC)}: {node.module}")
    return found


def test_packages_import_one_another_through_what_they_export() -> None:
    found = imports_past_the_door()
    assert len(found) <= PAST_THE_DOOR, "\n".join(found)


@pytest.mark.parametrize("name", STUBS)
def test_every_name_of_a_stub_is_there(name: str) -> None:
    package = importlib.import_module(f"penstock.{name}")
    assert package.__doc__ and package.__all__ == dir(package)
    for exported in package.__all__:
        assert getattr(package, exported) is not None
        # A function of a module's name would hide the module: `import penstock.frames.layout as x` once failed.
        assert not (SRC / name / f"{exported}.py").exists(), f"penstock.{name}.{exported} hides a module"


def test_a_name_that_is_not_exported_is_an_attribute_error() -> None:
    package = importlib.import_module("penstock.plane")
    with pytest.raises(AttributeError, match=r"module 'penstock.plane' has no attribute 'nonsense'"):
        _ = package.nonsense


def test_a_producer_loads_no_plane_packer_or_database() -> None:
    with ps.open("memory:", ranks=1, seq_len=16, groups_per_step=1, listen=["tcp://127.0.0.1:*"]) as plane:
        command = [sys.executable, "-c", PRODUCER, plane.url]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    ours = [name for name in loaded if name.partition(".")[0] == "penstock"]
    assert len(ours) <= 90, ours
    assert not {"sqlite3", "torch", "uvicorn", "psycopg", "obstore"} & set(loaded)
    packages = {name.split(".")[1] for name in ours if "." in name}
    assert not {"plane", "packing", "replay", "storage", "server", "runs", "train", "view"} & packages
