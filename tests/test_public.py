"""What is public is what a package's `__init__` exports: the docs send users nowhere else."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "arrays",
    "assets",
    "capture",
    "client",
    "convert",
    "frames",
    "log",
    "packing",
    "plane",
    "replay",
    "runs",
    "server",
    "storage",
    "train",
    "view",
)
IMPORT = re.compile(r"^from penstock\.([a-z_]+)((?:\.[a-z_]+)*) import (.+)$", re.M)


def test_docs_import_from_packages_and_only_what_they_export() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.py")]
    found = [(page.name, *match) for page in pages for match in IMPORT.findall(page.read_text())]
    assert found
    for page, package, rest, names in found:
        if package not in PACKAGES:  # errors is one module; testing and integrations are imported by module
            continue
        assert not rest, f"{page}: penstock.{package}{rest} is not public; export it from penstock.{package}"
        exported = importlib.import_module(f"penstock.{package}").__all__
        for name in names.split("#")[0].strip(" ()").split(","):
            assert name.split(" as ")[0].strip() in exported, f"{page}: penstock.{package} does not export {name}"


def test_every_package_says_what_it_exports() -> None:
    for name in PACKAGES:
        package = importlib.import_module(f"penstock.{name}")
        assert package.__doc__ and len(package.__all__) == len(set(package.__all__)), name
        assert all(hasattr(package, exported) for exported in package.__all__), name
