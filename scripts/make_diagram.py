"""Draw which stage imports which, from the import graph, into docs/internals/architecture.md.

    .venv/bin/python scripts/make_diagram.py            write it
    .venv/bin/python scripts/make_diagram.py --check    exit 1 when the page is out of date

An arrow points from a stage to one that imports it, in the direction of the data. Arrows that follow from others are
left out: where `convert` imports `capture` and `capture` imports `arrays`, no arrow says that `convert` may use
`arrays` as well.
"""

from __future__ import annotations

import sys
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "internals" / "architecture.md"
START, END = "<!-- diagram: made by scripts/make_diagram.py -->", "<!-- end of diagram -->"
LEFT_OUT = {
    "version",
    "errors",
    "atomic",
    "config",
    "extras",
    "lazy",
    "notebook",
    "__main__",
}  # below every stage, or only a name


def edges() -> set[tuple[str, str]]:
    """(stage, stage that imports it) of all stages."""
    graph = grimp.build_graph("penstock", cache_dir=None)
    stages = {module.split(".")[1] for module in graph.modules if "." in module} - LEFT_OUT
    found = set()
    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            pair = _stage(imported), _stage(importer)
            if pair[0] != pair[1] and set(pair) <= stages:
                found.add(pair)
    return found


def _stage(module: str) -> str:
    return f"{module}.".split(".")[1]


def reduced(pairs: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """The pairs that do not follow from others.

    >>> sorted(reduced({("a", "b"), ("b", "c"), ("a", "c")}))
    [('a', 'b'), ('b', 'c')]
    """
    after: dict[str, set[str]] = {}
    for first, second in pairs:
        after.setdefault(first, set()).add(second)

    def reaches(start: str, goal: str) -> bool:
        return goal in after.get(start, ()) or any(reaches(step, goal) for step in after.get(start, ()))

    return {(a, c) for a, c in pairs if not any(reaches(b, c) for b in after[a] - {c})}


def mermaid(pairs: set[tuple[str, str]]) -> str:
    lines = [f"  {a} --> {b}" for a, b in sorted(pairs)]
    return "\n".join(["```mermaid", "graph LR", *lines, "```"])


def updated(page: str) -> str:
    """The page with the diagram of today."""
    before, rest = page.split(START)
    after = rest.split(END)[1]
    return f"{before}{START}\n{mermaid(reduced(edges()))}\n{END}{after}"


def main(words: list[str]) -> int:
    page = PAGE.read_text(encoding="utf-8")
    new = updated(page)
    if "--check" in words:
        if new != page:
            print(f"{PAGE.relative_to(ROOT)}: the diagram is out of date; run scripts/make_diagram.py", file=sys.stderr)
        return int(new != page)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
