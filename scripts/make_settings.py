"""Write what is made of the declarations of settings: keyword types, and the tables of the settings pages.

.venv/bin/python scripts/make_settings.py            write them
.venv/bin/python scripts/make_settings.py --check    exit 1 when one is out of date
"""

from __future__ import annotations

import dataclasses
import re
import sys
import textwrap
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.config import Keyword, Kinds, Setting, keywords_of, settings_of
from penstock.config.keywords import argument_type
from penstock.config.toml_template import toml
from penstock.packing import Packing
from penstock.plane.settings import ClusterSettings, PlaneSettings, ServerSettings
from penstock.replay import LIMITERS, SELECTORS, Settings
from penstock.train.run_config import TrainConfig

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
_MADE = "Made by scripts/make_settings.py."
_HEAD = ("| in a file | takes | default | what it does |", "|---|---|---|---|")
_HEAD_WITH_KEYWORDS = ("| keyword, flag | in a file | takes | default | what it does |", "|---|---|---|---|---|")


def modules() -> dict[Path, str]:
    """The modules with keyword types, as they should be."""
    package = ROOT / "src" / "penstock"
    table = typed_dict("TableKeywords", Settings, f"The keyword arguments of `Table`. {_MADE}")
    plane = typed_dict("PlaneKeywords", ClusterSettings, f"The keyword arguments of `penstock.open`. {_MADE}")
    packing = typed_dict("PackingKeywords", Packing, f"The keyword arguments of `pack`. {_MADE}", required=True)
    return {
        package / "packing" / "packing_keywords.pyi": packing,
        package / "replay" / "table_keywords.pyi": table,
        package / "client" / "plane_keywords.pyi": plane,
    }


# ------------------------------------------------------------------ keyword types


def typed_dict(name: str, kind: type[Any], meaning: str, *, required: bool = False) -> str:
    """Return the source of a stub with a TypedDict of the keyword arguments, for type checkers.

    With `required`, arguments without a default are marked Required.
    """
    types_ = {keyword.name: argument_type(keyword.setting) for keyword in keywords_of(kind)}
    for keyword in keywords_of(kind) if required else ():
        if keyword.default is dataclasses.MISSING:
            types_[keyword.name] = f"Required[{types_[keyword.name]}]"
    lines = [f'"""{meaning}"""', "", *_imports(kind, types_), "", *_class(name, kind, meaning, types_)]
    return "\n".join(lines) + "\n"


def _imports(kind: type[Any], types_: Mapping[str, str]) -> list[str]:
    settings = [keyword.setting for keyword in keywords_of(kind)]
    mentioned = set(re.findall(r"\w+", " ".join(types_.values())))
    homes = {"collections.abc": {"Mapping", "Sequence"}, "pathlib": {"Path"}, "typing": {"Any", "Literal", "Required"}}
    used = {home: sorted(names & mentioned) for home, names in homes.items()}
    used["typing"] = sorted([*used["typing"], "TypedDict"])
    items = [typing.get_args(s.type)[0] for s in settings if typing.get_origin(s.type) is tuple]
    classes = [s.type for s in settings if s.record is not None or s.kinds is not None]
    classes += [item for item in items if isinstance(item, type) and issubclass(item, msgspec.Struct)]
    ours = {(one.__module__, one.__name__) for one in classes}
    lines = [f"from {home} import {', '.join(names)}" for home, names in used.items() if names]
    names_in = {home: sorted(one for place, one in ours if place == home) for home, _ in sorted(ours)}
    more = [f"from {home} import {', '.join(names)}" for home, names in names_in.items()]
    return [*lines, *(["", *more] if more else [])]


def _class(name: str, kind: type[Any], meaning: str, types_: Mapping[str, str]) -> list[str]:
    lines = [f"class {name}(TypedDict, total=False):", f'    """{meaning}"""', ""]
    for keyword in keywords_of(kind):
        lines.append(f"    {keyword.name}: {types_[keyword.name]}")
        lines += textwrap.wrap(f'"""{_sentence(keyword)}"""', 118, initial_indent="    ", subsequent_indent="    ")
    return lines


def _sentence(keyword: Keyword) -> str:
    meaning = keyword.setting.meaning
    return f"{meaning[:1].upper()}{meaning[1:]}."


# ------------------------------------------------------------------ tables of the docs


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


def markers(name: str) -> tuple[str, str]:
    return f"<!-- {name} settings: made by scripts/make_settings.py -->", f"<!-- end of {name} settings -->"


def tables() -> dict[str, dict[str, str]]:
    """The tables of today, by page and by name."""
    plane = {
        "plane": docs_table(ServerSettings),
        "cluster": docs_table(ClusterSettings, beyond=ServerSettings),
    }
    run = {"run": docs_table(TrainConfig, keywords=False, beyond=PlaneSettings)}
    parts = {"parts": kinds_table({"sampler, remover": SELECTORS, "limiter": LIMITERS})}
    return {"settings.md": plane, "replay.md": parts, "trainer-settings.md": run}


def updated(page: str, tables: dict[str, str]) -> str:
    """The page with the tables of today."""
    for name, table in tables.items():
        start, end = markers(name)
        before, rest = page.split(start)
        page = f"{before}{start}\n{table}\n{end}{rest.split(end)[1]}"
    return page


def wanted() -> dict[Path, str]:
    """Every file that is made here, or in part, as it should be."""
    pages = {DOCS / name: made for name, made in tables().items()}
    return modules() | {page: updated(page.read_text(encoding="utf-8"), made) for page, made in pages.items()}


def main(arguments: list[str]) -> int:
    stale = [path for path, text in wanted().items() if path.read_text(encoding="utf-8") != text]
    for path in stale:
        if "--check" in arguments:
            print(f"{path.relative_to(ROOT)}: out of date; run scripts/make_settings.py", file=sys.stderr)
        else:
            path.write_text(wanted()[path], encoding="utf-8")
    return int(bool(stale) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
