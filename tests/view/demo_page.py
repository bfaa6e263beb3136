"""What the page of the demo's export shows, and the records it should show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.view import Export, Record

ARTIFACTS = Path(__file__).resolve().parents[2] / "artifacts"


def keep(page: Any, name: str) -> None:
    ARTIFACTS.mkdir(exist_ok=True)
    page.screenshot(path=str(ARTIFACTS / f"test-{name}.png"))


def records(demo: Path, step: int = 4) -> list[Record]:
    return list(Export(demo).step(step).records())


def current(page: Any, demo: Path, step: int = 4) -> Record:
    name = page.text_content("h1")
    return next(record for record in records(demo, step) if record.label == name)


def names(page: Any) -> list[str]:
    found: list[str] = page.eval_on_selector_all(
        "#rows .row b",
        "all => all.sort((a, b) => a.closest('.row').offsetTop - b.closest('.row').offsetTop).map(b => b.textContent)",
    )
    return found


def cell(page: Any, column: str) -> str:
    text: str = page.text_content(f'#token [data-column="{column}"]')
    return text
