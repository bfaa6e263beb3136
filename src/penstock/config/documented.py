"""Makes the tables of settings in the docs from the records that declare them."""

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
    """Return a Markdown table of all settings of a record; with `keywords`, also their names as arguments and flags.

    With `beyond`, leave out settings that this other record has with the same default.
    """
    names = {keyword.path: keyword.name for keyword in keywords_of(kind)} if keywords else {}
    rows = [_row(path, setting, default, names, keywords) for path, setting, default in _all(kind, "", None)]
    if beyond is not None:
        known = docs_table(beyond, keywords=keywords).splitlines()
        rows = [row for row in rows if row not in known]
    return "\n".join([*(_HEAD_WITH_KEYWORDS if keywords else _HEAD), *rows])


def kinds_table(roles: Mapping[str, Kinds]) -> str:
    """Return a Markdown table of the classes a setting may be set to, with their parameters."""
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


def _all(kind: type[Any], table: str, base: Any) -> list[tuple[str, Setting, Any]]:
    """Return every setting with its path and default: a table's own settings before the tables in it.

    `base` is the default of the table, whose values win over the declared defaults."""
    found, below = [], []
    for setting in settings_of(kind):
        path = f"{table}.{setting.name}".strip(".")
        default = setting.default if base is None else getattr(base, setting.name)
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
