"""The pages of the doors: their blocks run, each page in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BEFORE = "from tests.upstream import conftest\n"


@pytest.mark.parametrize("name", ["nemo-gym", "transfer-queue"])
def test_the_blocks_of_the_page_run(name: str, tmp_path: Path) -> None:
    page = ROOT / "docs" / "integrations" / f"{name}.md"
    found = re.findall(
        r"<!-- not run: make test-integrations runs it.*?```python\n(.*?)```", page.read_text(), re.DOTALL
    )
    assert found
    place = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    for block in found:
        command = [sys.executable, "-c", BEFORE + block]
        done = subprocess.run(command, cwd=tmp_path, env=place, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
