"""The table of settings in the docs, from the records that declare them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from penstock.config.keywords import keywords_of
from penstock.config.setting import Kinds, Setting, settings_of
from penstock.config.toml_template import toml

_HEAD = ("| in a file | takes | default | what it does |", "|---|---|---|---|")
_HEAD_WITH_KEYWORDS = ("| keyword, flag | in a file | takes | default | what it does |", "|---|---|---|---|---|")


def docs_table(kind: type[Any], *, keywords: bool = True, beyond: type[Any] | None = None) -> str:
    """A Markdown table of every setting of a record; with `keywords`, also their names as arguments and flags.

    With `beyond`, only of those that another record does not have, or has with another default.
    """
    names = {keyword.path: keyword.name for keyword in keywords_of(kind)} if keywords else {}
    rows = [_row(path, setting, default, names, keywords) for path, setting, default in _all(kind, "", None)]
    if beyond is not None:
        known = docs_table(beyond, keywords=keywords).splitlines()
        rows = [row for row in rows if row not in known]
    return "\n".join([*(_HEAD_WITH_KEYWORDS if keywords else _HEAD), *rows])


def kinds_table(roles: Mapping[str, Kinds]) -> str:
    """A Markdown table of the classes that settings may be made of, and of their parameters."""
    rows = ["| for | name | what it is | parameters |", "|---|---|---|---|"]
    for role, kinds in roles.items():
        for name, kind in kinds.items():
            parameters = [_parameter(setting) for setting in settings_of(kind)]
            about = (kind.__doc__ or "").partition("\n")[0].rstrip(".")
            rows.append(f"| {role} | `{name}` | {about} | {'; '.join(parameters)} |")
    return "\n".join(rows)


def _parameter(setting: Setting) -> str:
    default = "must be given" if setting.required else f"default {toml(setting.default, setting)}"
    return f"`{setting.name}`: {setting.meaning} ({setting.takes}; {default})"


def _all(kind: type[Any], table: str, whole: Any) -> list[tuple[str, Setting, Any]]:
    """Every setting with its path and default: those of a table before the tables in it."""
    found, below = [], []
    for setting in settings_of(kind):
        path = f"{table}.{setting.name}".strip(".")
        default = setting.default if whole is None else getattr(whole, setting.name)
        if setting.record is None:
            found.append((path, setting, default))
        else:
            inner = default if isinstance(default, setting.record) else None
            below += _all(setting.record, path, inner)
    return [*found, *below]


def _row(path: str, setting: Setting, default: Any, names: dict[str, str], keywords: bool) -> str:
    shown = "must be given" if default is dataclasses.MISSING else f"`{toml(default, setting)}`"
    cells = [f"`{path}`", setting.takes, shown, setting.meaning]
    if keywords:
        cells.insert(0, f"`{names[path]}`" if path in names else "")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
