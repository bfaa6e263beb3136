"""One Ray cluster of three nodes for all tests here, and runs on it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.ray import LocalCluster
from tests.support.ray_run import RayRun

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def _cluster() -> Iterator[LocalCluster]:
    with LocalCluster(3) as cluster:
        yield cluster


@pytest.fixture
def cluster(_cluster: LocalCluster) -> LocalCluster:
    """With three nodes: what an earlier test killed is replaced."""
    while len(_cluster.others) < 2:
        _cluster.add_node()
    return _cluster


@pytest.fixture
def new_run(cluster: LocalCluster, tmp_path: Path) -> Iterator[Callable[..., RayRun]]:
    """Starts a plane of its own; ended after the test."""
    started: list[RayRun] = []

    def start(**settings: Any) -> RayRun:
        started.append(RayRun(cluster, f"t{next(_numbers)}", tmp_path, **settings))
        return started[-1]

    yield start
    for run in started:
        run.close()
