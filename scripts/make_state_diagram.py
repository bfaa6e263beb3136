"""Draw the phases of a session into docs/internals/protocol.md, from the table that drives them.

.venv/bin/python scripts/make_state_diagram.py            write it
.venv/bin/python scripts/make_state_diagram.py --check    exit 1 when the page is out of date
"""

from __future__ import annotations

import sys
from pathlib import Path

from penstock.protocol.session import TRANSITIONS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "internals" / "protocol.md"
START, END = "<!-- states: made by scripts/make_state_diagram.py -->", "<!-- end of states -->"


def mermaid() -> str:
    """One arrow per pair of phases, with everything that takes a session that way."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for (phase, event), after in TRANSITIONS.items():
        arrows.setdefault((phase.name, after.name), []).append(event.value)
    first = next(iter(TRANSITIONS))[0].name
    lines = [f"  {before} --> {after}: {' / '.join(events)}" for (before, after), events in arrows.items()]
    return "\n".join(["```mermaid", "stateDiagram-v2", f"  [*] --> {first}", *lines, "```"])


def updated(page: str) -> str:
    """The page with the diagram of today."""
    before, rest = page.split(START)
    after = rest.split(END)[1]
    return f"{before}{START}\n{mermaid()}\n{END}{after}"


def main(words: list[str]) -> int:
    page = PAGE.read_text(encoding="utf-8")
    new = updated(page)
    if "--check" in words:
        if new != page:
            script = Path(__file__).relative_to(ROOT)
            print(f"{PAGE.relative_to(ROOT)}: the states are out of date; run {script}", file=sys.stderr)
        return int(new != page)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
