"""plane.toml, or the command line, as the settings of a server process: checked, with the path of what is wrong.

The file's tables are the fields of `PlaneConfig` and of the records inside it, by the same names; there is no list
of keys to keep in step. `penstock serve --write-config plane.toml` writes a commented one.
"""

from __future__ import annotations

import difflib
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import ConfigError
from penstock.hold import (
    Fifo,
    Freshest,
    Lifo,
    Limiter,
    MaxPriority,
    MinPriority,
    MinSize,
    Prioritized,
    Queue,
    SamplesPerInsert,
    Selector,
    Uniform,
)
from penstock.pack import Packing
from penstock.send.timeouts import Timeouts
from penstock.serve.settings import PlaneSettings, Replay, Target

DEFAULT_LISTEN = "tcp://127.0.0.1:7440"

_PARTS: dict[object, dict[str, type[Any]]] = {
    Selector: {
        "fifo": Fifo,
        "lifo": Lifo,
        "uniform": Uniform,
        "freshest": Freshest,
        "prioritized": Prioritized,
        "min_priority": MinPriority,
        "max_priority": MaxPriority,
    },
    Limiter: {"min_size": MinSize, "queue": Queue, "samples_per_insert": SamplesPerInsert},
}
"""What a file can name, by the protocol it fulfils."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?")
_UNITS = {"": 1, **{f"{u}i": 1024**n for n, u in enumerate("KMGT", 1)}, **{u: 1000**n for n, u in enumerate("KMGT", 1)}}
_NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchdogSettings:
    """When the second process ends the plane."""

    stall_s: float | None = 300.0
    """Seconds without a turn of the loop; None: no watchdog."""
    end_s: float = 7.0
    """Seconds from SIGTERM until it is given up; SIGKILL follows after `grace_s`."""
    grace_s: float = 2.0
    """Seconds for writing the stacks."""

    def __post_init__(self) -> None:
        for name in ("stall_s", "end_s", "grace_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name}: {value}; must be a positive number of seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneConfig:
    """Everything a server process is told."""

    folder: str
    """Where the run is kept; "memory:" keeps nothing."""
    packing: Packing
    target: Target
    listen: tuple[str, ...] = (DEFAULT_LISTEN,)
    keys: str | None = None
    """A key folder."""
    run: str = "run"
    replicas: int = 1
    shares: dict[str, float] = field(default_factory=dict)
    evict_after: int | None = 3
    max_held_bytes: int = 4 << 30
    max_disk_bytes: int | None = None
    retain_steps: int = 64
    snapshot_every: int = 20_000
    metrics: str | None = None
    """HOST:PORT of the Prometheus page."""
    log_file: str | None = None
    replay: Replay = field(default_factory=Replay)
    timeouts: Timeouts = field(default_factory=Timeouts)
    watchdog: WatchdogSettings = field(default_factory=WatchdogSettings)

    def __post_init__(self) -> None:
        if not self.folder:
            raise ConfigError("folder: empty; say where the run is kept")
        if not self.listen:
            raise ConfigError("listen: empty; without an address nobody could connect")

    @property
    def settings(self) -> PlaneSettings:
        names = {f.name for f in fields(PlaneSettings)}
        return PlaneSettings(**{name: getattr(self, name) for name in names})


def load_config(path: str | Path) -> dict[str, Any]:
    """The tables of a file, its paths made absolute; check them with `build_config`."""
    where = Path(path)
    try:
        tables = tomllib.loads(where.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}; write one with `penstock serve --write-config PATH`") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: not TOML: {error}") from None
    for name in ("folder", "keys", "log_file"):
        value = tables.get(name)
        if isinstance(value, str) and value and value not in (_NONE, "memory:"):
            tables[name] = str(where.resolve().parent / value)
    return tables


def build_config(tables: Mapping[str, Any], where: str = "settings") -> PlaneConfig:
    """The configuration that tables describe; ConfigError names the key's path and `where` it stands.

    >>> packing = {"ranks": 2, "seq_len": 4096}
    >>> config = build_config({"folder": "runs/demo", "packing": packing, "target": {"groups": 4}})
    >>> config.settings.packing.ranks, config.listen
    (2, ('tcp://127.0.0.1:7440',))
    """
    config: PlaneConfig = _record(PlaneConfig, tables, where, "")
    try:
        config.settings.replay.table(lambda _key, _reason: None)  # settings that cannot hold together are found here
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return config


def assign(tables: dict[str, Any], text: str) -> None:
    """Set one key from `path.to.key=value`, the value as in TOML; text needs no quotes."""
    path, equals, value = text.partition("=")
    *parents, name = path.strip().split(".")
    if not equals or not name:
        raise ConfigError(f"--set {text!r}: must be KEY=VALUE, for example timeouts.peer_s=5")
    for parent in parents:
        tables = tables.setdefault(parent, {})
        if not isinstance(tables, dict):
            raise ConfigError(f"--set {text!r}: {parent} is a value, not a table")
    try:
        tables[name] = tomllib.loads(f"x = {value}")["x"]
    except tomllib.TOMLDecodeError:
        tables[name] = value.strip()


def _record(kind: type[Any], tables: Any, where: str, path: str) -> Any:
    """One dataclass from a table: unknown keys, missing keys and wrong types are errors with their path."""
    if not isinstance(tables, Mapping):
        raise ConfigError(f"{where}: {path.rstrip('.')}: expected a table, got {_type_name(tables)} {tables!r:.60}")
    known = {f.name: f for f in fields(kind)}
    for name in tables:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
            raise ConfigError(f"{where}: {path}{name}: unknown key; {hint}")
    for name, one in known.items():
        if name not in tables and one.default is MISSING and one.default_factory is MISSING:
            raise ConfigError(f"{where}: {path}{name}: missing; it has no default")
    hints = typing.get_type_hints(kind)
    values = {name: _value(hints[name], value, where, path + name) for name, value in tables.items()}
    try:
        return kind(**values)
    except ConfigError as error:
        table = f"{path.rstrip('.')}: " if path else ""
        raise ConfigError(f"{where}: {table}{str(error).removeprefix(table)}") from None


def _value(hint: Any, value: Any, where: str, path: str) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value == _NONE and type(None) in options:
        return None
    only = next((option for option in options if option is not type(None)), hint)
    if only in _PARTS:
        return _part(_PARTS[only], value, where, path)
    if is_dataclass(only):
        return _record(typing.cast(type, only), value, where, f"{path}.")
    if path.endswith("_bytes") and isinstance(value, str):
        return _size(value, where, path)
    try:
        return msgspec.convert(value, type=hint)
    except msgspec.ValidationError as error:
        at = str(error).replace("`", "").replace(" - at $", " at item ").lower()
        raise ConfigError(f"{where}: {path}: {at} {value!r:.60}; see --write-config for what it takes") from None


def _part(known: dict[str, type[Any]], value: Any, where: str, path: str) -> Any:
    """A selector or limiter, from its name or from a table with its name as `kind`."""
    table = {"kind": value} if isinstance(value, str) else value
    if not isinstance(table, Mapping) or not isinstance(table.get("kind"), str):
        raise ConfigError(f"{where}: {path}: {value!r:.60}; must be a name or a table with a kind")
    kind = table["kind"]
    if kind not in known:
        raise ConfigError(f"{where}: {path}: unknown kind {kind!r:.60}; known are {', '.join(known)}")
    return _record(known[kind], {name: v for name, v in table.items() if name != "kind"}, where, f"{path}.")


def _size(text: str, where: str, path: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{where}: {path}: {text!r:.60}; must be a number of bytes, or text such as '4 GiB'")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def _type_name(value: object) -> str:
    return {"dict": "table", "list": "array"}.get(type(value).__name__, type(value).__name__)
