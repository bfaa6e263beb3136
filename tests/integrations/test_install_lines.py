"""Every page of an integration has an install line, and `make test-pages` runs it with the built wheel."""

from __future__ import annotations

import re

from penstock.extras import EXTRAS
from scripts.test_pages_from_wheel import DOCS, PAGES, install_line


def test_every_page_is_run_from_the_wheel_and_is_in_the_table() -> None:
    assert {path.stem for path in DOCS.glob("*.md")} - {"index", "canary"} == set(PAGES)
    table = (DOCS / "canary.md").read_text()
    assert all(
        re.search(rf"^\| \[{name}\]\({name}\.md\) \| runs \| .* \| \d{{4}}-\d\d-\d\d \|$", table, re.M)
        for name in PAGES
    )


def test_install_lines_name_extras_that_exist() -> None:
    for name in PAGES:
        [ours] = (word for word in install_line((DOCS / f"{name}.md").read_text()) if word.startswith("penstock-rl"))
        extras = [extra for extra in ours.removeprefix("penstock-rl").strip("[]").split(",") if extra]
        assert not set(extras) - set(EXTRAS), f"{name}: {ours}"
