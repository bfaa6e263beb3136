"""Settings as command-line flags: `--seq-len 4096` for every keyword, `--set timeouts.peer_s=5` for the rest."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Collection
from typing import Any

import msgspec

from penstock.config.given import Given, toml_value
from penstock.config.keywords import Keyword, keywords_of
from penstock.config.toml_template import toml

_PREFIX = "setting_"


def add_flags(parser: argparse.ArgumentParser, kind: type[Any], *, without: Collection[str] = ()) -> None:
    """Add a flag for every keyword that is not a table, and `--set` for any setting."""
    for keyword in flagged(kind, without):
        parser.add_argument(
            f"--{keyword.name.replace('_', '-')}",
            dest=_PREFIX + keyword.name,
            action="append" if _is_list(keyword) else "store",
            metavar=_metavar(keyword),
            help=_help(keyword).replace("%", "%%"),
        )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any setting, by its path")


def read_flags(args: argparse.Namespace, kind: type[Any], given: Given, *, without: Collection[str] = ()) -> None:
    """Put the values of flags into `given`, then those of each `--set`."""
    for keyword in flagged(kind, without):
        value = getattr(args, _PREFIX + keyword.name)
        if value is not None:
            given.names[keyword.path] = f"--{keyword.name.replace('_', '-')}"
            is_text = _is_list(keyword) or keyword.setting.type is str
            given.set(keyword.path, value if is_text else toml_value(value))
    for text in args.set:
        given.assign(text)


def flagged(kind: type[Any], without: Collection[str] = ()) -> list[Keyword]:
    """Return the keywords that have a flag."""
    return [
        keyword
        for keyword in keywords_of(kind)
        if keyword.name not in without
        and keyword.setting.record is None
        and typing.get_origin(keyword.setting.type) is not dict
        and not _is_list_of_records(keyword)
    ]


def _is_list(keyword: Keyword) -> bool:
    return typing.get_origin(keyword.setting.type) is tuple


def _is_list_of_records(keyword: Keyword) -> bool:
    return _is_list(keyword) and issubclass(typing.get_args(keyword.setting.type)[0], msgspec.Struct)


def _metavar(keyword: Keyword) -> str:
    if keyword.setting.is_size:
        return "BYTES"
    names = {int: "N", float: "X", bool: "true|false", str: "TEXT"}
    return names.get(keyword.setting.type, "TEXT" if _is_list(keyword) else "KIND")


def _help(keyword: Keyword) -> str:
    if keyword.default is dataclasses.MISSING or keyword.default is None or keyword.default == ():
        return keyword.setting.meaning
    return f"{keyword.setting.meaning} (default: {toml(keyword.default, keyword.setting)})"
