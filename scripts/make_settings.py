"""Write what is made of the declarations of settings: keyword types, and the tables of the settings pages.

.venv/bin/python scripts/make_settings.py            write them
.venv/bin/python scripts/make_settings.py --check    exit 1 when one is out of date
"""

from __future__ import annotations

import sys
from pathlib import Path

from penstock.config import docs_table, kinds_table, typed_dict
from penstock.packing import Packing
from penstock.plane.settings import ClusterSettings, PlaneSettings, ServerSettings
from penstock.replay import LIMITERS, SELECTORS, Settings
from penstock.train.run_config import TrainConfig

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
_MADE = "Made by scripts/make_settings.py."


def modules() -> dict[Path, str]:
    """The modules with keyword types, as they should be."""
    package = ROOT / "src" / "penstock"
    table = typed_dict("TableKeywords", Settings, f"The keyword arguments of `Table`. {_MADE}")
    plane = typed_dict("PlaneKeywords", ClusterSettings, f"The keyword arguments of `penstock.open`. {_MADE}")
    packing = typed_dict("PackingKeywords", Packing, f"The keyword arguments of `pack`. {_MADE}", required=True)
    return {
        package / "packing" / "packing_keywords.pyi": packing,
        package / "replay" / "table_keywords.pyi": table,
        package / "client" / "plane_keywords.pyi": plane,
    }


def markers(name: str) -> tuple[str, str]:
    return f"<!-- {name} settings: made by scripts/make_settings.py -->", f"<!-- end of {name} settings -->"


def tables() -> dict[str, dict[str, str]]:
    """The tables of today, by page and by name."""
    plane = {
        "plane": docs_table(ServerSettings),
        "cluster": docs_table(ClusterSettings, beyond=ServerSettings),
    }
    run = {"run": docs_table(TrainConfig, keywords=False, beyond=PlaneSettings)}
    parts = {"parts": kinds_table({"sampler, remover": SELECTORS, "limiter": LIMITERS})}
    return {"settings.md": plane, "replay.md": parts, "trainer-settings.md": run}


def updated(page: str, tables: dict[str, str]) -> str:
    """The page with the tables of today."""
    for name, table in tables.items():
        start, end = markers(name)
        before, rest = page.split(start)
        page = f"{before}{start}\n{table}\n{end}{rest.split(end)[1]}"
    return page


def wanted() -> dict[Path, str]:
    """Every file that is made here, or in part, as it should be."""
    pages = {DOCS / name: made for name, made in tables().items()}
    return modules() | {page: updated(page.read_text(encoding="utf-8"), made) for page, made in pages.items()}


def main(arguments: list[str]) -> int:
    stale = [path for path, text in wanted().items() if path.read_text(encoding="utf-8") != text]
    for path in stale:
        if "--check" in arguments:
            print(f"{path.relative_to(ROOT)}: out of date; run scripts/make_settings.py", file=sys.stderr)
        else:
            path.write_text(wanted()[path], encoding="utf-8")
    return int(bool(stale) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
