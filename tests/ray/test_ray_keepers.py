"""The suite of planes with keepers, over keepers that are actors."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from penstock.ray import LocalCluster
from penstock.testing.kept_planes import KeptPlane, KeptPlaneSuite
from penstock.testing.ray_run import RayRun

_numbers = itertools.count(1)


class TestRayKeepers(KeptPlaneSuite):
    @pytest.fixture(autouse=True)
    def _on(self, cluster: LocalCluster) -> None:
        self._cluster = cluster

    def start(self, folder: Path, **settings: Any) -> KeptPlane:
        return RayRun(self._cluster, f"suite{next(_numbers)}", folder, seq_len=512, copies=2, **settings)
