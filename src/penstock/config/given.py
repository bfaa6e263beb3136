"""Settings as given, nested tables as in TOML with the origin of each key, and the record that is built of them.

Unknown keys, missing keys and wrong values raise errors with their path and origin.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from penstock.config.setting import NONE, Kinds, Setting, settings_of
from penstock.errors import ConfigError

COMMAND_LINE = "the command line"
T = TypeVar("T")


@dataclass(slots=True)
class Given:
    """Settings before they are checked."""

    tables: dict[str, Any] = field(default_factory=dict)
    where: str = COMMAND_LINE
    """Where the tables came from: a file, or an address."""
    assigned: set[str] = field(default_factory=set)
    """Paths given on the command line, which win over the file."""
    names: dict[str, str] = field(default_factory=dict)
    """Path -> the caller's name for it, if that differs: a keyword argument, a flag."""

    @staticmethod
    def read(path: str | Path, *, hint: str, paths_of: type[Any] | None = None) -> Given:
        """Read a TOML file. `hint` is appended to errors and says how to write one.

        `paths_of` is a record: those of its settings that are relative paths start at the file's folder.
        """
        import tomllib  # most processes read no file

        file = Path(path)
        try:
            tables = tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror}; {hint}") from None
        except (ValueError, RecursionError) as error:  # the latter for lists within lists
            raise ConfigError(f"{file}: not TOML: {error}; {hint}") from None
        for setting in () if paths_of is None else settings_of(paths_of):
            value = tables.get(setting.name)
            if not setting.extra.get("path") or not isinstance(value, str) or "://" in value:
                continue
            if value not in ("", NONE, "memory:"):
                tables[setting.name] = str(file.resolve().parent / value)
        return Given(tables, str(file))

    def assign(self, text: str) -> None:
        """Set one key from `path.to.key=value`, the value as in TOML; text needs no quotes."""
        path, equals, value = text.partition("=")
        if not equals or not all(path.strip().split(".")):
            raise ConfigError(f"--set {text!r}: must be KEY=VALUE, for example --set timeouts.peer_s=5")
        self.set(path.strip(), toml_value(value))

    def set(self, path: str, value: Any) -> None:
        """Set one key by its path, as given on the command line."""
        *parents, name = path.split(".")
        tables = self.tables
        for parent in parents:
            tables = tables.setdefault(parent, {})
            if not isinstance(tables, dict):
                raise ConfigError(f"--set {path}: {parent} is a value, not a table; set {parent} itself")
        tables[name] = value
        self.assigned.add(path)

    def name(self, path: str) -> str:
        """Return the caller's name for a path."""
        if path in self.names:
            return self.names[path]
        table, dot, last = path.rpartition(".")
        return f"{self.name(table)}.{last}".lstrip(".") if dot else path

    def origin(self, path: str) -> str:
        """Return the origin of the value at a path, or of the table at it.

        With a file that has [timeouts] and `--set timeouts.peer_s=5`: "timeouts.peer_s" is from the command line, the
        table "timeouts" from both, "run" from the file.
        """
        below = {
            key for key in self.assigned if key == path or key.startswith(f"{path}.") or path.startswith(f"{key}.")
        }
        if not below or self.where == COMMAND_LINE:
            return self.where
        return COMMAND_LINE if path in below or path.rpartition(".")[0] in below else f"{self.where} and {COMMAND_LINE}"


def toml_value(text: str) -> Any:
    """Parse a value as TOML; anything else is text without quotes."""
    import tomllib

    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text.strip()


# ------------------------------------------------------------------ the record


def build(kind: type[T], given: Given | Mapping[str, Any], where: str = "settings") -> T:
    """Build a record from nested tables.

    >>> from penstock.protocol.timeouts import Timeouts
    >>> build(Timeouts, {"peer_s": 5}).peer_s
    5.0
    """
    if not isinstance(given, Given):
        given = Given(dict(given), where)
    made: T = _record(kind, given.tables, given, "", {})
    return made


def unknown(name: str, known: Iterable[str], what: str = "key") -> str:
    """Return the error text for an unknown name, with the closest known one."""
    import difflib  # only for mistakes

    names = list(known)
    close = difflib.get_close_matches(name, names, 1)
    return f"unknown {what}; " + (f"did you mean {close[0]!r}?" if close else f"known are {', '.join(names)}")


def _record(kind: type[Any], tables: Mapping[str, Any], given: Given, path: str, defaults: Mapping[str, Any]) -> Any:
    """Build one record from a table. Keys in neither the table nor `defaults` take the declared default."""
    settings = {setting.name: setting for setting in settings_of(kind)}
    for name in tables:
        if name not in settings:
            at = _join(path, name)
            raise ConfigError(f"{given.origin(at)}: {given.name(at)}: {unknown(name, settings)}")
    values = dict(defaults)
    for name, setting in settings.items():
        if name in tables:
            values[name] = _value(setting, tables[name], given, _join(path, name))
        elif setting.required and name not in values:
            at = given.name(_join(path, name))
            raise ConfigError(f"{given.origin(path)}: {at}: missing; {setting.meaning or 'give it'}")
    try:
        return kind(**values)
    except ConfigError as error:
        # "listen: empty; ..." is about `listen`, which the command line may have set beside a file.
        named = [_join(path, name) for name in str(error).partition(":")[0].split(", ") if name in settings]
        origins = {given.origin(at): None for at in named} or {given.origin(path) if path else given.where: None}
        origin = " and ".join(origins)
        table = f"{given.name(path)}: " if given.name(path) else ""
        raise ConfigError(f"{origin}: {table}{str(error).removeprefix(table)}") from None


def _value(setting: Setting, value: Any, given: Given, path: str) -> Any:
    if setting.record is None and setting.kinds is None:
        try:
            return setting.convert(value, given.name(path))
        except ConfigError as error:
            raise ConfigError(f"{given.origin(path)}: {error}") from None
    if setting.optional and (value is None or value == NONE):
        return None
    if not isinstance(value, type) and isinstance(value, setting.type):
        return value
    if setting.kinds is not None:
        return _part(setting, setting.kinds, value, given, path)
    assert setting.record is not None
    if not isinstance(value, Mapping):
        raise ConfigError(f"{given.origin(path)}: {setting.error(value, given.name(path))}")
    # A table given in part is filled up from the setting's own default: timeouts = {peer_s = 5} keeps the others. A
    # `unit` is not: target = {tokens = 4096} must not keep the default's `groups`.
    merged = isinstance(setting.default, setting.record) and not setting.extra.get("unit")
    base = setting.default if merged else None
    defaults = {} if base is None else {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
    return _record(setting.record, value, given, path, defaults)


def _part(setting: Setting, kinds: Kinds, value: Any, given: Given, path: str) -> Any:
    """Build one of several classes, from its name or from a table with its name as `kind`."""
    table = {"kind": value} if isinstance(value, str) else value
    if not isinstance(table, Mapping) or not isinstance(table.get("kind"), str):
        raise ConfigError(f"{given.origin(path)}: {setting.error(value, given.name(path))}")
    kind = table["kind"]
    if kind not in kinds:
        raise ConfigError(f"{given.origin(path)}: {given.name(path)}: {kind!r:.60}: {unknown(kind, kinds, 'kind')}")
    return _record(kinds[kind], {name: v for name, v in table.items() if name != "kind"}, given, path, {})


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
