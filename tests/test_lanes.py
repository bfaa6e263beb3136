"""The list of tests that the fast lane leaves out names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.lanes import DEEP, PROCESS

TESTS = Path(__file__).parent


@pytest.mark.parametrize("name", sorted(PROCESS | DEEP))
def test_what_is_left_out_exists(name: str) -> None:
    module, _, test = name.partition("::")
    text = (TESTS / module).read_text()
    assert not test or re.search(rf"^(async )?def {test}\(", text, re.MULTILINE)


def test_the_fast_lane_starts_no_process(request: pytest.FixtureRequest) -> None:
    """Every test that is not listed runs under a guard there; see conftest.py."""
    if "not process" not in (request.config.getoption("markexpr") or ""):
        pytest.skip("only in the fast lane")
    import subprocess

    with pytest.raises(AssertionError, match="starts a process"):
        subprocess.run(["true"], check=False)
