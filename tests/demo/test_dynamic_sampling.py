"""Dynamic sampling in the demo: groups of one reward are filtered, and every step is full all the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.runs import RecordedRun
from tests.demo.test_demo import config_for

pytestmark = pytest.mark.process
STEPS = 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_step_is_full_of_groups_whose_rewards_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["demo", "--dynamic-sampling", "--steps", str(STEPS), "--folder", str(tmp_path / "run"), "--json"]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    steps = list(RecordedRun.open(tmp_path / "run" / "plane").steps.values())[:STEPS]
    full = config_for(tmp_path / "other", "--dynamic-sampling").target.groups  # type: ignore[attr-defined]
    assert [len(step.groups) for step in steps] == [full] * STEPS
    became = report["feedback"]
    assert (became["trained"], became["least_groups_per_step"], report["steps"]) == (STEPS * full, full, STEPS)
    assert became["filtered"] > 0 and report["ledger"]["balanced"]
    assert report["ledger"]["discarded"]["zero variance"] > 0
