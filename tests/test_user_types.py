"""Type checkers accept a typical program of a user and find misspelt keywords in it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.arrays import TOKEN_COLUMNS
from penstock.arrays.sample import SampleColumns, TurnColumns
from penstock.capture.turn import TURN_COLUMNS

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "tests" / "data" / "user_script.py"
MISSPELT = {
    "temperatures=0.7": "temperature=0.7",
    "logprobs=[-0.5] * len(answer)": "logprob=[-0.5] * len(answer)",
    "policy_version=version": "version=version",
    "seq_len=4096": "seqlen=4096",
    "plane_s=600": "plane_seconds=600",
    "high=0.28": "clip_high=0.28",
    "reward=1.0": "rewards=1.0",
}
CHECKERS = {
    "mypy": [sys.executable, "-m", "mypy", "--no-error-summary"],  # strict; its cache is that of scripts/check
    "pyright": ["pyright", "--pythonpath", sys.executable],
}


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_checker_accepts_the_program_and_finds_misspelt_keywords(checker: str, tmp_path: Path) -> None:
    command = CHECKERS[checker]
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs {checker} on PATH: `npm install pyright`, then PATH=node_modules/.bin:$PATH")
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    text = SCRIPT.read_text()
    good.write_text(text)
    for right, wrong in MISSPELT.items():
        assert right in text
        text = text.replace(right, wrong)
    bad.write_text(text)
    done = subprocess.run([*command, str(good), str(bad)], cwd=ROOT, capture_output=True, text=True)
    errors = [line for line in done.stdout.splitlines() if " error: " in line]
    assert not [line for line in errors if "good.py" in line], done.stdout
    found = {int(at) for line in errors for at in re.findall(r"bad\.py:(\d+)", line)}
    lines = text.splitlines()
    missed = [wrong for wrong in MISSPELT.values() if not any(wrong in lines[at - 1] for at in found)]
    assert not missed, f"{checker} does not see {missed}:\n{done.stdout}{done.stderr}"


def test_the_typed_columns_are_those_of_the_table() -> None:
    assert set(TurnColumns.__annotations__) == set(TURN_COLUMNS)
    assert set(SampleColumns.__annotations__) == set(TOKEN_COLUMNS) - {"token_ids", "loss_mask"}
