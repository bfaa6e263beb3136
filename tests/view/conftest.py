"""Runs and exports that are looked at, servers that show them, and one browser for the tests that look at pages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.arrays import Sample
from penstock.assets import AssetStore
from penstock.testing import draw_screenshot
from penstock.view import Export
from penstock.view.library import Library
from penstock.view.run_files import at_work
from penstock.view.vocabulary import open_vocabulary
from penstock.view.web import serving
from tests.support.browser import browsing, find_chromium
from tests.support.exports import make_export
from tests.view.caller import Caller
from tests.view.run_pages import STEPS, ledger, metrics, write_lines


def _put(plane: ps.Plane, name: str, version: int) -> None:
    with plane.group(f"prompt of {name}", id=name, policy_version=version) as group:
        for reward in (0, 1):
            turns = [ps.Turn([1, 2]), ps.Turn([3, 4 + reward], logprobs=[-0.5, -0.25])]
            group.add(ps.Trajectory(turns=turns, reward=float(reward), env="math"))


@pytest.fixture
def dropped_run(tmp_path: Path) -> Iterator[Path]:
    """The folder of a run whose plane is at work: one group trained, two too old, one set aside, three filtered."""
    home = tmp_path / "dropped"
    with ps.open(
        home / "plane", ranks=1, seq_len=64, groups_per_step=1, max_staleness=1, untrained_groups="accept"
    ) as plane:
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


_browser: list[tuple[Any, ExitStack]] = []
"""Starting one takes two seconds of core time, so all modules that follow one another use the same. It is closed before
any other test: while it is there, no test can run an event loop of its own."""
_looking: set[Path] = set()
"""Modules with a test that looks at pages."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _looking.update(item.path for item in items if "browser" in getattr(item, "fixturenames", ()))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    if _browser and (nextitem is None or nextitem.path not in _looking):
        _browser.pop()[1].close()


@pytest.fixture
def browser() -> Any:
    if not _browser:
        find_chromium()
        stack = ExitStack()
        _browser.append((stack.enter_context(browsing()), stack))
    return _browser[0][0]


@pytest.fixture
def page(browser: Any) -> Any:
    """The one browser's page, with nothing of the test before on it."""
    browser.unroute_all()
    browser.goto("about:blank")
    browser.errors.clear()
    browser.set_viewport_size({"width": 1440, "height": 900})
    browser.emulate_media(color_scheme="light")
    return browser


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser") / "demo"
    make_export(folder, steps=4, ranks=3, groups=12, size=3, seed=5)
    return folder


@pytest.fixture(scope="module")
def demo_url(demo: Path) -> Iterator[str]:
    library = Library(exports={"demo": Export(demo)}, vocabulary=open_vocabulary(demo))
    with serving(library) as (url, _, _):
        yield url


@pytest.fixture
def opened(page: Any, demo_url: str) -> Iterator[Any]:
    """The last step's worst sample, as the URL opens it."""
    page.goto(demo_url + "#/samples")
    page.wait_for_selector("#counts table")
    yield page
    assert page.errors == []


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs in one folder: one that exports tokens, one that writes numbers only."""
    folder = tmp_path_factory.mktemp("pages") / "runs"
    make_export(folder, steps=3, ranks=2, groups=8, size=4, seed=6, run="alpha")
    write_lines(folder / "alpha" / "metrics.jsonl", [metrics(step) for step in range(1, STEPS + 1)])
    write_lines(folder / "alpha" / "plane.jsonl", [ledger(step) for step in range(1, STEPS + 1)])
    write_lines(folder / "beta" / "metrics.jsonl", [metrics(step, -0.2) for step in range(1, STEPS + 1)])
    with at_work(folder / "alpha"):
        pass
    return folder


@pytest.fixture(scope="module")
def home_url(home: Path) -> Iterator[str]:
    library = Library(exports={"runs": Export(home)}, vocabulary=open_vocabulary(home))
    with serving(library) as (url, _, _):
        yield url


@pytest.fixture
def at(page: Any, home_url: str) -> Iterator[Any]:
    """Opens a page of run alpha by the part of its address behind the `#/`."""

    def open_at(where: str, wait: str) -> Any:
        page.goto(home_url + "#/" + where)
        page.wait_for_selector(wait)
        return page

    yield open_at
    assert page.errors == []


@pytest.fixture(scope="module")
def viewer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    folder = tmp_path_factory.mktemp("view") / "demo"
    make_export(folder, steps=2, groups=3, size=2)
    store = AssetStore(folder / "assets")
    image = store.put(draw_screenshot(seed=1, width=64, height=48)).hash
    library = Library(exports={"demo": Export(folder)}, vocabulary=open_vocabulary(folder), images=store)
    with serving(library) as (_, port, token):
        yield Caller(port, token, image)
