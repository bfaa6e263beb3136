"""A run with groups that did not reach the trainer, and one browser for the tests that look at pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.arrays import Sample
from penstock.testing.browser import browsing, find_chromium


def _put(plane: ps.Plane, name: str, version: int) -> None:
    with plane.group(f"prompt of {name}", id=name, policy_version=version) as group:
        for reward in (0, 1):
            turns = [ps.Turn([1, 2]), ps.Turn([3, 4 + reward], logprobs=[-0.5, -0.25])]
            group.add(ps.Trajectory(turns=turns, reward=float(reward), env="math"))


@pytest.fixture
def dropped_run(tmp_path: Path) -> Iterator[Path]:
    """The folder of a run whose plane is at work: one group trained, two too old, one set aside, three filtered."""
    home = tmp_path / "dropped"
    with ps.open(home / "plane", ranks=1, seq_len=64, groups_per_step=1, max_staleness=1) as plane:
        _put(plane, "first", 0)
        with plane.source(0) as source:
            source.commit(source.step(timeout=30), policy_version=9)
            source.flush()
            for name in ("old-1", "old-2"):
                _put(plane, name, 1)
            for name in ("new-1", "new-2"):
                _put(plane, name, 9)
            odd = Sample.from_prompt(id="odd/0", group="odd", prompt_ids=[1, 2], completion_ids=[7, 8])
            plane.put([odd.replace(policy_version=9)])
            source.commit(source.step(timeout=30), policy_version=9)
            source.flush()
            plane.discard("too long", 3)
            assert plane.ledger.quarantined == 1
        yield home


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    find_chromium()
    with browsing() as page:
        yield page


@pytest.fixture
def page(browser: Any) -> Any:
    """The one browser's page, with nothing of the test before on it."""
    browser.goto("about:blank")
    browser.errors.clear()
    browser.set_viewport_size({"width": 1440, "height": 900})
    browser.emulate_media(color_scheme="light")
    return browser
