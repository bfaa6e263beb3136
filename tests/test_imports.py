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
STUBS = sorted(".".join(path.parent.relative_to(SRC.parent).parts) for path in SRC.rglob("__init__.pyi"))
PAST_THE_DOOR = 25
"""Imports that name a module inside another package. The demo and the integrations have no names of their own."""

PRODUCER = """
import sys
import penstock as ps
with ps.open(sys.argv[1]) as plane, plane.group("prompt-1") as group:
    for reward in (0.0, 1.0):
        group.add(ps.Trajectory(turns=[ps.Turn([1, 2]), ps.Turn([3], logprobs=[-0.5])], reward=reward))
print(*sorted(name for name in sys.modules))
"""
RANK = """
import sys
import penstock as ps
with ps.connect(sys.argv[1], rank=0, world=1) as source:
    assert source.step().loss_tokens == 1
print(*sorted(name for name in sys.modules))
"""
SLOW = {"asyncio", "ssl", "tomllib", "difflib", "sqlite3", "torch", "uvicorn", "psycopg", "obstore"}
"""What takes milliseconds to import, and neither a producer nor a rank over tcp needs."""


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
    package = importlib.import_module(name)
    assert package.__doc__ and package.__all__ == dir(package)
    for exported in package.__all__:
        assert getattr(package, exported) is not None
        # A function of a module's name would hide the module: `import penstock.frames.layout as x` once failed.
        assert not (SRC.parent / name.replace(".", "/") / f"{exported}.py").exists(), (
            f"{name}.{exported} hides a module"
        )


def test_a_name_that_is_not_exported_is_an_attribute_error() -> None:
    package = importlib.import_module("penstock.plane")
    with pytest.raises(AttributeError, match=r"module 'penstock.plane' has no attribute 'nonsense'"):
        _ = package.nonsense


@pytest.mark.parametrize("name", STUBS)
def test_a_stub_is_read_as_python_reads_it(name: str) -> None:
    """`penstock.lazy` splits lines instead of parsing them, which takes a producer 3 ms."""
    stub = ast.parse((SRC.parent / name.replace(".", "/") / "__init__.pyi").read_text())
    nodes = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    assert len(nodes) == len(stub.body), "a stub holds imports only"
    package = importlib.import_module(name)
    assert package.__all__ == sorted(alias.asname or alias.name for node in nodes for alias in node.names)
    for node in nodes:
        for alias in node.names:
            own = importlib.import_module(str(node.module))
            assert getattr(package, alias.asname or alias.name) is getattr(own, alias.name)


def loaded_by(program: str, url: str) -> tuple[set[str], set[str]]:
    """Run a program with the address of a plane. Returns all modules that it loaded, and those of ours."""
    done = subprocess.run([sys.executable, "-c", program, url], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    return loaded, {name for name in loaded if name.partition(".")[0] == "penstock"}


@pytest.mark.process
def test_a_producer_loads_no_plane_packer_or_database() -> None:
    with ps.open("memory:", ranks=1, seq_len=16, groups_per_step=1, listen=["tcp://127.0.0.1:*"]) as plane:
        loaded, ours = loaded_by(PRODUCER, plane.url)
    assert len(ours) <= 84, sorted(ours)
    assert not SLOW & loaded
    packages = {name.split(".")[1] for name in ours if "." in name}
    assert not {"plane", "packing", "replay", "storage", "server", "runs", "train", "view"} & packages


@pytest.mark.process
def test_a_rank_loads_no_producer_and_no_planner(tmp_path: Path) -> None:
    with ps.open(tmp_path, ranks=1, seq_len=16, groups_per_step=1, listen=["tcp://127.0.0.1:*"]) as plane:
        plane.put([ps.Sample(id="a", group="g", token_ids=[1, 2], loss_mask=[0, 1], logprobs=[0.0, -1.0])])
        loaded, ours = loaded_by(RANK, plane.url)
    assert len(ours) <= 84, sorted(ours)
    assert not SLOW & loaded
    assert "penstock.storage.folder" in ours  # it reads the samples itself
    packages = {name.split(".")[1] for name in ours if "." in name}
    assert not {"plane", "convert", "capture", "replay", "server", "runs", "train", "view"} & packages
    assert not {"penstock.client.plane", "penstock.packing.planning", "penstock.storage.objects"} & ours


@pytest.mark.process
def test_the_command_line_loads_no_numpy_for_its_help() -> None:
    code = "import sys; from penstock.cli import build_parser; build_parser('').format_help(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"numpy", "zmq", "msgspec", *SLOW} & set(done.stdout.split())
