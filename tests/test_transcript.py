"""The first half hour of a new user: every command of the page runs, and prints what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.run_transcript import Command, Differs, File, Shell, run_page, steps

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "first-half-hour.md"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_new_users_first_half_hour_goes_as_its_page_says(tmp_path: Path) -> None:
    assert run_page(PAGE, tmp_path) >= 15


@pytest.mark.timeout(600)
def test_half_an_hour_with_an_own_loop_goes_as_its_page_says(tmp_path: Path) -> None:
    """The loop is killed and continued, and does not differ from one that was not killed."""
    assert run_page(ROOT / "docs" / "half-hour-own-loop.md", tmp_path) == 12


@pytest.mark.release
@pytest.mark.timeout(900)
def test_rollouts_with_verifiers_go_as_their_page_says(tmp_path: Path) -> None:
    """A trainer and its plane are killed on the way, and go on. `make test-packaging` runs it as well."""
    assert run_page(ROOT / "docs" / "integrations" / "verifiers.md", tmp_path) == 14


def test_the_page_for_operators_goes_as_it_says(tmp_path: Path) -> None:
    """A backup, a log that stepped back, and its recovery; then keys that are rotated."""
    assert run_page(ROOT / "docs" / "operate.md", tmp_path) >= 25


def test_a_page_that_shows_something_else_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text\n```console\n$ echo one\none\n$ echo two\nthree\n```\n")
    with pytest.raises(Differs, match=r"page.md:5: \$ echo two\nexpected\nthree\n\nprinted\ntwo"):
        run_page(page, tmp_path)


def test_a_command_that_waits_for_what_never_comes_is_named(tmp_path: Path) -> None:
    shell = Shell(tmp_path, deadline_s=1.0)
    words = "echo began; until false; do sleep 0.1; done"
    with pytest.raises(Differs, match=r"until false.*\nit did not end within 1 s; before that it printed:\nbegan"):
        shell.run(words)
    shell.close()


def test_files_of_a_page_are_written_and_blocks_that_are_not_run_are_left_out() -> None:
    page = "<!-- file: a.py -->\n```python\nx = 1\n```\n<!-- not run: needs a host -->\n```console\n$ b\n```\n"
    assert list(steps(page)) == [File(name="a.py", text="x = 1\n")]
    assert [type(step) for step in steps(PAGE.read_text())].count(Command) >= 15
