"""Settings as keyword arguments: one per setting in tables marked `flat`, one per table for the others."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from penstock.config.given import Given, unknown
from penstock.config.setting import Setting, settings_of
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Keyword:
    """A setting as a keyword argument."""

    name: str
    path: str
    """Its path in a file: "packing.seq_len"."""
    setting: Setting
    default: Any
    """Default of the record, or of the table it belongs to; MISSING: it must be given."""


def keywords_of(kind: type[Any]) -> tuple[Keyword, ...]:
    """Return the keyword arguments of a record, required ones first."""
    found: list[Keyword] = []
    for setting in settings_of(kind):
        if setting.record is not None and setting.extra.get("flat"):
            base = setting.default if isinstance(setting.default, setting.record) else None
            found += [_keyword(inner, setting.name, base) for inner in settings_of(setting.record)]
        else:
            found.append(_keyword(setting, "", None))
    return tuple(sorted(found, key=lambda keyword: keyword.default is not dataclasses.MISSING))


def nested(kind: type[Any], arguments: Mapping[str, Any], where: str) -> Given:
    """Turn keyword arguments into tables for `build`. Errors still use the arguments' names."""
    known = {keyword.name: keyword for keyword in keywords_of(kind)}
    names = {keyword.path: keyword.name for keyword in known.values()}
    # A flat table has no name of its own among keywords: errors say "seq_len", not "packing.seq_len".
    names |= {setting.name: "" for setting in settings_of(kind) if setting.extra.get("flat")}
    tables: dict[str, Any] = {}
    for name, value in arguments.items():
        if name not in known:
            raise ConfigError(f"{where}: {name}: {unknown(name, known, 'setting')}")
        table, _, key = known[name].path.rpartition(".")
        (tables.setdefault(table, {}) if table else tables)[key] = value
    return Given(tables, where, names=names)


def signature_of(function: Callable[..., Any], kind: type[Any]) -> inspect.Signature:
    """Return a function's signature with `**settings` spelled out, for `help` and for editors."""
    return _spelled_out(inspect.signature(function), kind)


def _spelled_out(own: inspect.Signature, kind: type[Any], base: type[Any] | None = None) -> inspect.Signature:
    """Spell out the keywords of `kind`, with the defaults that they have in `base`."""
    kept = [one for one in own.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    defaults = {keyword.name: keyword.default for keyword in keywords_of(kind)}
    defaults |= {keyword.name: keyword.default for keyword in keywords_of(base)} if base is not None else {}
    more = [
        inspect.Parameter(
            keyword.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty
            if defaults[keyword.name] is dataclasses.MISSING
            else defaults[keyword.name],
            annotation=argument_type(keyword.setting),
        )
        for keyword in keywords_of(kind)
    ]
    return own.replace(parameters=[*kept, *more])


class LateSignature(inspect.Signature):
    """`signature_of` for a function whose settings are too slow to import: they are loaded when it is looked at.

    The first of `kinds` has the settings, the last one the defaults."""

    def __init__(self, function: Callable[..., Any], *kinds: Callable[[], type[Any]]) -> None:
        own = inspect.signature(function)
        super().__init__(list(own.parameters.values()), return_annotation=own.return_annotation)
        self._make: Callable[[], inspect.Signature] = lambda: _spelled_out(own, kinds[0](), kinds[-1]())

    @property
    def parameters(self) -> types.MappingProxyType[str, inspect.Parameter]:
        return self._make().parameters


def argument_type(setting: Setting) -> str:
    """Return the type that a caller may pass, as source: any sequence for a list, any mapping for a table."""
    text = _text_of(setting.type)
    if setting.extra.get("path"):
        text = "str | Path"
    return f"{text} | None" if setting.optional else text


def _keyword(setting: Setting, table: str, base: Any) -> Keyword:
    return Keyword(
        name=setting.extra.get("keyword", setting.name),
        path=f"{table}.{setting.name}".strip("."),
        setting=setting,
        default=setting.default if base is None else getattr(base, setting.name),
    )


def _text_of(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _text_of(inner[0])
    if origin is Literal:
        return f"Literal[{', '.join(msgspec.json.encode(item).decode() for item in inner)}]"
    if origin is tuple and inner[-1] is Ellipsis:
        return f"{Sequence.__name__}[{_text_of(inner[0])}]"
    if origin is tuple:
        return f"tuple[{', '.join(map(_text_of, inner))}]"
    if origin is dict:
        return f"{Mapping.__name__}[{', '.join(map(_text_of, inner))}]"
    if isinstance(hint, types.UnionType):
        return " | ".join(map(_text_of, inner))
    return "Any" if hint is Any else str(getattr(hint, "__name__", hint))
