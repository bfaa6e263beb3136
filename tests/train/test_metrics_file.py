"""Metrics reach every sink under the same names: JSON lines, TensorBoard's event files, Weights & Biases offline."""

from __future__ import annotations

import json
import math
import sqlite3
import subprocess
import sys
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest

from penstock.demo.launch import Launcher
from penstock.errors import ConfigError, MissingExtra
from penstock.train.metrics_sinks import MetricsFile, Prometheus
from penstock.train.run_config import TrainConfig

STEPS = {1: {"train/reward": 0.25, "perf/step_s": 0.5}, 2: {"train/reward": 0.75, "perf/step_s": math.nan}}


def write(folder: Path, *extra: str) -> None:
    journal = MetricsFile(folder, "run-1", list(extra))
    for step, values in STEPS.items():
        journal.write(step, values)
    journal.close()


def test_json_lines_are_appended_and_hold_null_where_there_is_no_number(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[:2] == rows[2:]
    assert rows[1] == {"step": 2, "train/reward": 0.75, "perf/step_s": None}


@pytest.mark.filterwarnings("default")  # TensorBoard's own
def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    reader = "tensorboard.backend.event_processing.event_accumulator"
    accumulator = pytest.importorskip(reader, reason="needs TensorBoard: pip install '.[tensorboard]'")
    write(tmp_path, "tensorboard")
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["perf/step_s", "train/reward"]
    assert [(event.step, event.value) for event in events.Scalars("train/reward")] == [(1, 0.25), (2, 0.75)]


@pytest.mark.filterwarnings("default")  # wandb's own
def test_weights_and_biases_keeps_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs wandb, which no other test uses: pip install '.[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    write(tmp_path, "wandb")
    (log,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    data = log.read_bytes()
    assert b"run-1" in data and b"train/reward" in data


@pytest.mark.process
def test_trackio_stores_a_run_and_continues_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio", reason="needs trackio, which no other test uses: pip install '.[trackio]'")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    script = "import pathlib, sys; from tests.train.test_metrics_file import write; "
    script += "write(pathlib.Path(sys.argv[1]), 'trackio')"
    for _ in range(2):  # trackio reads TRACKIO_DIR when it is imported
        subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=300)
    (database,) = (tmp_path / "trackio").glob("penstock*.db")
    with closing(sqlite3.connect(database)) as stored:
        rows = stored.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    assert {name for name, *_ in rows} == {"run-1"}
    found = [(step, json.loads(values)["train/reward"]) for _, step, values in rows]
    assert found == [(1, 0.25), (2, 0.75)] * 2


def test_prometheus_reads_the_last_step_from_a_loopback_page(tmp_path: Path) -> None:
    page = Prometheus("127.0.0.1:0", "run-1")
    for step, values in STEPS.items():
        page.write(step, values)
    with urllib.request.urlopen(page.url, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    page.close()
    assert [line for line in lines if not line.startswith("# HELP")] == [
        "# TYPE penstock_train_reward gauge",
        'penstock_train_reward{run="run-1"} 0.75',
        "# TYPE penstock_train_step gauge",
        'penstock_train_step{run="run-1"} 2.0',
    ]
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0:9000"):
        MetricsFile(tmp_path, "run-1", [], prometheus="0.0.0.0:9000")


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_sink_that_is_not_installed_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(MissingExtra, match=rf"pip install 'penstock-rl\[{name}\]'"):
        MetricsFile(tmp_path, "run-1", [name])
    with pytest.raises(MissingExtra, match=rf"penstock-rl\[{name}\]"):  # and the whole run, before it starts a process
        Launcher(TrainConfig(folder=str(tmp_path / "run"), metrics=(name,))).run(lambda _: None)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()
