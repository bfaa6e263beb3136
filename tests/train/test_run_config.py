"""The configuration file is the documentation of every knob: it must round-trip, and refuse what it does not know."""

from __future__ import annotations

import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from penstock.demo.tasks import model_of
from penstock.errors import ConfigError
from penstock.train.config import (
    DataConfig,
    FakeConfig,
    ReplayConfig,
    TaskConfig,
    TrainConfig,
    load,
    parse,
    template,
)


@pytest.mark.parametrize("task", ["reverse", "color"])
def test_the_template_holds_every_value_and_reads_back_equal(task: str) -> None:
    config = TrainConfig(task=TaskConfig(name=task), model=model_of(task), target_reward=0.9)  # type: ignore[arg-type]
    assert parse(tomllib.loads(template(config)), "template") == config


def test_every_key_of_the_template_has_its_meaning_above_it() -> None:
    lines = template(TrainConfig(task=TaskConfig())).splitlines()
    for before, line in pairwise(lines):
        if " = " in line and not line.startswith("#"):
            assert before.startswith("#"), line


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"optimizer": {"learning_rate": 1.0}}, "unknown field `learning_rate` - at `optimizer`"),
        ({"optimizer": {"lr": 0}}, "optimizer.lr"),
        ({"rank": 2}, "unknown field `rank`"),
        ({"ranks": 0}, "ranks"),
        ({"ranks": "two"}, "ranks"),
        ({"loss": {"kind": "ppo2"}}, "loss.kind"),
        ({"run": "../evil"}, "run"),
        ({"data": {"micro_batch_max_tokens": 512, "fake": {}}}, "micro_batch_max_tokens together with data.fake"),
        ({"data": {"seq_len": 64, "micro_batch_max_tokens": 128}}, "long_rows"),
        ({"replay": {"max_times_sampled": 2}}, "a queue gives each group once"),
    ],
)
def test_a_wrong_key_or_value_is_named(found: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=r"my.toml|together|queue|long_rows") as caught:
        parse(found, "my.toml")
    assert says in str(caught.value)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("ranks = = 2")
    with pytest.raises(ConfigError, match=r"broken\.toml"):
        load(path)
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load(tmp_path / "absent.toml")


def test_sections_hold_what_they_say() -> None:
    config = TrainConfig(data=DataConfig(fake=FakeConfig(batch_size=3)), replay=ReplayConfig(sampler="uniform"))
    assert config.data.fake is not None and config.data.fake.batch_size == 3
    assert config.replay.sampler == "uniform"
