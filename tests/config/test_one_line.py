"""A setting is one line: a record with one more field has it in every place where settings are seen."""

from __future__ import annotations

import argparse
import inspect
import tomllib
from dataclasses import dataclass, replace
from typing import Annotated, Any

import pytest
from msgspec import Meta

from penstock.config import (
    Given,
    add_flags,
    build,
    check,
    keywords_of,
    nested,
    read_flags,
    signature_of,
    template,
)
from penstock.errors import ConfigError
from penstock.plane.settings import EXAMPLE, ServerSettings
from scripts import make_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class WithOneMore(ServerSettings):
    colour_depth: Annotated[int, Meta(ge=1, le=48, description="bits of a colour")] = 8


TABLES: dict[str, Any] = {"folder": "x", "packing": {"ranks": 1, "seq_len": 8}, "target": {"groups": 1}}


def open_like(where: str, **settings: Any) -> WithOneMore:
    return build(WithOneMore, nested(WithOneMore, settings, where))


def test_a_setting_declared_in_one_line_is_a_keyword_with_its_type_and_default() -> None:
    shown = inspect.Signature.from_callable(open_like).replace(
        parameters=signature_of(open_like, WithOneMore).parameters.values()  # type: ignore[arg-type]
    )
    assert (shown.parameters["colour_depth"].default, shown.parameters["colour_depth"].annotation) == (8, "int")
    assert '    colour_depth: int\n    """Bits of a colour."""' in make_settings.typed_dict("K", WithOneMore, "")
    made = open_like("here", folder="x", ranks=1, seq_len=8, groups_per_step=1, colour_depth=3)
    assert made.colour_depth == 3
    with pytest.raises(ConfigError, match="here: color_depth: unknown setting; did you mean 'colour_depth'"):
        open_like("here", color_depth=3)


def test_a_setting_declared_in_one_line_is_read_from_toml_and_set_by_path() -> None:
    given = Given(tomllib.loads("colour_depth = 4"), "plane.toml")
    given.tables |= TABLES
    assert build(WithOneMore, given).colour_depth == 4
    given.assign("colour_depth=5")
    assert build(WithOneMore, given).colour_depth == 5
    given.assign("colour_depth=49")
    with pytest.raises(ConfigError, match=r"^the command line: colour_depth: 49; must be a whole number from 1 to 48$"):
        build(WithOneMore, given)


def test_a_setting_declared_in_one_line_is_a_flag_with_help() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, WithOneMore)
    given = Given({**TABLES})
    read_flags(parser.parse_args(["--colour-depth", "6", "--needs=logprobs", "--needs=rewards"]), WithOneMore, given)
    made = build(WithOneMore, given)
    assert (made.colour_depth, made.needs) == (6, ("logprobs", "rewards"))
    assert "bits of a colour (default: 8)" in parser.format_help()


def test_a_setting_declared_in_one_line_stands_in_the_template_and_in_the_docs_table() -> None:
    values = {
        keyword.setting.name: getattr(EXAMPLE, keyword.path)
        for keyword in keywords_of(ServerSettings)
        if "." not in keyword.path
    }
    example = WithOneMore(
        packing=EXAMPLE.packing, target=EXAMPLE.target, **{n: v for n, v in values.items() if n != "watchdog"}
    )
    text = template(example, title="T")
    assert "# Bits of a colour (a whole number from 1 to 48).\n# colour_depth = 8\n" in text
    assert "\ncolour_depth = 9\n" in template(replace(example, colour_depth=9), title="T")
    row = "| `colour_depth` | `colour_depth` | a whole number from 1 to 48 | `8` | bits of a colour |"
    assert row in make_settings.docs_table(WithOneMore).splitlines()


def test_what_is_made_of_the_declarations_is_up_to_date() -> None:
    for path, text in make_settings.wanted().items():
        assert path.read_text() == text, f"{path.name}: run scripts/make_settings.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    count: Annotated[int, Meta(ge=1)] = 1
    rate: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    size_bytes: int = 0
    pair: tuple[float, float] = (0.0, 1.0)
    counts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check(self)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": True}, "count: True; must be a whole number from 1 up"),
        ({"count": 1.0}, "count: 1.0; must be a whole number"),
        ({"count": 2**63}, "count: a number of 64 bits; it must be below 2**63"),
        ({"count": 10**5000}, "count: a number of 16,610 bits; it must be below 2**63"),
        ({"size_bytes": "9999999999 TiB"}, "size_bytes: '9999999999 TiB'; must be a size"),
        ({"size_bytes": "9" * 400}, "size_bytes: '999"),
        ({"counts": (1, 2**63)}, "counts: (1, 9223372036854775808); must be a list, each item a whole number"),
        ({"rate": float("nan")}, "rate: nan; must be a number from 0 up and below 1"),
        ({"rate": 1.0}, "rate: 1.0; must be a number from 0 up and below 1"),
        ({"pair": (1.0, float("inf"))}, "pair: "),
        ({"pair": (1.0,)}, "must be a list of 2, each a number"),
        ({"size_bytes": "x" * 200}, "size_bytes: 'xxx"),
    ],
)
def test_values_out_of_range_are_refused_when_a_record_is_made(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Numbers(**values)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 160


def test_values_are_brought_to_their_type() -> None:
    import numpy as np

    made = Numbers(count=np.int64(3), rate=np.float32(0.5), size_bytes="2 KiB", pair=[1, 2])  # type: ignore[arg-type]
    assert (made.count, made.rate, made.size_bytes, made.pair) == (3, 0.5, 2048, (1.0, 2.0))
    assert (type(made.count), type(made.rate)) == (int, float)
