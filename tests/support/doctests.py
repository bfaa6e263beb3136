"""A pytest plugin: of `src`, only modules with examples are collected.

Each worker of `make test` imports what it collects, and some integrations take seconds to import.
"""

from __future__ import annotations

from pathlib import Path

_SRC = Path(__file__).parents[2] / "src"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    is_module = collection_path.suffix == ".py" and collection_path.is_relative_to(_SRC)
    return True if is_module and ">>> " not in collection_path.read_text(encoding="utf-8") else None
