"""`penstock train` on what other processes put: they find the plane at its address, and the run ends by itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli import main
from tests.support.ports import free_port

pytestmark = pytest.mark.process

CONFIG = """
run = "mine"
max_steps = 4
listen = "{url}"

[model]
family = "qwen3"

[model.config]
vocab_size = 12
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16

[packing]
ranks = 1

[target]
groups = 2
"""
PRODUCER = """
import sys
import penstock as ps
from penstock.protocol.timeouts import Timeouts

url, name = sys.argv[1:]
with ps.open(url, timeouts=Timeouts(plane_s=300)) as plane:  # it may be here long before the plane is
    for i in range(4):
        with plane.group(f"{name}-{i}", policy_version=0) as group:
            for good in (True, False, False):
                turns = [ps.Turn([1, 4, 5, 3]), ps.Turn([5, 4, 2], logprobs=[-2.4, -2.5, -2.3])]
                group.add(ps.Trajectory(turns=turns, reward=float(good), env="mine"))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_without_a_task_trains_on_what_foreign_processes_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"tcp://127.0.0.1:{free_port()}"
    Path("mine.toml").write_text(CONFIG.format(url=url))
    producers = [subprocess.Popen([sys.executable, "-c", PRODUCER, url, name]) for name in ("a", "b")]
    try:
        code = main(["train", "mine.toml"])
    finally:
        for producer in producers:
            producer.kill() if producer.poll() is None else None
            producer.wait()
    said = capsys.readouterr().out
    assert code == 0, said
    assert [producer.returncode for producer in producers] == [0, 0]
    assert said.startswith(f"Groups are accepted at {url}")
    assert "Training finished: reward 0.33 -> 0.33 in 4 steps" in said
    assert "24 samples accepted, 24 trained, 0 held, 0 under way, 0 dropped.\nEvery sample is accounted for." in said
    ledger = json.loads(Path("runs/mine/status.json").read_text())["ledger"]
    assert ledger["balanced"] and ledger["committed"] == 24


def test_a_run_without_a_source_of_groups_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("max_steps = 1\n")
    assert main(["train", str(path)]) == 1
    assert "no groups arrive" in capsys.readouterr().err


def test_an_address_others_can_reach_needs_keys_and_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('listen = "tcp://0.0.0.0:7440"\n')
    assert main(["train", str(path)]) == 1
    assert "other hosts can reach it, and there are no keys" in capsys.readouterr().err
    path.write_text(f'listen = "tcp://0.0.0.0:7440"\nkeys = "{tmp_path}"\n')
    assert main(["train", str(path)]) == 1
    assert "no client keys" in capsys.readouterr().err
