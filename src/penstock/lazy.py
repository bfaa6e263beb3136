"""Lazy exports: a package's names are imported when they are first used.

A package lists its exports once, in `__init__.pyi`, as ordinary imports, one `from module import name as name` to a
line. Type checkers and editors read them there, and so does `exports_of`. A producer that needs three names of
`penstock.protocol` loads three of its modules, not all.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable


def exports_of(package: str, file: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for a package, from the stub beside its `__init__`."""
    # Split, not parsed: `ast.parse` takes 3 ms for the packages of a producer. tests/test_imports.py compares the two.
    with open(f"{file}i", encoding="utf-8") as stub:  # noqa: PTH123 - pathlib takes 5 ms to import
        lines = [line.split() for line in stub if line.startswith("from ")]
    homes = {words[5]: (words[1], words[3]) for words in lines}

    def load(name: str) -> object:
        if name not in homes:
            # With `name` and `obj`, Python's traceback adds "Did you mean ...?".
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        module, original = homes[name]
        value: object = getattr(importlib.import_module(module), original)
        setattr(sys.modules[package], name, value)  # the next access does not come here
        return value

    return load, lambda: sorted(homes), sorted(homes)
