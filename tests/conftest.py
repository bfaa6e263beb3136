"""Settings for every test: one thread per process, properties that run the same examples every time, lanes, pace.

Lanes: `process` is a test that starts processes, `deep` one that takes seconds of core time, `slow` a run with a model,
`release` one that `make release-check` runs. Test files say which they are, by `pytestmark` or a decorator. `make
test-fast` runs the rest, and fails where one of them starts a process.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.object_proxy import ObjectProxy
from tests.support.pace import pace as measured_pace
from tests.support.s3_server import make_bucket, s3_environment, s3_server

# Two cores are shared by the test workers; a second thread in each makes torch spin instead of work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# `pytest --hypothesis-profile=explore` looks for new counterexamples; the default repeats the known examples.
settings.register_profile("repeat", deadline=None, derandomize=True, database=None)
settings.register_profile(
    "explore", deadline=None, max_examples=2000, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("repeat")


pytest_plugins = ["tests.support.core_time", "tests.support.planes", "tests.support.schedule", "tests.support.workers"]

gc.disable()  # until all is collected: imports make no garbage, and looking for it takes a tenth of their time

# Integrations that need an environment of their own; `make test-integrations` makes it and runs them.
collect_ignore = [] if (Path(sys.prefix).parent / "nemo-gym").is_dir() else ["upstream"]

_STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system")
_lane = {"guarded": False, "test": ""}
_FEWEST_EXAMPLES = 10
_LEFT_OUT = re.compile(r"^pytestmark = (?:\[[^\]]*?)?pytest\.mark\.(?:process|deep)\b", re.MULTILINE)
"""Matches a module in which no test is fast."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Tests on a Ray cluster run when they are named (`make test-ray`), in an environment that has Ray.

    Modules that the fast lane leaves out are not even imported there: some take seconds to import.
    """
    named = any("tests/ray" in str(word) for word in config.args)
    if collection_path == Path(__file__).parent / "ray" and not named:
        return True
    is_test = collection_path.suffix == ".py" and _is_fast(config)
    return True if is_test and _LEFT_OUT.search(collection_path.read_text(encoding="utf-8")) else None


def _is_fast(config: pytest.Config) -> bool:
    return "not process" in (config.getoption("markexpr") or "")


def _take_fewer_examples(test: Any, part: int) -> None:
    """Of the examples that each property names, the fast lane tries a quarter and other runs half."""
    usual = getattr(test, "_hypothesis_internal_use_settings", None)
    if usual is not None:
        fewer = min(usual.max_examples, max(_FEWEST_EXAMPLES, usual.max_examples // part))
        test._hypothesis_internal_use_settings = settings(usual, max_examples=fewer)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "release" not in (config.getoption("markexpr") or ""):
        left_out = [item for item in items if item.get_closest_marker("release")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("release")]
    if config.getoption("--hypothesis-profile") != "explore":
        for test in {getattr(item.obj, "__func__", item.obj) for item in items if isinstance(item, pytest.Function)}:
            _take_fewer_examples(test, 4 if _is_fast(config) else 2)
    _lane["guarded"] = _is_fast(config)


def pytest_collection_finish() -> None:
    """Keep what was imported out of garbage collections: with torch and 400 test modules each takes half a second."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    _lane["test"] = item.nodeid


def _guard(event: str, _arguments: tuple[object, ...]) -> None:
    if event in _STARTS and _lane["guarded"] and _lane["test"]:
        raise AssertionError(f"{_lane['test']} starts a process; mark it with pytest.mark.process")


sys.addaudithook(_guard)


@pytest.fixture
def pace() -> float:
    """1.0 on an idle machine, more on a busy one; see `tests.support.pace`."""
    return measured_pace()


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """An object store on loopback, started once for the tests that need one."""
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture
def s3_bucket(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty bucket, which this process and those it starts reach by the usual variables."""
    for name, value in s3_environment(s3_endpoint).items():
        monkeypatch.setenv(name, value)
    return make_bucket(s3_endpoint)


@pytest.fixture
def s3_proxy(s3_endpoint: str, s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectProxy]:
    """What lies between this process and the bucket."""
    assert s3_bucket
    with ObjectProxy(s3_endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


@pytest.fixture
def few_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    """`penstock doctor` tries two extras that are imported in a blink: all of them take many seconds."""
    from penstock.commands import doctor
    from penstock.extras import EXTRAS

    monkeypatch.setattr(doctor, "EXTRAS", {name: EXTRAS[name] for name in ("view", "top")})
