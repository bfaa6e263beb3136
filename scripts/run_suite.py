"""Run every check and every test of `make test` side by side.

    .venv/bin/python scripts/run_suite.py

Three parts run at the same time: the checks; the tests of packages that take seconds to import (verifiers, TRL), in one
process; and all other tests, in eight workers, which would wait for these imports. What the first two print is shown
when they end.

Eight workers for two cores: tests with processes wait half of their time. A run with six used 74 % of the cores, one
with eight 85 %. One process imports the test modules; the workers are forked from it (`tests/support/workers.py`).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTEST = [str(Path(sys.executable).parent / "pytest")]
SLOW_TO_IMPORT = [
    "tests/integrations",
    "tests/capture/test_verifiers.py",
    "tests/commands/test_rollouts_command.py",
    "tests/replay/test_statistics.py",
    "src/penstock/integrations",
]
IN_CHECKS = ["tests/test_user_types.py"]
"""Run by `scripts/check` right behind mypy, with the cache that it wrote: two at once would write to the same files."""
PARTS = {
    "checks": ["bash", "scripts/check"],
    "integrations": [*PYTEST, "--doctest-modules", *SLOW_TO_IMPORT],
    "tests": [
        *PYTEST,
        *("--workers", "8", "--doctest-modules", "tests", "src"),
        *(f"--ignore={path}" for path in (*SLOW_TO_IMPORT, *IN_CHECKS)),
    ],
}


def run(parts: Mapping[str, Sequence[str]]) -> int:
    """Run commands at the same time, the last one with its output as it comes. Return 1 if any fails."""
    *behind, shown = parts
    codes: dict[str, int] = {}

    def finish(name: str) -> None:
        began = time.monotonic()
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            done = subprocess.run(parts[name], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False)
            output.seek(0)
            print(f"\n== {name}, {time.monotonic() - began:.0f} s\n{output.read()}", flush=True)
        codes[name] = done.returncode

    threads = [threading.Thread(target=finish, args=(name,)) for name in behind]
    for thread in threads:
        thread.start()
    codes[shown] = subprocess.run(parts[shown], cwd=ROOT, check=False).returncode
    for thread in threads:
        thread.join()
    failed = [name for name in parts if codes.get(name) != 0]
    print(f"failed: {', '.join(failed)}" if failed else "all passed", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(run(PARTS))
