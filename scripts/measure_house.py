"""Measure the repository: size, imports, function lengths, comments, the words that STYLE asks to drop.

    .venv/bin/python scripts/measure_house.py                       this checkout
    .venv/bin/python scripts/measure_house.py ../before --json      another one, for programs
    .venv/bin/python scripts/measure_house.py --docstrings 30       docstrings chosen by a seed, to read
    .venv/bin/python scripts/measure_house.py --docstrings 30 --before ../before      the same functions in both

Everything but the wheel and the producer is read from the files, so a checkout of any commit can be measured.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TICS = (
    *("in words", "so many", "anew", "be it", "of which", "no more", "is said", "hears of", "nobody"),
    *("given back", "gives back", "give back", "the way of", "vouch", "nursery", "desk", "whoever"),
)
"""STYLE.md, section Voice, names them as habits to drop."""
PRODUCER = """
import sys, time
began = time.perf_counter()
import penstock as ps
with ps.open(sys.argv[1]) as plane, plane.group("prompt-1") as group:
    for reward in (0.0, 1.0):
        group.add(ps.Trajectory(turns=[ps.Turn([1, 2]), ps.Turn([3], logprobs=[-0.5])], reward=reward))
ours = [name for name in sys.modules if name.partition(".")[0] == "penstock"]
print(len(ours), (time.perf_counter() - began) * 1000)
"""


def files(root: Path, folder: str, kinds: tuple[str, ...] = (".py",)) -> list[Path]:
    return sorted(p for p in (root / folder).rglob("*") if p.suffix in kinds and "__pycache__" not in p.parts)


def size(root: Path, folder: str, kinds: tuple[str, ...] = (".py",)) -> dict[str, int]:
    found = files(root, folder, kinds)
    return {"files": len(found), "lines": sum(len(path.read_text().splitlines()) for path in found)}


def past_the_door(root: Path) -> int:
    """Imports of a module inside another package, instead of a name that the package exports."""
    package, found = root / "src" / "penstock", 0
    for path in files(root, "src/penstock"):
        own = path.relative_to(package).parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                parts = node.module.split(".")
                if parts[0] == "penstock" and len(parts) > 1 and parts[1] != own:
                    inside = [alias for alias in node.names if (package / parts[1] / f"{alias.name}.py").exists()]
                    found += 1 if len(parts) > 2 else len(inside) if (package / parts[1]).is_dir() else 0
    return found


def function_lengths(root: Path) -> dict[str, int]:
    """Lines of the bodies of functions, without their docstrings."""
    lengths = sorted(
        (body[-1].end_lineno or 0) - body[0].lineno + 1
        for path in files(root, "src/penstock")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for body in [node.body[1:] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body]
    )
    at = {f"p{p}": lengths[len(lengths) * p // 100] for p in (50, 90, 99)}
    return {"functions": len(lengths), **at, "max": lengths[-1], "over_50": sum(length > 50 for length in lengths)}


def comment_share(root: Path) -> float:
    """Percent of the package's lines that have a comment; rulers and notes to tools do not count."""
    comments = lines = 0
    for path in files(root, "src/penstock"):
        text = path.read_text()
        lines += len(text.splitlines())
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT and not re.match(r"#\s*(-{5,}|noqa|type:|!)", token.string):
                comments += 1
    return round(100 * comments / lines, 2)


def tic_words(root: Path) -> dict[str, int]:
    texts = [p.read_text().lower() for p in (*files(root, "src"), *files(root, "docs", (".md",)))]
    return {tic: sum(len(re.findall(rf"\b{tic}", text)) for text in texts) for tic in TICS}


def docstrings(root: Path, number: int, seed: int = 28) -> list[tuple[str, str]]:
    """Docstrings of modules, classes and functions, chosen by a seed."""
    found = list(_docstrings(root))
    return sorted(random.Random(seed).sample(found, min(number, len(found))))


def _docstrings(root: Path) -> Iterator[tuple[str, str]]:
    for path in files(root, "src/penstock"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                name = "" if isinstance(node, ast.Module) else f"::{node.name}"
                yield f"{path.relative_to(root / 'src')}{name}", text.split("\n\n")[0].replace("\n", " ")


def beside(before: Path, after: Path, number: int, seed: int = 28) -> list[tuple[str, str, str]]:
    """Docstrings of classes and functions that both checkouts have once, wherever they moved, chosen by a seed."""
    texts = []
    for root in (before, after):
        by_name: dict[str, list[str]] = {}
        for place, text in _docstrings(root):
            by_name.setdefault(place.partition("::")[2], []).append(text)
        texts.append({name: found[0] for name, found in by_name.items() if name and len(found) == 1})
    shared = sorted(texts[0].keys() & texts[1].keys())
    return [(name, texts[0][name], texts[1][name]) for name in sorted(random.Random(seed).sample(shared, number))]


def producer(root: Path) -> dict[str, float]:
    """Our modules and the time of a process that opens tcp:// and puts one group; the best of three."""
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": ""}
    settings = ("--ranks=1", "--seq-len=16", "--groups-per-step=1", "--listen=tcp://127.0.0.1:*", "--json")
    command = [sys.executable, "-m", "penstock.cli", "serve", "memory:", *settings, f"--parent={os.getpid()}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as served:
        assert served.stdout is not None
        url = json.loads(served.stdout.readline())["urls"][0]
        rounds = []
        for _ in range(3):
            done = subprocess.run(
                [sys.executable, "-c", PRODUCER, url], env=environment, capture_output=True, text=True, check=True
            )
            rounds.append([float(number) for number in done.stdout.split()])
        served.terminate()
    return {"modules": min(one[0] for one in rounds), "ms": round(min(one[1] for one in rounds))}


def wheel_bytes(root: Path) -> int:
    with tempfile.TemporaryDirectory() as folder:
        uv = Path(sys.executable).parent / "uv"
        command = [str(uv), "build", "--wheel", "--quiet", "--out-dir", folder, str(root)]
        subprocess.run(command, check=True)
        return next(Path(folder).glob("*.whl")).stat().st_size


def measure(root: Path) -> dict[str, Any]:
    return {
        "package": size(root, "src"),
        "tests": size(root, "tests"),
        "benchmarks": size(root, "benchmarks"),
        "docs": size(root, "docs", (".md",)),
        "imports_past_a_door": past_the_door(root),
        "function_lines": function_lengths(root),
        "comment_percent": comment_share(root),
        "tic_words": tic_words(root),
        "tic_words_all": sum(tic_words(root).values()),
        "tcp_producer": producer(root),
        "wheel_bytes": wheel_bytes(root),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="a checkout; this one by default")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--docstrings", type=int, metavar="N", help="print N docstrings chosen by a seed instead")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="with --docstrings: show both versions")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    if arguments.docstrings and arguments.before:
        for name, old, new in beside(arguments.before.resolve(), root, arguments.docstrings):
            print(f"{name}\n  - {old}\n  + {new}\n")
        return 0
    if arguments.docstrings:
        for name, text in docstrings(root, arguments.docstrings):
            print(f"{name}\n    {text}\n")
        return 0
    found = measure(root)
    print(json.dumps(found, indent=1) if arguments.json else "\n".join(f"{k}: {v}" for k, v in found.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
