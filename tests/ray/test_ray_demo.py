"""The demo on a cluster of its own, which loses a node while it runs; also on a host with a network address."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
_DEMO = [sys.executable, "-m", "penstock.cli", "demo", "--ray", "--json"]
_STEPS = 150
"""More than it trains before the node is lost, 24 s after it began."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("host", ["without_network", "with_address"])
def test_the_demo_goes_on_when_a_node_is_lost(tmp_path: Path, host: str) -> None:
    command = ["bash", str(ROOT / "scripts" / host), *_DEMO, "--steps", str(_STEPS), "--folder", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["steps"] == _STEPS and report["ledger"]["balanced"]
    assert report["kills"] == {"node": 1}
    assert not report["ledger"]["dropped"].get("lost")
    lines = [line for line in done.stderr.splitlines() if line.startswith("penstock demo: ")]
    assert lines[0].startswith("penstock demo: starting")
    assert lines[1] == "penstock demo: starting a Ray cluster of 3 nodes on this machine, loopback only"
    assert "penstock demo: starting node 3 of 3, which takes a few seconds" in lines
