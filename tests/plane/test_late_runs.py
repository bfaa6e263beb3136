"""Runs with late rewards, read again: rerun, feed, viewer, export, ledger from the log."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from penstock.cli import main
from penstock.client import feed
from penstock.runs import RecordedRun, read_run, rerun, stored_samples
from penstock.view import plane_steps
from tests.plane.test_late_rewards import ONE
from tests.support.late_groups import put_late, taken
from tests.support.planes import OpenPlane


def a_run(folder: Path, open_plane: OpenPlane, **settings: object) -> list[str]:
    """Groups with late rewards, one filtered, one with an error, one overdue, one that waits. Returns the digests."""
    plane = open_plane(folder, **{**ONE, **settings})
    for k in range(4):
        put_late(plane, f"g{k}", 3, filters=["zero_variance"])
    for k in (2, 0, 1):
        values = {f"g{k}/0": 0.1 * k, f"g{k}/1": 0.0}
        plane.attach("rewards", {f"g{k}": values}, errors={f"g{k}": {f"g{k}/2": "timed out"}})
    digests = [taken(plane)[1].digest for _ in range(2)]
    assert dict(plane.ledger.dropped) == {"zero variance": 3}
    assert read_run(folder)["ledger"] == plane.ledger.as_dict()
    plane.close()
    return digests


@pytest.mark.parametrize("settings", [{}, {"retain_steps": 0}], ids=["kept", "freed"])
def test_a_run_with_late_rewards_is_decided_again_with_the_same_digests(
    tmp_path: Path, open_plane: OpenPlane, settings: dict[str, object]
) -> None:
    a_run(tmp_path / "run", open_plane, **(settings or {"retain": "all"}))
    found = rerun(RecordedRun.open(tmp_path / "run"), tmp_path / "again")
    assert found.same, found.sentence
    assert found.steps + found.skipped == 2
    assert found.steps == (0 if settings else 2)


def test_a_run_fed_into_another_plane_has_its_values_and_waits_for_the_rest(
    tmp_path: Path, open_plane: OpenPlane
) -> None:
    a_run(tmp_path / "run", open_plane, retain="all")
    plane = open_plane(tmp_path / "other", **ONE)
    fed = feed(RecordedRun.open(tmp_path / "run"), plane, speed=None)
    assert (fed.groups, fed.gone) == (3, 1)  # not the one that a filter dropped
    assert (plane.ledger.held, plane.ledger.waiting) == (4, 3)
    (found,), _ = taken(plane)
    assert np.array(sorted(set(found["rewards"]))).astype(np.float32).tolist() == [0.0, np.float32(0.1)]


def test_viewer_and_convert_show_late_rewards(
    tmp_path: Path, open_plane: OpenPlane, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(tmp_path / "run", open_plane, retain="all")
    (row,) = [row for row in RecordedRun.open(tmp_path / "run").groups.values() if row.id == "g2"]
    samples = stored_samples(tmp_path / "run", row.id, row.location)
    assert [float(s["rewards"]) for s in samples if "rewards" in s] == [pytest.approx(0.2), 0.0]
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "out.jsonl")]) in (0, None)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert any("0.2" in json.dumps(line) for line in lines)
    said = capsys.readouterr().out
    left_out = "left out of its group: too long, filtered or scored as error"
    assert f"not trained  dropped: zero variance (3), {left_out} (2)" in said
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "out.penstock"), "--strict", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["untrained"] == {"dropped: zero variance": 3, left_out: 2}
    shown = [record for step in plane_steps.PlaneSteps(tmp_path / "run").kept() for record in step.records()]
    assert sum("rewards" in record.columns for record in shown) == 4
    capsys.readouterr()
