"""Check that this commit could be released: `make release-check`.

.venv/bin/python -m scripts.release_check            metadata, contents, changelog, the lowest declared versions
.venv/bin/python -m scripts.release_check --final    also: the changelog's section of this version has a date

Builds the wheel and the sdist in a temporary folder. Nothing is uploaded.
"""

from __future__ import annotations

import argparse
import email
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

from penstock.version import __version__
from scripts.test_packaging import ROOT, UV, build, core_tests

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TESTED = ("arrays", "convert", "frames")
"""Test folders that run with the lowest versions: they use every core dependency but pyzmq, as the quickstart does."""

IN_SDIST = ("Makefile", "constraints.txt", "docs/index.md", "examples/grpo.py", "tests/conftest.py", "AGENTS.md")


def changelog(*, final: bool) -> Iterator[str]:
    """Yield what is wrong with the changelog."""
    text = (ROOT / "CHANGELOG.md").read_text()
    sections = dict(re.findall(r"^## \[([^\]]+)\](.*)$", text, re.MULTILINE))
    if __version__ not in sections:
        yield f"CHANGELOG.md: no section [{__version__}]; add one, it is the version in src/penstock/version.py"
    elif final and not re.search(r"\d{4}-\d\d-\d\d", sections[__version__]):
        yield f"CHANGELOG.md: [{__version__}]{sections[__version__]}: no date; write the day of the release"
    if final and "Unreleased" in sections:
        yield f"CHANGELOG.md: a section [Unreleased]; move its entries to [{__version__}]"


def metadata(wheel: Path) -> Iterator[str]:
    """Yield what is wrong with the wheel's metadata."""
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        found = email.message_from_bytes(file.read(name))
    wanted = {
        "Name": PROJECT["name"],
        "Version": __version__,
        "License-Expression": PROJECT["license"],
        "Requires-Python": PROJECT["requires-python"],
        "Description-Content-Type": "text/markdown",
        "Summary": PROJECT["description"],
    }
    for field, value in wanted.items():
        if found[field] != value:
            yield f"{wheel.name}: {field}: {found[field]!r}; must be {value!r}"
    if missing := set(PROJECT["optional-dependencies"]) - set(found.get_all("Provides-Extra", [])):
        yield f"{wheel.name}: extras missing: {', '.join(sorted(missing))}"


def contents(wheel: Path, source: Path) -> Iterator[str]:
    """Yield files that are missing from the wheel or the sdist, and files that do not belong there."""
    with zipfile.ZipFile(wheel) as file:
        inside = {name for name in file.namelist() if ".dist-info/" not in name}
    tracked = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    ours = {name.removeprefix("src/") for name in tracked.split()}
    yield from (f"{wheel.name}: {name} is missing" for name in sorted(ours - inside))
    yield from (f"{wheel.name}: {name} does not belong there" for name in sorted(inside - ours))
    yield from (f"sdist: {name} is missing" for name in IN_SDIST if not (source / name).is_file())


def lowest(wheel: Path, source: Path, folder: Path) -> Iterator[str]:
    """Yield what fails with the lowest versions that pyproject.toml declares."""
    python = folder / "lowest" / "bin" / "python"
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, folder / "lowest"], check=True)
    install: list[str | Path] = [UV, "pip", "install", "--quiet", "--python", python]
    subprocess.run([*install, "--resolution", "lowest-direct", *PROJECT["dependencies"]], check=True)
    subprocess.run([*install, "--no-deps", wheel], check=True)
    subprocess.run([*install, "pytest", "pytest-timeout", "hypothesis"], check=True)
    listed = subprocess.run([*install[:2], "freeze", "--python", python], check=True, capture_output=True, text=True)
    versions = dict(line.lower().split("==") for line in listed.stdout.split() if "==" in line)
    for name, least in (requirement.split(">=") for requirement in PROJECT["dependencies"]):
        print(f"     {name} {versions[name]}", flush=True)
        if not versions[name].startswith(least):
            yield f"{name}: {versions[name]} was tried, {least} is declared"
    tests = [path for path in core_tests(source) if path.parent.name in TESTED]
    shutil.rmtree(source / "src")  # only what is installed may be found
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    programs: dict[str, list[str | Path]] = {
        "examples/quickstart.py": [source / "examples" / "quickstart.py"],
        f"tests of {', '.join(TESTED)}": [
            *("-m", "pytest", "--workers", "2", "-m", "not slow and not deep and not process"),
            *tests,
        ],
    }
    for name, words in programs.items():
        done = subprocess.run([python, *words], cwd=source, env=clean, capture_output=True, text=True, check=False)
        print(f"     {name}: {done.stdout.strip().splitlines()[-1] if done.stdout else done.stderr[-200:]}", flush=True)
        if done.returncode:
            yield f"{name}: failed with the lowest versions: {done.stdout[-2000:]}{done.stderr[-2000:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--final", action="store_true", help="the changelog must have a date and no Unreleased section")
    final = parser.parse_args().final
    problems = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        print("building the wheel and the sdist", flush=True)
        wheel, source = build(folder)
        checks = {
            "changelog": changelog(final=final),
            "metadata": metadata(wheel),
            "contents": contents(wheel, source),
            "lowest versions": lowest(wheel, source, folder),
        }
        for name, check in checks.items():
            found = list(check)
            print(f"{'FAIL' if found else 'ok  '} {name}", flush=True)
            problems += found
    print("\n".join(problems) if problems else f"{PROJECT['name']} {__version__} could be released")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
