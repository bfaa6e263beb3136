"""Build the wheel and the sdist, install them where nothing else is, and try them: `make test-packaging`.

    .venv/bin/python scripts/test_packaging.py [--python 3.12] [--extra view] [--page docs/first-half-hour.md]

- Without extras, on every Python from 3.11 up that is found: the tests of the core, as they lie in the sdist.
- With each extra: what it brings can be imported, and so can the modules of ours that need it.
- Pages for a first half hour: every command of theirs, in an empty folder. `make test-pages` has those of integrations.

Everything happens in a temporary folder. Versions are those of constraints.txt.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from penstock.extras import EXTRAS

ROOT = Path(__file__).parent.parent
UV = Path(sys.executable).parent / "uv"
OLDEST = 11
NEWEST = 20
PACKAGES = ("arrays", "capture", "config", "convert", "frames", "packing", "protocol", "replay")
"""The core's tests: folders of tests/."""
INSTALLED = {"numpy", "msgspec", "zmq", "zstandard", "xxhash", "pytest", "hypothesis", "penstock", "tests"}
"""What a test of the core may import beside the standard library."""
NEEDS_EXTRAS = tuple(
    f"penstock.{name}" for name in ("assets", "cli", "commands", "demo", "integrations", "train", "view")
)
SMOKE = {
    "torch": "import penstock.train.loss, penstock.train.rank_steps, penstock as ps; ps.to_torch",
    "images": "import penstock.assets.image_files, penstock.assets.object_store",
    "view": "import penstock.view.web, penstock.view.jsonl",
    "parquet": "import penstock.view.parquet",
    "top": "import penstock.commands.top",
    "metrics": "from penstock.server.prometheus import expose; expose([], run='x')",
    "tensorboard": "import penstock.train.metrics_sinks",
    "wandb": "import penstock.train.metrics_sinks",
    "trackio": "import penstock.train.metrics_sinks",
    "otel": "from penstock.plane.group_spans import GroupSpans; GroupSpans('run', 'id').close()",
    "demo": "import penstock.commands.demo, penstock.train.trainer, penstock.demo.tasks",
    "verifiers": "from penstock.integrations.environments import verifiers_chat, verifiers_rollouts",
    "transformers": "import penstock.integrations.trainers.transformers_trainer",
    "trl": "import penstock.integrations.trainers.trl_worker",
    "testing": "import penstock.testing.strategies",
    "bench": "import benchmarks.replay, benchmarks.pack",
}
PAGES = {
    "docs/first-half-hour.md": "demo",
    "docs/half-hour-own-loop.md": "torch,view",
    "docs/half-hour-trl.md": "trl,view",
}
"""Pages whose commands are run where only the wheel with these extras is."""


def pythons() -> dict[str, Path]:
    """Every Python that is found, by minor version."""
    found: dict[str, Path] = {}
    for minor in range(OLDEST, NEWEST):
        named = [shutil.which(f"python3.{minor}")]
        pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
        places = [Path(name) for name in named if name] + sorted(pyenv.glob(f"3.{minor}.*/bin/python3"))
        for path in places:
            asked = subprocess.run(
                [path, "-c", "import sys; print(sys.version_info[1])"], capture_output=True, text=True
            )
            if asked.returncode == 0 and asked.stdout.strip() == str(minor):
                found.setdefault(f"3.{minor}", path)
    return found


def core_tests(root: Path) -> Iterator[Path]:
    """Test modules that need nothing but the core: judged by what they import."""
    for package in PACKAGES:
        for path in sorted((root / "tests" / package).glob("test_*.py")):
            names = set(imported(path))
            tops = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)
            if tops <= INSTALLED and not any(name.startswith(NEEDS_EXTRAS) for name in names):
                yield path


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


class Environment:
    """A fresh environment with the wheel in it."""

    def __init__(self, folder: Path, python: Path, requirements: list[str]) -> None:
        self.python = folder / "bin" / "python"
        subprocess.run([UV, "venv", "--quiet", "--python", python, folder], check=True)
        if any("[" in name for name in requirements):
            self._install(["torch==2.13.0"] if needs_torch(requirements) else [])
        self._install(requirements)

    def _install(self, requirements: list[str]) -> None:
        if requirements:
            within = ["-c", str(ROOT / "constraints.txt")]
            command = [str(UV), "pip", "install", "--quiet", "--python", str(self.python), *within, *requirements]
            subprocess.run(command, check=True, env=torch_source())

    def run(self, *words: str | Path, cwd: Path) -> int:
        """In a folder that holds no copy of the package, with nothing of this process in its path."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run([self.python, *words], cwd=cwd, env=environment, check=False).returncode


def needs_torch(requirements: list[str]) -> bool:
    extras = [name.partition("[")[2].rstrip("]") for name in requirements if "[" in name]
    return any("torch" in EXTRAS[name].modules for several in extras for name in several.split(","))


def torch_source() -> dict[str, str]:
    """Where torch comes from, as in scripts/setup: a folder of wheels if pip has one, else the CPU builds."""
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.find-links"], capture_output=True, text=True, check=False
    )
    links = os.environ.get("PIP_FIND_LINKS", asked.stdout.strip())
    if links and any(Path(links).glob("torch-*.whl")):
        return {**os.environ, "UV_FIND_LINKS": links}
    return {**os.environ, "UV_TORCH_BACKEND": "cpu"}


def build(folder: Path) -> tuple[Path, Path]:
    """The wheel, and the sdist unpacked."""
    subprocess.run([UV, "build", "--quiet", "--out-dir", folder, ROOT], check=True)
    (wheel,) = folder.glob("*.whl")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return wheel, folder / archive.name.removesuffix(".tar.gz")


def test_core(wheel: Path, source: Path, folder: Path, version: str, python: Path) -> bool:
    tools = ["pytest", "pytest-timeout", "hypothesis"]
    environment = Environment(folder / f"core-{version}", python, [str(wheel), *tools])
    shutil.rmtree(source / "src", ignore_errors=True)  # only what is installed may be found
    tests = [path.relative_to(source) for path in core_tests(source)]
    fast = ["-m", "not slow and not deep and not process", "--workers", "2"]
    code = environment.run("-m", "pytest", *fast, *tests, cwd=source)
    code = code or environment.run("-m", "penstock.cli", "doctor", "--imports", cwd=folder)
    return code == 0


def test_extra(wheel: Path, folder: Path, extra: str) -> bool:
    environment = Environment(folder / f"extra-{extra}", Path(sys.executable), [f"{wheel}[{extra}]"])
    brought = "; ".join(f"import {module}" for module in EXTRAS[extra].modules)
    return environment.run("-W", "ignore", "-c", f"{brought}; {SMOKE.get(extra, 'import penstock')}", cwd=folder) == 0


def test_page(wheel: Path, folder: Path, page: str, extras: str) -> bool:
    """A page's commands in an empty folder, compared with what the page shows."""
    name = Path(page).stem
    environment = Environment(folder / f"page-{name}", Path(sys.executable), [f"{wheel}[{extras}]"])
    empty = folder / f"empty-{name}"
    empty.mkdir()
    return environment.run(ROOT / "scripts" / "run_transcript.py", ROOT / page, cwd=empty) == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", help="only this version, such as 3.12")
    parser.add_argument("--extra", action="append", help="only this extra")
    parser.add_argument("--page", action="append", help=f"only this page: {', '.join(PAGES)}")
    args = parser.parse_args()
    anything = not (args.python or args.extra or args.page)
    chosen = {name: path for name, path in pythons().items() if anything or name in (args.python or [])}
    extras = [name for name in EXTRAS if anything or name in (args.extra or [])]
    pages = {page: brought for page, brought in PAGES.items() if anything or page in (args.page or [])}
    failed = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        wheel, source = build(folder)
        print(f"{wheel.name}: {wheel.stat().st_size:,} bytes", flush=True)
        jobs: dict[str, Callable[[], bool]] = {
            f"core on Python {name}": partial(test_core, wheel, source, folder, name, path)
            for name, path in chosen.items()
        }
        jobs |= {f"extra {name}": partial(test_extra, wheel, folder, name) for name in extras}
        jobs |= {f"page {page}": partial(test_page, wheel, folder, page, brought) for page, brought in pages.items()}
        for name, job in jobs.items():
            begin = time.monotonic()
            good = job()
            print(f"{'ok  ' if good else 'FAIL'} {name}, {time.monotonic() - begin:.0f} s", flush=True)
            failed += [] if good else [name]
    print(f"failed: {', '.join(failed)}" if failed else "the package works where nothing else is")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
