"""The suite of planes with keepers, over keepers in threads and real sockets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.testing.cluster import Cluster
from penstock.testing.kept_planes import KeptPlane, KeptPlaneSuite
from tests.serve.conftest import FAST


class TestSocketKeepers(KeptPlaneSuite):
    def start(self, folder: Path, **settings: Any) -> KeptPlane:
        return Cluster(folder, timeouts=replace(FAST, keeper_s=3 * FAST.peer_s), seq_len=512, **settings)
