"""plane.toml, the command line and `ps.open` read the same declarations, and say the same of what is wrong."""

from __future__ import annotations

import inspect
import re
import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import penstock as ps
from penstock.config import Given, template
from penstock.errors import ConfigError
from penstock.packing import Packing
from penstock.plane import PlaneSettings, Target
from penstock.plane.settings import EXAMPLE, TITLE, ServerSettings, read_settings, server_settings
from penstock.protocol import Timeouts
from penstock.replay import Freshest, MinSize, Prioritized, SamplesPerInsert, Uniform

TEMPLATE = template(EXAMPLE, title=TITLE)


def tables(**changes: Any) -> dict[str, Any]:
    return {"folder": "runs/x", "packing": {"ranks": 2, "seq_len": 64}, "target": {"groups": 4}} | changes


def uncommented() -> dict[str, Any]:
    return tomllib.loads(re.sub(r"^# ([a-z_]+ = )", r"\1", TEMPLATE, flags=re.MULTILINE))


def test_template_as_written_is_valid() -> None:
    assert server_settings(tomllib.loads(TEMPLATE), "plane.toml") == EXAMPLE


def test_template_shows_the_true_default_of_every_setting() -> None:
    assert server_settings(uncommented()) == EXAMPLE


def test_template_names_every_setting() -> None:
    def names(kind: type[Any], table: dict[str, Any]) -> list[str]:
        missing = [f"{kind.__name__}.{f.name}" for f in fields(kind) if f.name not in table]
        hints = get_type_hints(kind)
        for field in fields(kind):
            if is_dataclass(hints[field.name]) and field.name in table:
                missing += names(hints[field.name], table[field.name])
        return missing

    assert names(ServerSettings, uncommented()) == []


def test_parts_are_built_from_names_and_tables() -> None:
    limiter = {"kind": "samples_per_insert", "ratio": 2.0, "min_size": 8, "error_buffer": 16.0, "batch_size": 4}
    replay = {"sampler": {"kind": "prioritized", "exponent": 0.5}, "remover": "uniform", "limiter": limiter}
    built = server_settings(tables(replay={**replay, "max_times_sampled": "none"})).replay
    assert built.sampler == Prioritized(0.5)
    assert built.remover == Uniform()
    assert built.limiter == SamplesPerInsert(ratio=2.0, min_size=8, error_buffer=16.0, batch_size=4)
    assert built.max_times_sampled is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("packing.seq_lne=3", "packing.seq_lne: unknown key; did you mean 'seq_len'?"),
        ("colour=red", "colour: unknown key; known are packing"),
        ("packing.seq_len=long", "packing.seq_len: 'long'; must be a whole number from 1 up"),
        ("timeouts.peer_s=true", "timeouts.peer_s: True; must be a number above 0"),
        ("listen=[1]", "listen: [1]; must be a list, each item text"),
        ("listen=[]", "listen: empty"),
        ("packing=3", "packing: 3; must be a table"),
        ("packing.cost.per_token=-1", "packing.cost.per_token: -1; must be a number from 0 up"),
        ("timeouts.peer_s=1", "timeouts: peer_s 1.0 with heartbeat_s 2.0"),
        ("target.samples=3", "target: step target: {'groups': 4, 'samples': 3}"),
        ("replay.sampler=best", "replay.sampler: 'best': unknown kind; known are fifo"),
        ("replay.sampler.window=1", "replay.sampler: {'window': 1}; must be one of fifo"),
        ("replay.sampler={kind='freshest', exponent=1}", "replay.sampler.exponent: unknown key"),
        ("replay.sampler={kind='prioritized', exponent=9}", "replay.sampler.exponent: 9; must be a number from 0 to 2"),
        ("replay.limiter={kind='queue'}", "replay.limiter.size: missing"),
        ("replay.max_times_sampled=none", "nothing ever leaves"),
        ("max_held_bytes=4 ZiB", "max_held_bytes: '4 ZiB'; must be a size in bytes"),
        ("max_held_bytes=0", "max_held_bytes: 0; must be a size in bytes from 1 up"),
        ("watchdog.stall_s=-1", "watchdog.stall_s: -1; must be a number above 0, or none"),
        ("folder=''", "folder: missing; give the run's folder, or both log=postgresql://... and storage=..."),
        ("needs=['logprob']", "needs: 'logprob': unknown column; did you mean 'logprobs'?"),
        ("max_group_tokens=0", "max_group_tokens: 0; must be a whole number from 1 up, or none"),
        ("disk_reserve_bytes=-1", "disk_reserve_bytes: -1; must be a size in bytes from 0 up"),
        ("packing.over_cap=hard", "packing.over_cap: 'hard'; must be 'soft' or 'strict'"),
        ("target.groups=70000", "groups_per_step: 70000 with capacity 65536"),
    ],
)
def test_wrong_settings_are_named_by_file_and_path(change: str, message: str) -> None:
    wrong = Given(tables(), "plane.toml")
    wrong.assign(change)
    wrong.assigned.clear()
    with pytest.raises(ConfigError) as raised:
        server_settings(wrong)
    assert str(raised.value).startswith("plane.toml: ")
    assert message in str(raised.value)
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize("name", ["folder", "packing", "target"])
def test_what_has_no_default_must_be_there(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: missing"):
        server_settings({key: value for key, value in tables().items() if key != name})


@pytest.mark.parametrize(
    ("text", "size"), [("4 GiB", 4 << 30), ("1.5KiB", 1536), ("2 MB", 2_000_000), ("77", 77), ("1 G", 10**9)]
)
def test_sizes_may_carry_units(text: str, size: int) -> None:
    assert server_settings(tables(max_held_bytes=text)).max_held_bytes == size


def test_none_switches_off_only_what_may_be_off() -> None:
    assert server_settings(tables(watchdog={"stall_s": "none"})).watchdog.stall_s is None
    with pytest.raises(ConfigError, match="retain_steps: 'none'; must be a whole number from 0 up"):
        server_settings(tables(retain_steps="none"))


def test_assigned_values_are_toml_or_plain_text() -> None:
    changed = Given(tables())
    for text in ("timeouts.peer_s=7.5", "run=night shift", "replay.sampler={kind='freshest', window=2}", "replicas=2"):
        changed.assign(text)
    config = server_settings(changed)
    assert (config.timeouts.peer_s, config.run, config.replicas) == (7.5, "night shift", 2)
    assert config.replay.sampler == Freshest(2)


@pytest.mark.parametrize("text", ["timeouts.peer_s", "=3", "folder.deep=1"])
def test_assignments_without_a_place_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        Given(tables()).assign(text)


def test_relative_paths_start_at_the_file(tmp_path: Path) -> None:
    (tmp_path / "plane.toml").write_text('folder = "runs/a"\nkeys = "none"\nlog_file = "/var/log/x"\n')
    found = read_settings(tmp_path / "plane.toml")
    assert found.tables == {"folder": str(tmp_path / "runs/a"), "keys": "none", "log_file": "/var/log/x"}


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: No such file"):
        read_settings(tmp_path / "absent.toml")
    for data in (b"folder = \xff", b"a = " + b"[" * 100_000, b"a = " + b"9" * 5000):
        (tmp_path / "bad.toml").write_bytes(data)
        with pytest.raises(ConfigError, match=r"bad\.toml: not TOML"):
            read_settings(tmp_path / "bad.toml")


def test_a_wrong_value_is_blamed_on_whoever_gave_it() -> None:
    given = Given(tables(retain_steps=-1), "plane.toml")
    given.assign("timeouts.peer_s=0")
    with pytest.raises(ConfigError, match=r"^plane\.toml: retain_steps: -1"):
        server_settings(given)
    given.tables["retain_steps"] = 3
    with pytest.raises(ConfigError, match=r"^the command line: timeouts\.peer_s: 0"):
        server_settings(given)
    given.assign("timeouts.peer_s=3")
    with pytest.raises(ConfigError, match=r"^plane\.toml and the command line: timeouts: peer_s 3\.0"):
        server_settings(given)
    for text in ("listen=[]", "listen="):
        given = Given(tables(), "plane.toml")
        given.assign(text)
        with pytest.raises(ConfigError, match=r"^the command line: listen: empty"):
            server_settings(given)


def test_a_limiter_that_allows_no_step_is_rejected_when_the_plane_is_opened() -> None:
    limiter = SamplesPerInsert(ratio=1.0, min_size=8, error_buffer=8.0)
    said = r"memory: groups_per_step: 8 with SamplesPerInsert of batch_size 1, .* give it batch_size=8"
    with pytest.raises(ConfigError, match=said):
        ps.open("memory:", ranks=1, seq_len=8, groups_per_step=8, limiter=limiter)


def test_open_takes_every_setting_of_a_plane_and_no_other() -> None:
    with ps.open(
        "memory:", ranks=1, seq_len=8, groups_per_step=1, snapshot_every=7, needs=["logprobs"], pad_to_multiple_of=2
    ):
        pass
    with pytest.raises(ConfigError, match="memory: seq_lne: unknown setting; did you mean 'seq_len'"):
        ps.open("memory:", ranks=1, seq_lne=8, groups_per_step=1)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="memory: seq_len: missing"):
        ps.open("memory:", ranks=1)
    with pytest.raises(ConfigError, match=r"memory: capacity: 0; must be a whole number from 1 to 134217728"):
        ps.open("memory:", ranks=1, seq_len=8, groups_per_step=1, capacity=0)
    with pytest.raises(ConfigError, match="tcp://x:1: ranks, seed: the plane there has its own settings"):
        ps.open("tcp://x:1", ranks=1, seed=3, run="a")


@pytest.mark.parametrize("where", [None, "", 3, b"runs"])
def test_what_is_no_path_is_neither_a_folder_nor_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"open: {where!r}; give a folder, 'memory:', or an address"):
        ps.open(where, ranks=1, seq_len=16, groups_per_step=1).close()
    assert not list(tmp_path.iterdir())


def test_an_address_of_no_known_kind_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"must begin with one of tcp://, ipc://, file://, ray://"):
        ps.open("http://head:7440", ranks=1, seq_len=16, groups_per_step=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"groups_per_step": 0}, "memory: groups_per_step: 0; must be a whole number from 1 up, or none"),
        ({"groups_per_step": None}, "memory: step target: none; give exactly one of groups_per_step"),
        ({"micro_batch_max_tokens": 16}, "memory: micro_batch_max_tokens: 16 with seq_len 8"),
        ({"sampler": {"kind": "prioritized", "exponent": 9}}, "memory: sampler.exponent: 9; must be a number"),
        ({"sampler": "best"}, "memory: sampler: 'best': unknown kind"),
        ({"timeouts": {"peer_s": 0}}, "memory: timeouts.peer_s: 0; must be a number above 0"),
        ({"cost": 3}, "memory: cost: 3; must be a table"),
    ],
)
def test_open_names_what_is_wrong_as_the_caller_wrote_it(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ps.open("memory:", **{"ranks": 1, "seq_len": 8, "groups_per_step": 1, **settings})
    assert str(raised.value).startswith(message)


def test_help_shows_every_setting_with_its_default() -> None:
    shown = inspect.signature(ps.open).parameters
    assert shown["timeouts"].default == Timeouts(), "those of a plane in this process, not of one on Ray"
    assert {"where", "ranks", "groups_per_step", "sampler", "snapshot_every", "needs", "timeouts"} <= shown.keys()
    assert (shown["snapshot_every"].default, shown["max_disk_bytes"].default) == (20_000, None)
    assert inspect.signature(ps.Table).parameters["max_times_sampled"].default == 1


def test_a_record_is_checked_however_it_is_made() -> None:
    with pytest.raises(ConfigError, match="replicas: 0; must be a whole number from 1 to 65536"):
        PlaneSettings(packing=Packing(ranks=1, seq_len=8), target=Target(groups=1), replicas=0)
    with pytest.raises(ConfigError, match=r"sampler: .*Uniform.*; must be one of fifo"):
        ps.Table(capacity=3, sampler=Uniform)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"MinSize\.min_size: 0"):
        MinSize(0)
