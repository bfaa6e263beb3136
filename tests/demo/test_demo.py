"""All of Penstock in one run: real processes, kill -9 of each kind, and a ledger that balances at the end."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.commands import demo
from penstock.demo.launch import Launcher, Progress
from penstock.train.run_config import load
from penstock.view import Export
from penstock.view.run_files import Metrics

pytestmark = pytest.mark.process


def config_for(folder: Path, *arguments: str) -> object:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return demo.config_of(parser.parse_args(["--folder", str(folder), *arguments]))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_survives_the_death_of_each_kind_of_process(tmp_path: Path) -> None:
    config = config_for(tmp_path / "run", "--steps", "16")
    launcher = Launcher(config)  # type: ignore[arg-type]
    deaths = {3: "worker", 6: "plane", 11: "rank"}

    def show(progress: Progress) -> None:
        done = int(progress.rows[-1]["step"]) if progress.rows else 0
        for step in [s for s in deaths if s <= done]:
            launcher.kill(deaths.pop(step))

    status = launcher.run(show)
    assert not deaths
    ledger = status["ledger"]
    assert ledger["balanced"]
    assert ledger["committed"] == 16 * 32 * 8
    rows = Metrics(tmp_path / "run" / "metrics.jsonl").read()
    assert [int(row["step"]) for row in rows] == list(range(1, 17))
    assert rows[0]["train/on_policy_gap"] < 1e-4
    scopes = {
        "pack/local_tokens",
        "pack/total_tokens",
        "pack/total_max_micro_batch_tokens",
        "pack/micro_batch_max_tokens",
    }
    assert scopes | {"gen/reward", "gen/length", "gen/truncated", "buffer/staleness_mean"} <= rows[0].keys()
    assert Export(tmp_path / "run").steps()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_vision_run_with_replay_trains_on_images_by_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    code = main(["demo", "--vision", "--replay", "--steps", "4", "--folder", str(folder), "--json"])
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert code == 0 and report["learned"] is None  # a number of steps was asked for, not a reward
    assert report["steps"] == 4 and report["ledger"]["balanced"]
    assert report["on_policy_gap"] < 1e-4
    assert any((folder / "assets").rglob("*.png"))
    rows = Metrics(folder / "metrics.jsonl").read()
    assert all(row["perf/images"] > 0 and row["train/image_masked_samples"] == 0 for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_with_trees_says_how_many_tokens_were_not_computed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With images. `train/test_tree_runs.py` trains on text."""
    code = main(["demo", "--trees", "--vision", "--steps", "3", "--folder", str(tmp_path / "run"), "--json"])
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert code == 0 and report["steps"] == 3 and report["ledger"]["balanced"]
    assert report["on_policy_gap"] < 1e-4
    # Eight rollouts share all of a prompt, which is most of each.
    assert report["shared_tokens"] > report["tokens"] / 2


def test_the_configuration_is_written_once_and_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my.toml"
    assert main(["demo", "--write-config", str(path)]) == 0
    assert load(path).task is not None
    assert main(["demo", "--write-config", str(path)]) == 1
    assert "exists" in capsys.readouterr().err
