"""The demo's judge: rewards of a run come late, from another process, which is killed in between."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli import main
from penstock.demo.launch import Launcher, Progress
from penstock.log import AttachColumn, read_record
from penstock.runs import RecordedRun
from tests.demo.test_demo import config_for

pytestmark = pytest.mark.process


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_whose_judge_and_plane_die_trains_only_scored_groups(tmp_path: Path) -> None:
    config = config_for(tmp_path / "run", "--judge", "--fast")
    launcher = Launcher(config)  # type: ignore[arg-type]
    deaths = {1: "judge", 3: "plane"}

    def show(progress: Progress) -> None:
        done = int(progress.rows[-1]["step"]) if progress.rows else 0
        for step in [s for s in deaths if s <= done]:
            launcher.kill(deaths.pop(step))

    ledger = launcher.run(show)["ledger"]
    assert not deaths
    assert ledger["balanced"] and ledger["committed"] == 5 * 8 * 8
    run = RecordedRun.open(tmp_path / "run" / "plane")
    scored = {r.group for entry in run.records.values() if isinstance(r := read_record(entry.data), AttachColumn)}
    assert {op for step in run.steps.values() for op in step.groups} <= scored


def test_the_judge_scores_the_text_task_on_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--judge", "--vision", "--folder", str(tmp_path / "run")]) != 0
    assert "--judge: its judge scores the text task" in capsys.readouterr().err
