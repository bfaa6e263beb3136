"""Writes a record as TOML: every setting with its meaning, valid values and current value, or the values alone."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import msgspec

from penstock.config.setting import NONE, Kinds, Setting, settings_of

_WIDTH = 116


def template(record: Any, *, title: str, all_values: bool = False) -> str:
    """Return a file that reads back as `record`.

    Defaults are commented out, so that the file keeps meaning "the default" when a later version changes it. With
    `all_values` they are written out.
    """
    lines = _comment(title)
    for line in _section(record, "", all_values, off=False):
        lines += _comment(_note(line)) if isinstance(line, Setting) else [line]
    return "\n".join(lines).strip() + "\n"


def toml_values(record: Any) -> str:
    """Return every value of `record`, without comments. Every start of a plane writes its settings so."""
    lines = (line for line in _section(record, "", True, off=False) if isinstance(line, str))
    return "\n".join(line for line in lines if line and not line.startswith("#")) + "\n"


def toml(value: Any, setting: Setting | None = None) -> str:
    """Return a value as TOML.

    >>> toml({"kind": "freshest", "window": 2})
    '{ kind = "freshest", window = 2 }'
    """
    if value is None:
        return f'"{NONE}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return msgspec.json.encode(value).decode()
    if isinstance(value, msgspec.Struct):
        value = {
            field.name: getattr(value, field.name) for field in msgspec.structs.fields(value) if _is_set(value, field)
        }
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + " }" if value else "{}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(toml, value))}]"
    if setting is not None and setting.kinds is not None:
        return _part(value, setting.kinds)
    if setting is not None and setting.is_size:
        return _size(value)
    return repr(value)


def _is_set(record: msgspec.Struct, field: msgspec.structs.FieldInfo) -> bool:
    return bool(field.required or getattr(record, field.name) != field.default)


def _section(record: Any, path: str, all_values: bool, off: bool) -> Iterator[str | Setting]:
    """Yield the values of a table, then the tables in it. `off` comments all of it out.

    A setting among the lines stands for the comment about it."""
    mark = "# " if off else ""
    settings = sorted(settings_of(type(record)), key=lambda setting: not setting.required)  # required ones first
    tables = [setting for setting in settings if setting.record is not None or isinstance(setting.default, dict)]
    for setting in settings:
        if setting not in tables:
            value = getattr(record, setting.name)
            hidden = off or (not all_values and value == setting.default)
            yield from ("", setting)
            yield f"{'# ' if hidden else ''}{setting.name} = {toml(value, setting)}"
    for setting in tables:
        yield from _table(setting, getattr(record, setting.name), f"{path}.{setting.name}".strip("."), all_values, mark)


def _table(setting: Setting, value: Any, path: str, all_values: bool, mark: str) -> Iterator[str | Setting]:
    off = bool(mark) or value is None
    yield from ("", f"{'# ' if off else ''}[{path}]", setting)
    if setting.record is None:
        yield from (f"{key} = {toml(item)}" for key, item in value.items())
    else:
        yield from _section(setting.record() if value is None else value, path, all_values, off)


def _note(setting: Setting) -> str:
    meaning = setting.meaning[:1].upper() + setting.meaning[1:]
    if setting.record is not None:
        return f"{meaning}."
    obvious = setting.takes.removesuffix(", or none") in ("text", "true or false", "a list, each item text")
    return f"{meaning}." if obvious else f"{meaning} ({setting.takes})."


def _comment(text: str) -> list[str]:
    """Wrap text into comment lines. Text in braces, an inline table, is not broken."""
    # "\0" stands for a space that textwrap must not break at.
    glued = re.sub(r"\{.*?\}", lambda found: found[0].replace(" ", "\0"), text)
    lines = [line for part in glued.splitlines() for line in textwrap.wrap(part, _WIDTH) or [""]]
    return [f"# {line}".rstrip().replace("\0", " ") for line in lines]


def _part(value: Any, kinds: Kinds) -> str:
    name = kinds.name_of(value) or type(value).__name__
    fields = (
        {s.name: getattr(value, s.name) for s in settings_of(type(value))} if dataclasses.is_dataclass(value) else {}
    )
    return toml({"kind": name, **fields}) if fields else toml(name)


def _size(value: int) -> str:
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if value and value % 1024**power == 0:
            return f'"{value // 1024**power} {unit}"'
    return str(value)
