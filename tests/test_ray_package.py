"""What the Ray side may use of Ray, read from its source; no Ray is needed for this."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "src" / "penstock"
TOUCHING = {"calls.py", "local_cluster.py"}
"""The modules of `penstock.ray` that call Ray."""


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((PACKAGE / "ray").glob("*.py")):
        yield path, ast.parse(path.read_text())


def imports_of_ray(tree: ast.AST) -> list[ast.Import | ast.ImportFrom]:
    found: list[ast.Import | ast.ImportFrom] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(name.name.split(".")[0] == "ray" for name in node.names):
            found.append(node)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ray":
            found.append(node)
    return found


def test_nothing_of_rays_api_with_an_underscore_is_used() -> None:
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                root: ast.expr = node.value
                while isinstance(root, ast.Attribute):
                    root = root.value
                assert not (isinstance(root, ast.Name) and root.id == "ray"), f"{path}:{node.lineno}"
            if isinstance(node, ast.keyword) and node.arg:
                assert not node.arg.startswith("_"), f"{path}:{node.value.lineno}"
        for found in imports_of_ray(tree):
            names = [name.name for name in found.names] + [getattr(found, "module", "") or ""]
            assert not any(part.startswith("_") for name in names for part in name.split(".")), f"{path}:{found.lineno}"


def test_ray_is_called_from_two_modules_and_imported_only_where_it_is_called() -> None:
    for path, tree in trees():
        assert bool(imports_of_ray(tree)) == (path.name in TOUCHING), path
        assert not any(node in tree.body for node in imports_of_ray(tree)), f"{path}: imported with the module"


def test_no_module_of_the_package_imports_ray_when_it_is_imported() -> None:
    for path in PACKAGE.rglob("*.py"):
        if "ways" not in path.parts:  # programs of rivals
            text = path.read_text()
            if re.search(r"\b(import|from)\b.*\bray\b", text):
                tree = ast.parse(text)
                assert not any(node in tree.body for node in imports_of_ray(tree)), path
