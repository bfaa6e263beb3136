"""Arguments of a wrong type or size: one error at the call that names them. The connection goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import InvalidInput
from tests.support.groups import named_group
from tests.support.planes import OpenPlane

LATE: dict[str, Any] = {"ranks": 1, "groups_per_step": 1, "needs": ("rewards",), "needs_deadline_s": 600.0}
HUGE = 1 << 70


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda plane: next(plane.lacking("rewards", groups=HUGE, timeout=0)), "groups: 11805"),
        (lambda plane: next(plane.lacking("rewards", groups="3", timeout=0)), "groups: '3'; expected `int`, got `str`"),
        (
            lambda plane: next(plane.lacking("rewards", groups=2.5, timeout=0)),
            "groups: 2.5; expected `int`, got `float`",
        ),
        (lambda plane: next(plane.lacking("rewards", groups=np.int64(2), timeout=0)), "numpy.int64"),
        (lambda plane: next(plane.lacking("\ud800", timeout=0)), "surrogates"),
        (lambda plane: next(iter(plane.tasks(["a"], seed=HUGE))), "seed: 11805"),
        (lambda plane: next(iter(plane.tasks(["a"], seed="x"))), "seed: 'x'; expected `int`, got `str`"),
        (lambda plane: next(iter(plane.tasks(["a"], epochs=1.5))), "epochs: 1.5; expected `int`, got `float`"),
        (lambda plane: next(iter(plane.tasks(["a"], max_expiries="x"))), "max_expiries: Expected `int | null`"),
        (lambda plane: plane.tasks(["a"], again="stale"), r"pass a list: again=\['stale'\]"),
        (lambda plane: plane.attach("rewards", {"\ud800": {"g/0": 1.0}}), "surrogates"),
        (lambda plane: plane.attach("rewards", {3: {"g/0": 1.0}}), "Expected `str`"),
    ],
)
def test_a_request_that_cannot_be_sent_raises_where_it_was_made_and_the_next_one_works(
    open_plane: OpenPlane, call: Callable[[ps.Plane], object], text: str
) -> None:
    plane = open_plane(**LATE)
    with pytest.raises(InvalidInput, match=text):
        call(plane)
    plane.put([sample.replace(rewards=None) for sample in named_group("g")])
    (lease,) = plane.lacking("rewards", timeout=0)
    assert lease.attach({sample.id: 1.0 for sample in lease.samples}).new == 2


@pytest.mark.parametrize("version", [1.5, "x", float("nan")])
def test_a_commit_with_a_version_that_is_no_whole_number_commits_nothing(open_plane: OpenPlane, version: Any) -> None:
    plane = open_plane(ranks=1, groups_per_step=1)
    plane.put(named_group("g"))
    with plane.source(rank=0) as source:
        step = source.step(timeout=60)
        with pytest.raises(InvalidInput, match="policy_version"):
            source.commit(step, policy_version=version)
        source.commit(step, policy_version=np.int64(3))  # type: ignore[arg-type]  # what a trainer may count with
        source.flush(60)
    assert (plane.ledger.committed, plane.status()["policy_version"]) == (2, 3)


def test_a_report_takes_numbers_of_numpy_and_rejects_what_is_none(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, groups_per_step=1)
    plane.put(named_group("g"))
    with plane.source(rank=0) as source:
        step = source.step(timeout=60)
        for wrong in ({"g": "high"}, {"g": None}, {3: 1.0}):
            with pytest.raises(InvalidInput, match="priorities"):
                source.report(step, priorities=wrong)  # type: ignore[arg-type]
        numbers: Any = {"g": np.float32(2.0)}
        source.report(step, priorities=numbers, metrics={"g/0": np.float64(0.5)})
        source.commit(step)
        source.flush(60)
    assert plane.ledger.committed == 2
