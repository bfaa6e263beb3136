"""`make test-fast` starts no process, and fewer examples are tried than properties name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import integers

from tests.support.schedule import BROWSER, FORKED, LONG, unit_of


def test_the_fast_lane_starts_no_process(request: pytest.FixtureRequest) -> None:
    """Every test that is not marked runs under a guard there; see conftest.py."""
    if "not process" not in (request.config.getoption("markexpr") or ""):
        pytest.skip("checks the guard of the fast lane; `make test-fast` runs it")
    import subprocess

    with pytest.raises(AssertionError, match="starts a process"):
        subprocess.run(["true"], check=False)


@given(number=integers())
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lanes_try_fewer_examples(number: int, request: pytest.FixtureRequest) -> None:
    """conftest.py lowers them by a name inside Hypothesis, which another version may call otherwise."""
    assert isinstance(number, int)
    usual = request.function._hypothesis_internal_use_settings
    if request.config.getoption("--hypothesis-profile") != "explore":
        assert usual.max_examples == (25 if "not process" in (request.config.getoption("markexpr") or "") else 50)


def test_modules_that_start_first_or_run_together_are_there() -> None:
    tests = Path(__file__).parent
    assert {path.stem for path in tests.rglob("test_*.py")} >= LONG > FORKED
    assert {unit_of(f"{path}::test_x") for path in tests.rglob("test_*.py") if path.stem in FORKED} == {"forked"}
    fixtures = re.compile(r"\b(page|opened|at): Any")  # of view/conftest.py
    looking = {path.stem for path in (tests / "view").glob("test_*.py") if fixtures.search(path.read_text())}
    assert looking == BROWSER and {unit_of(f"tests/view/{name}.py::test_x") for name in BROWSER} == {"browser"}
    assert unit_of("tests/test_a.py::TestB::test_x") == "tests/test_a.py::TestB"
