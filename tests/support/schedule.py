"""A pytest plugin for `make test`: which modules of `src` are collected, and which modules run first and together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

_SRC = Path(__file__).parents[2] / "src"
FORKED = {
    "test_demo",
    "test_ranks",
    "test_refusals",
    "test_top_p",
    "test_train_command",
    "test_trainer_kit_ranks",
    "test_trees",
}
"""Modules whose processes are forked from one that has imported torch and transformers, which takes eight seconds of
core time. One worker runs them all."""
BROWSER = {
    "test_compared_pages",
    "test_group_page",
    "test_page_contents",
    "test_prompts_page",
    "test_rollout_page",
    "test_run_page",
    "test_runs_page",
    "test_sample_page",
    "test_screens",
    "test_watching",
}
"""Modules that look at pages, with one browser if one worker runs them in turn."""
LONG = FORKED | {
    "test_cluster",
    "test_direct",
    "test_faults",
    "test_growth",
    "test_injected",
    "test_kill_points",
    "test_network",
    "test_objects_killed",
    "test_outages",
    "test_plane_benches",
    "test_postgres",
    "test_processes",
    "test_put_many_killed",
    "test_storage_bench",
    "test_transcript",
    "test_waiting_line",
    "test_watching",
}
"""Modules of more than half a minute among those that start processes, and those that run together."""


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Of `src`, collect modules with examples only: some integrations take seconds to import, in each worker."""
    is_module = collection_path.suffix == ".py" and collection_path.is_relative_to(_SRC)
    return True if is_module and ">>> " not in collection_path.read_text(encoding="utf-8") else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = _places(items)
    items.sort(key=lambda item: place[item.path])


def _places(items: Sequence[pytest.Item]) -> dict[Path, float]:
    """Where each module stands in the order of the tests, from 0 to 1.

    Modules that start processes wait half of their time, others compute all of it. They are mixed evenly: one kind
    after the other would leave a core idle first, and then have six workers share two. In each kind the long modules
    start first: last they would leave the other workers idle.
    """
    waiting = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("process")}
    deep = {item.path for item in items if item.get_closest_marker("deep")}
    modules = list(dict.fromkeys(item.path for item in items))
    kinds = (
        sorted((path for path in modules if path in waiting), key=_length),
        sorted((path for path in modules if path not in waiting), key=lambda path: path not in deep),
    )
    return {path: i / len(kind) for kind in kinds for i, path in enumerate(kind)}


def _length(path: Path) -> int:
    """0 for what one worker runs for minutes, one module after the other; 1 for other long modules; 2 for the rest."""
    return 0 if path.stem in FORKED | BROWSER else 1 if path.stem in LONG else 2


def unit_of(nodeid: str) -> str:
    """What runs in one worker: a class or module of tests, all of `FORKED`, or all of `BROWSER`.

    >>> unit_of("tests/demo/test_demo.py::test_x"), unit_of("tests/test_a.py::TestB::test_x")
    ('forked', 'tests/test_a.py::TestB')
    """
    module = Path(nodeid.partition("::")[0]).stem
    return "forked" if module in FORKED else "browser" if module in BROWSER else nodeid.rsplit("::", 1)[0]
