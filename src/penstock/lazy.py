"""Lazy exports: a package's names are imported when they are first used.

A package lists its exports once, in `__init__.pyi`, as ordinary imports. Type checkers and editors read them there, and
so does `exports_of`. A producer that needs three names of `penstock.protocol` loads three of its modules, not all.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path


def exports_of(package: str, file: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for a package, from the stub beside its `__init__`."""
    homes = {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in ast.parse(Path(file).with_suffix(".pyi").read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, original = homes[name]
        value: object = getattr(importlib.import_module(module), original)
        setattr(sys.modules[package], name, value)  # the next access does not come here
        return value

    return load, lambda: sorted(homes), sorted(homes)
