"""Nothing received is ever executed: the source has no way to, and decoding only decodes. Two modules listen."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent
BANNED_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
BANNED_CALLS = {"eval", "exec", "__import__", "compile"}
UNSAFE_KEYWORDS = {"allow_pickle": True, "weights_only": False}
LOADERS = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}
"""What must be said where these are called, whatever the default of the version at hand is."""


def violations(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        where = f"{path.name}:{getattr(node, 'lineno', 0)}"
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in BANNED_CALLS:
                yield f"{where}: {node.func.id}()"
            needed = LOADERS.get(ast.unparse(node.func))
            if needed is not None and needed not in [(k.arg, getattr(k.value, "value", None)) for k in node.keywords]:
                yield f"{where}: {ast.unparse(node.func)} without {needed[0]}={needed[1]}"
            for keyword in node.keywords:
                value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                if keyword.arg in UNSAFE_KEYWORDS and value is UNSAFE_KEYWORDS[keyword.arg]:
                    yield f"{where}: {keyword.arg}={value}"
        for name in names:
            if name.split(".")[0] in BANNED_MODULES:
                yield f"{where}: import {name}"


def test_source_neither_unpickles_nor_evaluates() -> None:
    files = list((ROOT / "src").rglob("*.py"))
    assert len(files) > 20
    assert [found for path in files for found in violations(path)] == []


def test_the_search_finds_what_it_looks_for(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text(
        "import pickle\nfrom marshal import loads\neval('1')\nload(x, allow_pickle=True)\ntorch.load(x)\nmodel.eval()\n"
    )
    assert [found.split(":")[1] for found in violations(path)] == ["1", "2", "3", "4", "5"]


LISTENING = {
    "transport/sockets.py": "the plane's port, with keys beyond loopback",
    "server/http_server.py": "every page and the HTTP API, with limits, deadlines and tokens",
    "demo/launch.py": "looks for a free port, and whether an address is free",
    "commands/doctor.py": "looks whether loopback works",
    "testing/trl_cpu.py": "a stand-in for vLLM, on loopback",
}
"""All modules that bind an address: limits and keys have two places. An integration has no server of its own."""


def listens(path: Path) -> bool:
    makes = {"bind", "bind_to_random_port", "create_server", "start_server", "start_unix_server", "run_server"}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in makes or ast.unparse(node.func) in ("uvicorn.run", "uvicorn.Config"):
                return True
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [getattr(node, "module", "") or "", *(alias.name for alias in node.names)]
            if {"http.server", "socketserver", "wsgiref", "xmlrpc.server"} & set(names):
                return True
    return False


def test_two_modules_listen_and_no_others() -> None:
    source = ROOT / "src" / "penstock"
    assert {str(path.relative_to(source)) for path in source.rglob("*.py") if listens(path)} == LISTENING.keys()


PROGRAM = """
import sys
from pathlib import Path
import penstock as ps
from penstock.frames import read_head
from penstock.errors import CorruptFrame

frames = [path.read_bytes() for path in sorted(Path(sys.argv[1]).glob("v*/*.frame"))]
assert frames
for frame in frames:  # what is imported on first use is imported now
    list(ps.decode(frame))

FORBIDDEN = ("pickle.", "marshal.", "exec", "compile", "import", "open", "socket.", "subprocess.", "os.", "ctypes.")
seen = []

def hook(event, args):
    if event.startswith(FORBIDDEN):
        seen.append((event, str(args)[:200]))

sys.addaudithook(hook)
for frame in frames:
    read_head(frame)
    list(ps.decode(frame))
    try:
        ps.decode(frame[:-1])
    except CorruptFrame:
        pass
print(seen)
"""


def test_decoding_executes_imports_and_opens_nothing() -> None:
    command = [sys.executable, "-c", PROGRAM, str(ROOT / "tests" / "golden")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
