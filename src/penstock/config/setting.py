"""The settings of a record, and the check of a value against its setting.

The annotation of a field declares everything. `Meta` has range and meaning; its `extra` may have

    keyword   the name as a keyword argument and as a flag, if it differs from the field's
    flat      True: the settings of this table are keyword arguments and flags themselves
    unit      True: a table given in part is not filled up from the setting's default
    path      True: a path; in a file it starts at the file's folder
    form      what text must look like, if a pattern is too hard to read

and `Kinds` beside it names the classes a value may be an instance of.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.errors import ConfigError

NONE = "none"
"""How a file writes None."""
_MAX_INT = 2**63 - 1
"""The largest number of SQLite, and of numpy's int64."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?")
_UNITS = {"": 1, **{f"{u}i": 1024**n for n, u in enumerate("KMGT", 1)}, **{u: 1000**n for n, u in enumerate("KMGT", 1)}}

_KNOWN: dict[type[Any], tuple[Setting, ...]] = {}


class Kinds(dict[str, type[Any]]):
    """Classes whose instances a setting accepts, by their name in a file."""

    @property
    def takes(self) -> str:
        """The names, with an example of the first class that has parameters."""
        names = f"one of {', '.join(self)}"
        for name, kind in self.items():
            values = [f"{setting.name} = {setting.default}" for setting in settings_of(kind)]
            if values:
                return f'{names}; or with parameters, {{ kind = "{name}", {", ".join(values)} }}'
        return names

    def name_of(self, value: object) -> str | None:
        """Return the name of a value's class, or None if it is not one of these."""
        return next((name for name, kind in self.items() if type(value) is kind), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One field of a record."""

    name: str
    type: Any
    """The annotated type, without None and without metadata."""
    meta: Meta
    optional: bool
    """Whether None is a value."""
    default: Any
    """MISSING: it must be given."""
    kinds: Kinds | None
    """Classes whose instances it accepts."""

    @property
    def meaning(self) -> str:
        return self.meta.description or ""

    @property
    def extra(self) -> Mapping[str, Any]:
        return self.meta.extra or {}

    @property
    def required(self) -> bool:
        return self.default is MISSING

    @property
    def record(self) -> type[Any] | None:
        """The record of a setting that is a table, else None."""
        return self.type if self.kinds is None and dataclasses.is_dataclass(self.type) else None

    @property
    def is_size(self) -> bool:
        """Whether it is a number of bytes, which may be written as "4 GiB"."""
        return self.name.endswith("_bytes")

    @property
    def takes(self) -> str:
        """A description of valid values: "a whole number from 1 up, or none"."""
        return _described(self) + (", or none" if self.optional else "")

    def convert(self, value: Any, path: str) -> Any:
        """Check a plain value (not a table) and convert it to the declared type. ConfigError names path and value."""
        if value is None or (value == NONE and isinstance(value, str) and self.optional):
            if self.optional:
                return None
            raise self.error(value, path)
        if isinstance(value, int) and abs(value) > _MAX_INT:  # first: Python writes 4,300 digits at most
            raise ConfigError(f"{path}: a number of {value.bit_length():,} bits; it must be below 2**63")
        try:
            return _finite(msgspec.convert(_plain(self, value), Annotated[self.type, _range_of(self.meta)]))
        except (msgspec.ValidationError, ValueError, OverflowError) as error:
            if isinstance(error.__cause__, ConfigError):  # a record inside the value has a better message
                raise ConfigError(f"{path}: {error.__cause__}") from None
            raise self.error(value, path) from None

    def error(self, value: Any, path: str) -> ConfigError:
        shown = repr(value)
        return ConfigError(f"{path}: {shown if len(shown) <= 60 else shown[:57] + '...'}; must be {self.takes}")


def settings_of(kind: type[Any]) -> tuple[Setting, ...]:
    """Return the settings of a record, in the order of declaration."""
    found = _KNOWN.get(kind)
    if found is None:
        hints = typing.get_type_hints(kind, include_extras=True)
        found = _KNOWN[kind] = tuple(_setting(field, hints[field.name]) for field in dataclasses.fields(kind))
    return found


def check(record: Any, name: str = "") -> None:
    """Check every value of a new record and convert it to its type. Call it first in `__post_init__`."""
    for setting in settings_of(type(record)):
        value, path = getattr(record, setting.name), f"{name}.{setting.name}" if name else setting.name
        if setting.record is not None or setting.kinds is not None:
            _check_part(setting, value, path)
        else:
            object.__setattr__(record, setting.name, setting.convert(value, path))


class Checked:
    """Base of records that check their settings and nothing else."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check(self)


def _check_part(setting: Setting, value: Any, path: str) -> None:
    if value is None and setting.optional:
        return
    if isinstance(value, type) or not isinstance(value, setting.type):
        raise setting.error(value, path)


def _setting(field: dataclasses.Field[Any], hint: Any) -> Setting:
    metas: list[Any] = []
    if typing.get_origin(hint) is Annotated:
        hint, *metas = typing.get_args(hint)
    optional = False
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        optional = len(options) < len(typing.get_args(hint))
        hint = options[0] if len(options) == 1 else hint
    # Evaluated once: defaults are frozen records or plain values, so sharing one is safe.
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return Setting(
        name=field.name,
        type=hint,
        meta=next((meta for meta in metas if isinstance(meta, Meta)), Meta()),
        optional=optional,
        default=default,
        kinds=next((meta for meta in metas if isinstance(meta, Kinds)), None),
    )


# -------------------------------------------------------------- values


def _range_of(meta: Meta) -> Meta:
    """Return the part of a declaration that msgspec checks."""
    names = ("gt", "ge", "lt", "le", "pattern", "min_length", "max_length")
    return Meta(**{name: getattr(meta, name) for name in names if getattr(meta, name) is not None})


def _plain(setting: Setting, value: Any) -> Any:
    """Convert numpy numbers, paths and sizes with units to plain values."""
    if setting.is_size and isinstance(value, str):
        return _size(value)
    if setting.type is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if typing.get_origin(setting.type) is tuple and isinstance(value, str):
        return (value,)  # one item needs no list
    if isinstance(value, bool):  # before numbers: a bool is an Integral, and `seq_len = true` must be an error
        return value
    if setting.type is int and isinstance(value, numbers.Integral):
        return int(value)
    if setting.type is float and isinstance(value, numbers.Real):
        return float(value)
    return value


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    return int(float(match[1]) * _UNITS[match[2] or ""])


def _finite(value: Any) -> Any:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)
    if any(isinstance(number, float) and not math.isfinite(number) for number in inner):
        raise ValueError(value)
    if any(isinstance(number, int) and abs(number) > _MAX_INT for number in inner):  # "9999999 TiB", or in a list
        raise ValueError(value)
    return value


# -------------------------------------------------------------- descriptions


def _described(setting: Setting) -> str:
    if setting.kinds is not None:
        return setting.kinds.takes
    if setting.record is not None:
        return "a table"
    if setting.is_size:
        return f"a size in bytes{_range(setting.meta)}, or text such as '4 GiB'"
    return _type_described(setting.type, setting.meta)


def _type_described(hint: Any, meta: Meta) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _type_described(inner[0], next(m for m in inner[1:] if isinstance(m, Meta)))
    if origin is Literal:
        return " or ".join(map(repr, inner)) if len(inner) < 3 else f"one of {', '.join(map(repr, inner))}"
    if origin is tuple and inner[-1] is Ellipsis:
        return f"a list, each item {_type_described(inner[0], meta)}"
    if origin is tuple:
        return f"a list of {len(inner)}, each {_type_described(inner[0], meta)}"
    if origin is dict:
        return f"a table, each value {_type_described(inner[1], meta)}"
    if "form" in (meta.extra or {}):
        return str((meta.extra or {})["form"])
    if hint is str:
        return "text"
    names = {int: "a whole number", float: "a number", bool: "true or false", Any: "anything"}
    return names.get(hint, getattr(hint, "__name__", str(hint))) + _range(meta)


def _range(meta: Meta) -> str:
    if meta.ge is not None and meta.le is not None:
        return f" from {meta.ge} to {meta.le}"
    bounds = {"above": meta.gt, "below": meta.lt, "of at most": meta.le}
    parts = [] if meta.ge is None else [f"from {meta.ge} up"]
    parts += [f"{relation} {bound}" for relation, bound in bounds.items() if bound is not None]
    return f" {' and '.join(parts)}" if parts else ""
