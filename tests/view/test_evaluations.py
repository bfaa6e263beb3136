"""Evaluation groups in viewer and tables: read from the plane's folder, with a plane at work on it or not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.cli import main
from penstock.errors import InvalidInput, UnknownKey
from penstock.view import EVALUATION
from penstock.view.library import Library
from penstock.view.reader import Export
from penstock.view.record import Skipped
from tests.support.exports import make_export
from tests.support.pace import eventually


def rollout(reward: float | None, *, error: str | None = None) -> ps.Trajectory:
    turns = [ps.Turn([1, 2]), ps.Turn([3, 4, 5], logprobs=[-0.5, -0.25, -1.0])]
    return ps.Trajectory(turns=turns, reward=reward, env="math", error=error)


def evaluate(plane: ps.Plane) -> None:
    """Two groups of version 3, one of version 7 with a rollout that failed."""
    for version, name, rewards in ((3, "a", (1.0, 0.0)), (3, "b", (0.0,)), (7, "a", (1.0, 1.0, 1.0))):
        with plane.group(name, id=f"{name}-{version}", policy_version=version, evaluation=True) as group:
            for reward in rewards:
                group.add(rollout(reward))
            if version == 7:
                group.add(rollout(0.0, error="the sandbox died"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder without exports: nothing was trained."""
    with ps.open(tmp_path / "run", ranks=1, seq_len=64, groups_per_step=1) as plane:
        evaluate(plane)
    return tmp_path / "run"


def test_evaluation_groups_are_a_run_of_their_own_with_a_step_for_each_version(folder: Path) -> None:
    export = Export(folder)
    assert export.runs == [EVALUATION]
    assert [step.number for step in export.steps(EVALUATION)] == [3, 7]
    records = list(export.step(3, EVALUATION).records())
    assert [record.fields["sample_id"] for record in records] == ["a-3/0", "a-3/1", "b-3/0"]
    first = records[0]
    assert first.columns["token_ids"].tolist() == [1, 2, 3, 4, 5]
    assert first.columns["loss_mask"].tolist() == [False, False, True, True, True]
    assert np.isnan(first.columns["inference_logprobs"][:2]).all()
    assert first.columns["inference_logprobs"][2:].tolist() == [-0.5, -0.25, -1.0]
    assert "trainer_logprobs" not in first.columns and "advantages" not in first.columns
    assert {name: first.fields[name] for name in ("step", "policy_version", "env_name", "group_id")} == {
        "step": 3, "policy_version": 3, "env_name": "math", "group_id": "a-3",
    }  # fmt: skip


def test_a_rollout_that_failed_is_shown_too(folder: Path) -> None:
    records = list(Export(folder).step(7, EVALUATION).records())
    assert [bool(record.columns["loss_mask"].any()) for record in records] == [True, True, True, False]


def test_tables_show_them_and_no_rank_was_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokens", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["version", "records", "trained"]
    assert [line.split()[:3] for line in lines[1:]] == [["3", "3", "9"], ["7", "4", "9"]]
    assert main(["tokens", str(folder), "--json", "--evaluation", "--step", "3"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["steps"]
    assert (report["run"], report["records"], report["malformed_lines"]) == (EVALUATION, 3, 0)
    assert report["reward"]["mean"] == pytest.approx(1 / 3)
    assert report["mismatch_kl"] is None


def test_they_stand_beside_the_exports_of_a_run_and_are_not_chosen_instead(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    folder.rename(home / "plane")  # as `penstock train` lays a run out
    make_export(home, steps=2, groups=2, size=2)
    export = Export(home)
    assert export.runs == ["", EVALUATION]
    assert export.choose(None) == ""
    assert main(["tokens", str(home)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[0] for row in rows[-2:]] == [EVALUATION, EVALUATION] and len(rows) == 4
    assert main(["tokens", str(home), "--evaluation"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert main(["diff", str(home), str(home), "--run", EVALUATION]) == 0


def test_the_viewer_lists_opens_and_draws_them(folder: Path) -> None:
    library = Library(exports={"run": Export(folder)})
    assert library.overview()["exports"][0]["runs"] == [
        {"run": EVALUATION, "steps": [3, 7], "state": None, "events": 0, "last": None}
    ]
    step = library.step("run", EVALUATION, 3)
    assert [row["reward"] for row in step["samples"]] == [1.0, 0.0, 0.0]
    assert (step["grid"], step["skipped"]) == ([], 0)
    shown = json.loads(bytes(library.sample("run", EVALUATION, 3, 1)["record"]))
    assert (shown["sample_id"], shown["token_ids"]) == ("a-3/1", [1, 2, 3, 4, 5])
    points = library.run("run", EVALUATION)["steps"]
    assert [(point["step"], point["tokens"]) for point in points] == [(3, 15), (7, 20)]


def test_a_page_of_them_can_be_written(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["view", str(folder), "--html", str(page), "--step", "7"]) == 0
    assert "a-7/2" in page.read_text()


def test_they_are_read_while_the_plane_works_and_gives_some_back(tmp_path: Path) -> None:
    with ps.open(
        tmp_path, ranks=1, seq_len=64, groups_per_step=1, retain_eval_bytes=700, untrained_groups="accept"
    ) as plane:
        evaluate(plane)
        export = Export(tmp_path)
        library = Library(exports={"run": export})
        before = library.step("run", EVALUATION, 7)
        assert len(before["samples"]) == 4
        (old,) = export.steps(EVALUATION)
        with plane.group("c", id="c", policy_version=8, evaluation=True) as group:
            group.add(rollout(1.0))
            group.add(rollout(1.0))
        plane.put([ps.Sample(id="t/0", group="t", token_ids=[1, 2], loss_mask=[False, True])])
        assert [step.number for step in export.steps(EVALUATION)] == [8]
        with pytest.raises(UnknownKey, match="no finished step 7"):
            library.step("run", EVALUATION, 7)
        eventually(lambda: not list(old.records(Skipped())))  # a thread frees the bytes
    skipped = Skipped()
    assert list(old.records(skipped)) == []  # what was listed before it was given back
    assert skipped.lines == 1


def test_samples_with_columns_of_their_own_are_read_too(tmp_path: Path) -> None:
    weights = ps.Column("turn_weights", dtype="float32", fill=0.0)
    with ps.open(tmp_path, ranks=1, seq_len=64, groups_per_step=1, columns=[weights]) as plane:
        own = {"turn_weights": np.array([0, 1], np.float32)}
        plane.put([ps.Sample(id="e/0", group="e", token_ids=[1, 2], columns=own)], evaluation=True)
        with pytest.raises(InvalidInput, match="column 'other'"):
            other = {"other": np.array([0, 1], np.float32)}
            plane.put([ps.Sample(id="f/0", group="f", token_ids=[1, 2], columns=other)], evaluation=True)
    (record,) = Export(tmp_path).step(0, EVALUATION).records()
    assert record.columns["token_ids"].tolist() == [1, 2]


def test_a_damaged_frame_is_skipped_and_counted(folder: Path) -> None:
    export = Export(folder)
    (segment,) = (path for path in (folder / "storage" / "segments").iterdir() if path.stat().st_size)
    os.truncate(segment, segment.stat().st_size - 10)
    skipped = Skipped()
    assert len(list(export.step(3, EVALUATION).records(skipped))) == 3
    assert list(export.step(7, EVALUATION).records(skipped)) == []
    assert skipped.lines == 1 and "a-7" in skipped.reasons[0]
