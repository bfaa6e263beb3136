"""The blocks of the documentation that need a Ray cluster."""

from __future__ import annotations

from contextlib import chdir
from pathlib import Path

import pytest

from penstock.ray import LocalCluster
from scripts.run_doc_blocks import ROOT, blocks

REASON = "`make test-ray` runs it"


@pytest.mark.parametrize("page", ["docs/ray.md"])
def test_blocks_that_need_a_cluster_run_on_one(page: str, cluster: LocalCluster, tmp_path: Path) -> None:
    found = [block for block in blocks((ROOT / page).read_text()) if REASON in block.reason]
    assert found
    namespace: dict[str, object] = {"__name__": "__main__"}
    with chdir(tmp_path):
        exec("import penstock as ps", namespace)
        for block in found:
            exec(compile("\n" * (block.line - 1) + block.code, page, "exec"), namespace)
