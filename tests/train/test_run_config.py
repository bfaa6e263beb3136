"""The configuration file documents every setting: it must round-trip, and refuse what it does not know."""

from __future__ import annotations

import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.config import build
from penstock.demo.tasks import model_of
from penstock.errors import ConfigError
from penstock.plane import Target
from penstock.plane.settings import PlaneSettings
from penstock.replay import MinPriority, Prioritized, Replay
from penstock.train.run_config import FakeConfig, TaskConfig, TrainConfig, load, template


@pytest.mark.parametrize("task", ["reverse", "color"])
def test_the_template_holds_every_value_and_reads_back_equal(task: str) -> None:
    config = TrainConfig(
        task=TaskConfig(name=task),  # type: ignore[arg-type]
        model=model_of(task),
        target_reward=0.9,
        replay=Replay(sampler=Prioritized(0.6), remover=MinPriority()),
        shares={"a": 2.0},
        needs=("logprobs",),
    )
    assert build(TrainConfig, tomllib.loads(template(config)), "template") == config


def test_the_template_of_a_run_without_a_task_shows_it_in_comments() -> None:
    text = template(TrainConfig())
    assert "# [task]\n" in text and "# workers = 2\n" in text
    assert build(TrainConfig, tomllib.loads(text)) == TrainConfig()


def test_every_key_of_the_template_has_its_meaning_above_it() -> None:
    lines = template(TrainConfig(task=TaskConfig())).splitlines()
    for before, line in pairwise(lines):
        if " = " in line and not line.startswith("#"):
            assert before.startswith("#"), line


def test_every_setting_of_a_plane_is_one_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text('snapshot_every = 7\nlisten = "ipc:///x"\n[packing]\nseq_len = 128\n[target]\nsamples = 9\n')
    config = load(path, ["packing.over_cap=strict", "max_held_bytes=1 GiB"])
    assert isinstance(config, PlaneSettings)
    assert (config.snapshot_every, config.listen, config.max_held_bytes) == (7, ("ipc:///x",), 1 << 30)
    assert (config.packing.ranks, config.packing.seq_len, config.packing.over_cap) == (2, 128, "strict")
    assert (config.target, config.replay.max_staleness) == (Target(samples=9), 8)


WRONG = [
    ("[optimizer]\nlearning_rate = 1.0", "optimizer.learning_rate: unknown key; known are lr, betas"),
    ("[optimizer]\nlr = 0", "optimizer.lr: 0; must be a number above 0"),
    ("[optimizer]\nlr = nan", "optimizer.lr: nan; must be a number above 0"),
    ("[optimizer]\nbetas = [0.9, 1.0]", "optimizer.betas: [0.9, 1.0]; must be a list of 2, each a number from 0 up"),
    ("[packing]\nrank = 2", "packing.rank: unknown key; did you mean 'ranks'?"),
    ("[packing]\nranks = 0", "packing.ranks: 0; must be a whole number from 1 to 65536"),
    ("[packing]\nseq_len = 'two'", "packing.seq_len: 'two'; must be a whole number from 1 up"),
    (
        "[packing]\nmicro_batch_max_tokens = 0",
        "packing.micro_batch_max_tokens: 0; must be a whole number from 1 up, or none",
    ),
    ("[packing]\nseq_len = 64\nmicro_batch_max_tokens = 128", "packing: micro_batch_max_tokens: 128 with seq_len 64"),
    ("max_steps = -3", "max_steps: -3; must be a whole number from 1 up"),
    ("checkpoint_every = 0", "checkpoint_every: 0; must be a whole number from 1 up"),
    ("export_every = -1", "export_every: -1; must be a whole number from 0 up"),
    ("[loss]\nkind = 'ppo2'", "loss.kind: 'ppo2'; must be one of 'dppo', 'grpo', 'ipo'"),
    ("[loss]\nclip_low = 1.0", "loss.clip_low: 1.0; must be a number above 0 and below 1"),
    ("[model]\nsharding = 'zero'", "model.sharding: 'zero'; must be 'ddp' or 'fsdp'"),
    ("metrics = ['mlflow']", "metrics: ['mlflow']; must be a list, each item one of 'tensorboard', 'wandb', 'trackio'"),
    ("[task]\nworkers = 0", "task.workers: 0; must be a whole number from 1 up"),
    ("task = 3", "task: 3; must be a table, or none"),
    ("[replay]\nsampler = 'best'", "replay.sampler: 'best': unknown kind; known are fifo"),
    ("[target]\ngroups = 100", "groups_per_step: 100 with capacity 64"),
    ("run = '../evil'", "run: '../evil'; must be 1 to 64 letters, digits and _.-"),
    ("replicas = 2", "replicas: 2; this trainer has one process per rank"),
    ("[fake]\n[packing]\nmicro_batch_max_tokens = 8", "packing.micro_batch_max_tokens together with fake"),
    ("listen = 'tcp://0.0.0.0:99999'", "tcp://0.0.0.0:99999"),
    ("ranks = = 2", "not TOML: "),
]


@pytest.mark.parametrize(("text", "says"), WRONG, ids=[says.partition(":")[0] for _, says in WRONG])
def test_a_wrong_setting_is_named_with_its_file_before_anything_starts(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.toml").write_text(text)
    assert main(["train", "my.toml"]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("penstock train: my.toml: ") and says in said.err
    assert said.out == "" and [path.name for path in tmp_path.iterdir()] == ["my.toml"]


def test_a_wrong_word_of_the_command_line_is_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my.toml"
    path.write_text("[task]\n")
    assert main(["train", str(path), "--set", "packing.seq_lne=8"]) == 1
    assert "the command line: packing.seq_lne: unknown key; did you mean 'seq_len'?" in capsys.readouterr().err


def test_an_unreadable_file_is_named_with_how_to_write_one(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("ranks = = 2")
    with pytest.raises(ConfigError, match=r"broken\.toml: not TOML: .*; write one with `penstock demo --write-config"):
        load(path)
    with pytest.raises(ConfigError, match=r"absent\.toml: No such file"):
        load(tmp_path / "absent.toml")


def test_sections_are_checked_however_they_are_made() -> None:
    with pytest.raises(ConfigError, match="batch_size: 0; must be a whole number from 1 up"):
        FakeConfig(batch_size=0)
    with pytest.raises(ConfigError, match="max_steps: 0; must be a whole number from 1 up"):
        TrainConfig(max_steps=0)


def test_only_the_demo_adds_an_entropy_bonus_to_the_loss(tmp_path: Path) -> None:
    assert TrainConfig(folder=str(tmp_path)).loss.entropy_bonus == 0.0
    assert main(["demo", "--write-config", str(tmp_path / "demo.toml")]) == 0
    assert load(tmp_path / "demo.toml").loss.entropy_bonus == 0.01
