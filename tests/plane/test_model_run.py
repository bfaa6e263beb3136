"""A plane that is rebuilt anywhere in its life is the plane that was not: the short form of `scripts/torture model`."""

from __future__ import annotations

import pytest

from tests.support.model_run import Result, model_run

pytestmark = pytest.mark.deep


@pytest.mark.parametrize("first", range(0, 24, 8))
def test_a_plane_rebuilt_from_a_crash_copy_goes_on_as_if_nothing_had_been(first: int) -> None:
    total = Result()
    for seed in range(first, first + 8):
        total.add(model_run(seed, decisions=60))
    assert total.copies > 20
    assert total.decisions["plan"] > 20
