"""The documentation shows what the code does: its examples run, its generated parts are those of today."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from penstock.cli import COMMANDS
from penstock.commands.inspect import inspect_frame
from scripts import make_diagram, make_hex
from scripts.run_doc_blocks import blocks, main, pages

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent
PAGES = pages()
SKILL = ROOT / "skills" / "penstock" / "SKILL.md"
BESIDE = [SKILL, *(ROOT / name for name in ("CONTRIBUTING.md", "AGENTS.md", "SECURITY.md", "llms.txt"))]
"""Pages outside docs/, for people and for coding agents."""


def test_readme_shows_the_quickstart_of_the_examples() -> None:
    code = (ROOT / "examples" / "quickstart.py").read_text().split('"""\n\n', 1)[1]
    first = next(blocks((ROOT / "README.md").read_text()))
    assert first.code == code
    assert len([line for line in code.splitlines() if line]) < 15


def test_quickstart_runs() -> None:
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / "quickstart.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[11 12 13 21 22 11 12 13 21 22 11 12 13 21 22 11 12 13 21 22] [5 5 5 5] 8\n"


def words(text: str) -> int:
    """Words of a page: code counts, bars of tables and lines of boxes do not."""
    return sum(any(letter.isalnum() for letter in word) for word in text.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_has_more_than_2500_words(page: Path) -> None:
    assert words(page.read_text()) <= 2500


def test_the_readme_has_at_most_900_words_before_its_links() -> None:
    assert words((ROOT / "README.md").read_text().split("## Documentation")[0]) <= 900


def test_diagram_of_imports_is_that_of_the_code() -> None:
    page = make_diagram.PAGE.read_text()
    assert make_diagram.updated(page) == page, "run scripts/make_diagram.py"


def test_hex_example_is_what_the_encoder_writes() -> None:
    page = make_hex.PAGE.read_text()
    assert make_hex.updated(page) == page, "run scripts/make_hex.py"


def test_inspect_example_is_what_the_command_prints() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    report = inspect_frame((ROOT / "tests" / "golden" / "v1" / "plain_group_fast.frame").read_bytes())
    for column in report["columns"]:
        assert re.search(rf"^{column['name']} +{re.escape(column['coding'])} +{column['bytes']:,} ", page, re.MULTILINE)


@pytest.mark.parametrize("page", [*PAGES, *BESIDE], ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_page_is_reached_from_the_readme(page: Path) -> None:
    """Those of a folder by way of its index."""
    if page.name == "README.md":
        return
    by_index = page.parent != ROOT / "docs" and page.name != "index.md"
    start = page.parent / "index.md" if by_index else ROOT / "README.md"
    assert f"({page.relative_to(start.parent).as_posix()}" in start.read_text()


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_sections_lead_to_a_heading(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
        file = page.parent / target if target else page
        assert anchor in anchors(file), f"{page.name} links to {target}#{anchor}"


def test_the_first_page_of_the_site_leads_to_every_page() -> None:
    first = ROOT / "docs" / "index.md"
    own = [page for page in PAGES if page.parent == first.parent and page != first]
    folders = [page for page in PAGES if page.name == "index.md" and page != first]
    for page in own + folders:
        assert f"({page.relative_to(first.parent).as_posix()}" in first.read_text()


def test_the_skill_runs_and_says_when_to_use_it() -> None:
    head = SKILL.read_text().split("---\n")[1]
    assert re.search(r"^name: penstock\ndescription: .{80,1000}$", head, re.MULTILINE)
    assert main([str(SKILL)]) == 0


def test_llms_txt_has_the_form_that_readers_expect() -> None:
    lines = (ROOT / "llms.txt").read_text().splitlines()
    assert lines[0] == "# Penstock" and lines[2].startswith("> ")
    assert all(re.match(r"- \[.+\]\(.+\)", line) for line in lines if line.startswith("-"))


def test_ci_of_every_host_runs_the_same_script() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow["jobs"]["test"]["steps"][-1] == {"run": "bash .ci/run"}
    for page in (ROOT / ".github").rglob("*.md"):
        for name in re.findall(r"`penstock ([a-z]+)", page.read_text()):
            assert name in COMMANDS, page


def test_a_block_that_fails_is_named_by_page_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```python\nx = 1\n```\n\ntext\n\n```python\n\nassert x == 2, 'x is one'\n```\n")
    assert main([str(page)]) == 1
    assert capsys.readouterr().err.strip().endswith("page.md:11: AssertionError: x is one")


def test_a_block_is_left_out_only_with_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- not run: needs two hosts -->\n\n```python\n1 / 0\n```\n\n```text\nnot Python\n```\n")
    assert main([str(page)]) == 0
    assert "0 blocks, 1 left out" in capsys.readouterr().out
    page.write_text("<!-- not run: -->\n```python\n1 / 0\n```\n")
    assert main([str(page)]) == 1
