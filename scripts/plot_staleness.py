"""Write the table and the figure of docs/order-and-pacing.md: five policies on one seeded workload.

    .venv/bin/python scripts/plot_staleness.py        (needs the extra "view"; the same as
                                                       `penstock simulate staleness --plot docs/images/staleness.svg`)

Everything is seeded and in virtual time: the page and the picture are the same each time.
"""

from __future__ import annotations

import re
from pathlib import Path

from penstock.commands.simulate import COLUMNS, draw
from penstock.runs import POLICIES, lognormal_workload, simulate_staleness

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "order-and-pacing.md"
BETWEEN = re.compile(r"(<!-- table: made by scripts/plot_staleness.py -->\n).*?(<!-- end of table -->)", re.DOTALL)


def main() -> None:
    workload = lognormal_workload(2 * 100 * 16 + 48, 8, median=600, sigma=0.8, seed=0)
    found = {policy: simulate_staleness(policy, workload) for policy in POLICIES}
    draw(found, DOCS / "images" / "staleness.svg")
    rows = [["policy", *COLUMNS], ["---"] * (len(COLUMNS) + 1)]
    rows += [[f"`{name}`", *(form.format(one[key]) for key, form in COLUMNS.values())] for name, one in found.items()]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    PAGE.write_text(BETWEEN.sub(lambda match: match[1] + table + match[2], PAGE.read_text()))


if __name__ == "__main__":
    main()
