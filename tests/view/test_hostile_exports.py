"""An export may come from anywhere: a marker says nothing that is not checked, and names no file but its rank's."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import CorruptFile
from penstock.view import Export
from penstock.view.index import StepIndex
from penstock.view.jsonl import MalformedLine, parse_line
from penstock.view.library import run_point, step_grid
from penstock.view.record import Skipped
from tests.support.exports import make_export


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
        {"rank": 1},
        {"world": -1},
        {"summary": {}},
        {"summary": {"records": "many"}},
        {"micro_batches": [{}]},
        {"records": 2**63},
    ],
    ids=lambda changes: next(iter(changes.items())),
)
def test_a_marker_that_says_something_odd_is_an_error_and_leads_nowhere(
    exported: Path, changes: dict[str, Any]
) -> None:
    (exported.parent / "secret.jsonl").write_text('{"token_ids": [1], "loss_mask": [false]}\n')
    step = Export(exported).step(1)
    alter(exported, **changes)
    for read in (StepIndex.of, run_point, step_grid, lambda step: step.altered(), lambda step: list(step.records())):
        with pytest.raises(CorruptFile, match=r"rank_0\.done: .*export the step again"):
            read(step)


def test_a_marker_of_a_world_that_never_was_costs_no_time(exported: Path) -> None:
    step = Export(exported).step(1)
    rows = StepIndex.of(step).rows
    alter(exported, world=10**9)
    assert StepIndex.of(step).rows == rows and run_point(step)["tokens"] > 0


@pytest.mark.parametrize("value", ["9" * 5000, "1e400"])
def test_a_number_beyond_every_type_in_an_own_column_is_a_malformed_line(value: str) -> None:
    line = '{"token_ids": [1], "loss_mask": [false], "columns": {"mine": ["<i8", 0, false]}, "mine": [VALUE]}'
    with pytest.raises(MalformedLine, match="out of range"):
        parse_line(line.replace("VALUE", value).encode())


def test_a_pipe_or_a_device_in_the_place_of_a_file_is_named(exported: Path) -> None:
    """A pipe kept the reader waiting for ever, and /dev/zero is one line without an end."""
    step = exported / "token_exports" / "step_1"
    for name in ("rank_0.jsonl", "rank_0.done"):
        (step / name).unlink()
        os.mkfifo(step / name)
        with pytest.raises((CorruptFile, OSError), match="no regular file"):
            list(Export(exported).step(1).lines(Skipped()))
        (step / name).unlink()
        (step / name).symlink_to("/dev/zero")
        with pytest.raises((CorruptFile, OSError), match="no regular file"):
            list(Export(exported).step(1).lines(Skipped()))
