"""Types of messages and files are known to msgspec before any thread needs them.

msgspec fills in what it knows of a type when it first decodes one. Two threads that are first at once crash it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import penstock

PACKAGE = Path(penstock.__file__).parent
ONE_THREAD = ("bench", "ray", "testing")
"""Packages that decode in the main thread, or for tests."""


def decoded_types(path: Path) -> Iterator[str]:
    """Each `msgspec.X.decode(..., type=NAME)` of a module; builtins such as `dict[str, str]` need no filling in."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)) if "msgspec" in text and ".decode(" in text else ():
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("msgspec.json.decode", "msgspec.msgpack.decode"):
            for word in node.keywords:
                if word.arg == "type" and isinstance(word.value, ast.Name):
                    yield f"{path.relative_to(PACKAGE)}:{node.lineno}: {word.value.id}"


def test_decoders_of_our_types_are_made_at_import() -> None:
    modules = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in ONE_THREAD]
    assert len(modules) > 100
    found = [words for path in modules for words in decoded_types(path)]
    assert not found, "use a msgspec Decoder made at import"
