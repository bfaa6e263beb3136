from __future__ import annotations

import re
import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from penstock.errors import ConfigError
from penstock.hold import Freshest, Prioritized, SamplesPerInsert, Uniform
from penstock.serve.process.config import PlaneConfig, assign, build_config, load_config
from penstock.serve.process.template import TEMPLATE


def tables(**changes: Any) -> dict[str, Any]:
    return {"folder": "runs/x", "packing": {"ranks": 2, "seq_len": 64}, "target": {"groups": 4}} | changes


def uncommented() -> dict[str, Any]:
    return tomllib.loads(re.sub(r"^# ([a-z_]+ = )", r"\1", TEMPLATE, flags=re.MULTILINE))


def test_template_as_written_is_valid() -> None:
    config = build_config(tomllib.loads(TEMPLATE), "plane.toml")
    assert config.settings.packing.seq_len == 4096


def test_template_shows_the_true_default_of_every_setting() -> None:
    assert build_config(uncommented()) == build_config(tomllib.loads(TEMPLATE))


def test_template_names_every_setting() -> None:
    def names(kind: type[Any], table: dict[str, Any]) -> list[str]:
        missing = [f"{kind.__name__}.{f.name}" for f in fields(kind) if f.name not in table]
        hints = get_type_hints(kind)
        for field in fields(kind):
            if is_dataclass(hints[field.name]) and field.name in table:
                missing += names(hints[field.name], table[field.name])
        return missing

    assert names(PlaneConfig, uncommented()) == []


def test_parts_are_built_from_names_and_tables() -> None:
    limiter = {"kind": "samples_per_insert", "ratio": 2.0, "min_size": 8, "error_buffer": 16.0}
    replay = {"sampler": {"kind": "prioritized", "exponent": 0.5}, "remover": "uniform", "limiter": limiter}
    config = build_config(tables(replay={**replay, "max_times_sampled": "none"}))
    built = config.settings.replay
    assert built.sampler == Prioritized(0.5)
    assert built.remover == Uniform()
    assert built.limiter == SamplesPerInsert(ratio=2.0, min_size=8, error_buffer=16.0)
    assert built.max_times_sampled is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("packing.seq_lne=3", "packing.seq_lne: unknown key; did you mean 'seq_len'?"),
        ("colour=red", "colour: unknown key; known are folder"),
        ("packing.seq_len=long", "packing.seq_len: expected int, got str"),
        ("timeouts.peer_s=true", "timeouts.peer_s: expected float, got bool"),
        ("listen=[1]", "listen: expected str, got int at item [0]"),
        ("listen=[]", "listen: empty"),
        ("packing=3", "packing: expected a table, got int"),
        ("packing.cost.per_token=-1", "packing.cost: cost.per_token: -1"),
        ("timeouts.peer_s=1", "timeouts: peer_s 1.0 with heartbeat_s 2.0"),
        ("target.samples=3", "target: step target: {'groups': 4, 'samples': 3}"),
        ("replay.sampler=best", "replay.sampler: unknown kind 'best'; known are fifo"),
        ("replay.sampler.window=1", "replay.sampler: {'window': 1}; must be a name or a table with a kind"),
        ("replay.sampler={kind='freshest', exponent=1}", "replay.sampler.exponent: unknown key"),
        ("replay.sampler={kind='prioritized', exponent=9}", "replay.sampler: Prioritized: exponent 9"),
        ("replay.limiter={kind='queue'}", "replay.limiter.size: missing"),
        ("replay.max_times_sampled=none", "nothing ever leaves"),
        ("max_held_bytes=4 ZiB", "max_held_bytes: '4 ZiB'; must be a number of bytes"),
        ("max_held_bytes=0", "max_held_bytes: 0; must be from 1 up"),
        ("watchdog.stall_s=-1", "watchdog: stall_s: -1"),
        ("folder=''", "folder: empty"),
    ],
)
def test_wrong_settings_are_named_by_file_and_path(change: str, message: str) -> None:
    wrong = tables()
    assign(wrong, change)
    with pytest.raises(ConfigError) as raised:
        build_config(wrong, "plane.toml")
    assert str(raised.value).startswith("plane.toml: ")
    assert message in str(raised.value)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("name", ["folder", "packing", "target"])
def test_what_has_no_default_must_be_there(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: missing"):
        build_config({key: value for key, value in tables().items() if key != name})


@pytest.mark.parametrize(
    ("text", "size"), [("4 GiB", 4 << 30), ("1.5KiB", 1536), ("2 MB", 2_000_000), ("77", 77), ("1 G", 10**9)]
)
def test_sizes_may_carry_units(text: str, size: int) -> None:
    assert build_config(tables(max_held_bytes=text)).max_held_bytes == size


def test_none_switches_off_only_what_may_be_off() -> None:
    assert build_config(tables(watchdog={"stall_s": "none"})).watchdog.stall_s is None
    with pytest.raises(ConfigError, match="retain_steps: expected int"):
        build_config(tables(retain_steps="none"))


def test_assigned_values_are_toml_or_plain_text() -> None:
    changed = tables()
    for text in ("timeouts.peer_s=7.5", "run=night shift", "replay.sampler={kind='freshest', window=2}", "replicas=2"):
        assign(changed, text)
    config = build_config(changed)
    assert (config.timeouts.peer_s, config.run, config.replicas) == (7.5, "night shift", 2)
    assert config.replay.sampler == Freshest(2)


@pytest.mark.parametrize("text", ["timeouts.peer_s", "=3", "folder.deep=1"])
def test_assignments_without_a_place_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        assign(tables(), text)


def test_relative_paths_start_at_the_file(tmp_path: Path) -> None:
    (tmp_path / "plane.toml").write_text('folder = "runs/a"\nkeys = "none"\nlog_file = "/var/log/x"\n')
    found = load_config(tmp_path / "plane.toml")
    assert found == {"folder": str(tmp_path / "runs/a"), "keys": "none", "log_file": "/var/log/x"}


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: No such file"):
        load_config(tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_bytes(b"folder = \xff")
    with pytest.raises(ConfigError, match=r"bad\.toml: not TOML"):
        load_config(tmp_path / "bad.toml")
