"""What the pages say of commands, files, extras and defaults is so."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from benchmarks import baselines, data
from penstock.cli import COMMANDS, build_parser
from penstock.extras import EXTRAS
from scripts.run_doc_blocks import pages

ROOT = Path(__file__).parent.parent
BESIDE = ("CONTRIBUTING.md", "AGENTS.md", "SECURITY.md", "llms.txt", "skills/penstock/SKILL.md")
PAGES = [*pages(), *(ROOT / name for name in BESIDE)]


def commands(text: str) -> Iterator[str]:
    """Every `penstock ...` in code: lines of blocks and words between backticks."""
    for line in re.findall(r"(?m)^(?:\$ )?(penstock [a-z]+(?: .*)?)$", text):
        yield line.partition("  #")[0]
    yield from re.findall(r"`(?:\.venv/bin/)?(penstock [a-z][^`]*)`", text)


def options() -> dict[str, set[str]]:
    """The flags of every command."""
    found: dict[str, set[str]] = {}
    for action in build_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, parser in action.choices.items():
                found[name] = set(flags_of(parser))
    return found


def flags_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The flags of a command, and of its own commands."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from flags_of(inner)


def test_every_command_and_flag_on_a_page_exists() -> None:
    known, seen = options(), 0
    for page in PAGES:
        for line in commands(page.read_text()):
            for part in re.split(r"[|;>]|&&", line):
                words = part.split()
                if not words or words[0] != "penstock":
                    continue
                if words[1] == "COMMAND" or words[1].startswith("--"):
                    continue
                assert words[1] in COMMANDS, f"{page.name}: {line}"
                flags = {re.sub(r"[=.,:)].*", "", word) for word in words[2:] if word.startswith("--")}
                assert flags <= known[words[1]], f"{page.name}: {line}"
                seen += 1
    assert seen > 60


def test_every_command_has_a_word_on_the_page_of_the_command_line() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    assert all(f"penstock {name}" in page or name in ("tokens", "view", "diff") for name in COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_targets_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"`make ([a-z-]+)`|^make ([a-z-]+)", text, re.MULTILINE):
        assert "".join(target) in targets, target
    for path in re.findall(r"`((?:src|tests|scripts|docs|examples)/[\w./-]+)`", text):
        assert (ROOT / path.rstrip("/")).exists(), path
    for path in re.findall(
        r"`((?:penstock|arrays|assets|capture|convert|frames|replay|packing|protocol|transport|plane|client|server|runs|log|storage|train|view)/[\w./]+\.py)`",
        text,
    ):
        assert (ROOT / "src" / "penstock" / path.removeprefix("penstock/")).exists(), path


def test_every_picture_is_shown_somewhere_and_can_be_made_anew() -> None:
    made = runpy.run_path(str(ROOT / "scripts" / "screenshot"))["PICTURES"]
    files = {file for _, own in made.values() for file in own}
    shown = {name for page in PAGES for name in re.findall(r"images/([\w-]+\.(?:svg|png))", page.read_text())}
    assert files == {path.name for path in (ROOT / "docs" / "images").iterdir()} == shown


def test_the_table_of_extras_is_that_of_the_package() -> None:
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", (ROOT / "docs" / "quickstart.md").read_text(), re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == {*EXTRAS, "all"}


def test_the_sizes_on_the_first_screen_are_those_of_the_defaults() -> None:
    rng = np.random.default_rng(7)
    data.long_sample(rng)  # as the benchmark does
    samples = data.long_group(rng)
    lists = baselines.as_lists(samples)
    sizes = {
        "default": len(ps.encode(samples)),
        "small": len(ps.encode(samples, profile="small")),
        "byte arrays": len(baselines.encode_byte_arrays(lists)),
        "lists": len(baselines.encode_lists(lists)),
    }
    said = re.search(
        r"takes \*\*([\d.]+) MB, lossless\*\*.*?\(([\d.]+) MB with `profile=\"small\"`\).*?"
        r"take ([\d.]+) MB and lists ([\d.]+) MB",
        (ROOT / "README.md").read_text(),
        re.DOTALL,
    )
    assert said is not None
    assert [f"{size / 1e6:.2f}" for size in sizes.values()] == list(said.groups())


def test_a_sample_above_the_cap_is_packed_alone_and_counted_as_the_readme_says() -> None:
    samples = [ps.Sample(id=str(i), token_ids=range(length)) for i, length in enumerate((100, 30, 30))]
    packed = ps.pack(samples, ranks=1, seq_len=128, micro_batch_max_tokens=64)
    lengths = [list(batch.sequence_lengths) for batch in packed.ranks[0]]
    assert sorted(map(sum, lengths)) == [60, 100] and [100] in lengths
    assert packed.accounting.total.samples == 3


def test_the_plain_reader_is_as_long_as_the_pages_say() -> None:
    lines = len((ROOT / "src/penstock/testing/wire.py").read_text().splitlines())
    for page in ("docs/internals/wire-format.md", "docs/internals/decisions.md"):
        assert f"{lines} lines" in (ROOT / page).read_text(), page


def test_the_steps_of_the_packer_name_functions_that_exist() -> None:
    text = ast.get_docstring(ast.parse((ROOT / "src/penstock/packing/rows.py").read_text())) or ""
    named = re.findall(r"`(\w+)\.(\w+)`", text)
    assert len(named) == 3
    for module, function in named:
        assert f"def {function}(" in (ROOT / f"src/penstock/packing/{module}.py").read_text()


def test_the_digest_of_a_delivery_is_of_the_plan_and_the_samples_digests() -> None:
    source = (ROOT / "src/penstock/protocol/messages.py").read_text()
    deliver = source[source.index("class Deliver(") : source.index("class Sent(")]
    assert "`arrays.digests.step_digest`" in deliver and "plan and payload" not in deliver


def test_scripts_without_a_suffix_import_names_that_exist() -> None:
    """The type checker does not read them, and pages name them as commands."""
    scripts = [path for path in (ROOT / "scripts").iterdir() if path.is_file() and not path.suffix]
    seen = 0
    for path in scripts:
        if not path.read_text().startswith("#!/usr/bin/env python3"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("penstock", "benchmarks", "tests")):
                module = importlib.import_module(node.module or "")
                for alias in node.names:
                    known = hasattr(module, alias.name) or importlib.util.find_spec(f"{node.module}.{alias.name}")
                    assert known, f"{path.name}: from {node.module} import {alias.name}"
                    seen += 1
    assert seen > 20
