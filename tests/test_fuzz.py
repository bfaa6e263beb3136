"""The doors take any bytes: what was ever found, and mutations of good inputs from a fixed seed.

`scripts/fuzz` searches with coverage as its guide; this is its short form.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.fuzz import TARGETS, Tried, explore, read_corpus, try_one

pytestmark = pytest.mark.deep

CORPUS = Path(__file__).parent / "fuzz_corpus"
INPUTS = {
    "decode": 600,
    "ranges": 600,
    "rank_plans": 1500,
    "messages": 80,
    "records": 100,
    "queries": 1500,
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Every refusal is a line in the log; thousands of them say nothing."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", TARGETS)
def test_mutations_of_good_inputs_are_taken_or_refused(name: str, tmp_path: Path) -> None:
    target = TARGETS[name](tmp_path)
    with closing(target):
        tried = explore(target, read_corpus(CORPUS / name), inputs=INPUTS[name], seed=1)
    assert tried.inputs > INPUTS[name]
    assert tried.taken > tried.inputs // 50  # otherwise nothing behind the first checks was reached


@pytest.mark.parametrize("name", TARGETS)
def test_good_inputs_are_taken(name: str, tmp_path: Path) -> None:
    target, tried = TARGETS[name](tmp_path), Tried()
    with closing(target):
        for seed in target.seeds():
            try_one(target, seed, tried, traced=False)
    assert tried.taken >= len(target.seeds()) * 2 // 3


def test_the_corpus_is_small_and_of_known_targets() -> None:
    assert {path.name for path in CORPUS.iterdir()} <= set(TARGETS)
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < 100_000
