"""The caps of the house style, for the package and its scripts: no function above 50 lines."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FUNCTION_LINES = 50
ALLOWED: dict[str, str] = {}
"""`path::function` -> why it may be longer. Splitting is almost always better."""
REPEATING = ("commands", "demo", "testing", "config")
"""Packages whose modules may be named as what they show or serve."""
COMMON = ("__init__.py", "settings.py", "interface.py")
"""Names that say what a module is; its package says whose."""


def sources() -> list[Path]:
    return sorted(path for folder in ("src", "scripts", "benchmarks") for path in (ROOT / folder).rglob("*.py"))


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """What can hold a function: expressions, most of a tree, are left out."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, name, ()):
            yield inner
            yield from statements(inner)


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Each function with the lines of its body, without its docstring."""
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body
            yield node.name, (body[-1].end_lineno or 0) - body[0].lineno + 1


def test_no_function_is_longer_than_the_cap() -> None:
    long = {}
    for path in sources():
        name = path.relative_to(ROOT).as_posix()
        for function, lines in functions(path):
            if lines > FUNCTION_LINES and f"{name}::{function}" not in ALLOWED:
                long[f"{name}::{function}"] = lines
    assert not long, f"above {FUNCTION_LINES} lines; split by idea: {long}"


def test_what_is_allowed_still_needs_it() -> None:
    for name in ALLOWED:
        path, _, function = name.partition("::")
        assert dict(functions(ROOT / path))[function] > FUNCTION_LINES, f"{name} is within the cap; remove it here"


def test_no_two_modules_of_the_core_have_one_name() -> None:
    core = [p for p in (ROOT / "src" / "penstock").rglob("*.py") if p.relative_to(ROOT).parts[2] not in REPEATING]
    names = Counter(path.name for path in core if path.name not in COMMON)
    assert not [name for name, count in names.items() if count > 1]
