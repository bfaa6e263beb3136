"""The demo on a cluster of its own, which loses a node while it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(900)
def test_the_demo_goes_on_when_a_node_is_lost(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock.cli", "demo", "--ray", "--steps", "60", "--json"]
    done = subprocess.run([*command, "--folder", str(tmp_path / "run")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["steps"] == 60 and report["ledger"]["balanced"]
    assert report["kills"] == {"node": 1}
    assert not report["ledger"]["dropped"].get("lost")
