from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.protocol.session import TRANSITIONS, Phase

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "make_state_diagram.py"


def test_the_diagram_in_the_docs_is_the_one_of_the_tables() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_diagram_shows_every_phase_and_every_event() -> None:
    page = (ROOT / "docs" / "internals" / "protocol.md").read_text()
    arrows = re.findall(r"^  (\w+) --> (\w+): (.+)$", page, re.MULTILINE)
    shown = {(before, event, after) for before, after, events in arrows for event in events.split(" / ")}
    assert shown == {(phase.name, event.value, after.name) for (phase, event), after in TRANSITIONS.items()}
    assert {phase.name for phase in Phase} == {name for before, after, _ in arrows for name in (before, after)}
