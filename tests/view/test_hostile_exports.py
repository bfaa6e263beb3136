"""An export may come from anywhere: a marker says nothing that is not checked, and names no file but its rank's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.testing.exports import make_export
from penstock.view import Export
from penstock.view.curves import run_curves
from penstock.view.index import StepIndex


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    make_export(tmp_path / "run", steps=1, ranks=1, groups=1, size=2)
    return tmp_path / "run"


def alter(folder: Path, **changes: Any) -> None:
    marker = folder / "token_exports" / "step_1" / "rank_0.done"
    marker.write_text(json.dumps({**json.loads(marker.read_text()), **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"file": "../../../secret.jsonl"},
        {"file": "/etc/passwd"},
        {"file": "rank_1.jsonl"},
        {"world": 10**9},
        {"summary": {}},
        {"summary": {"records": "many"}},
        {"micro_batches": [{}]},
    ],
    ids=lambda changes: next(iter(changes.items())),
)
def test_a_marker_that_says_something_odd_changes_nothing_that_is_shown(
    exported: Path, changes: dict[str, Any]
) -> None:
    (exported.parent / "secret.jsonl").write_text('{"token_ids": [1], "loss_mask": [false]}\n')
    step = Export(exported).step(1)
    rows = StepIndex.of(step).rows
    alter(exported, **changes)
    assert StepIndex.of(step).rows == rows
    assert run_curves([step])[0]["tokens"] > 0
    assert step.files()[0].name == "rank_0.jsonl"
