"""Builds a record from tables. Unknown keys, missing keys and wrong values raise errors with their path and origin."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from penstock.config.given import Given
from penstock.config.setting import NONE, Kinds, Setting, settings_of
from penstock.errors import ConfigError

T = TypeVar("T")


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
