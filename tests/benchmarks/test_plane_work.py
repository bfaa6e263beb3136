"""What the plane spends, at a tiny size: every row is there, and measures what it says."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from benchmarks import metadata_only, plane_work
from benchmarks.programs.inputs import CASES, make_groups
from benchmarks.programs.plane import samples_of
from penstock.frames import GroupMetadata, encode
from penstock.packing import Packing

pytestmark = pytest.mark.process


def test_a_step_is_built_from_groups_on_disk(tmp_path: Path) -> None:
    groups = [(group.id, encode(samples_of(group))) for group in make_groups(CASES["tiny"], range(2), "g")]
    row = plane_work.build_row("tiny", tmp_path / "run", groups, Packing(ranks=2, seq_len=64), 1e6, repeats=3)
    assert row.ok
    assert "wall time" in row.note


def test_a_group_that_is_refused_fails_the_measurement(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="refused"):
        plane_work.build_row(
            "bad", tmp_path / "run", [("g", b"no frame")], Packing(ranks=1, seq_len=64), 1.0, repeats=1
        )


def test_turns_of_the_loop_are_timed_while_ranks_take_steps(tmp_path: Path) -> None:
    row = plane_work.longest_turn(tmp_path, "tiny", rounds=2)
    assert (row.ours or 0) > 0
    assert row.note.count(",") == 2
    assert not multiprocessing.active_children()


def test_a_blocked_producer_is_counted() -> None:
    row = plane_work.blocked_producer(0.3)
    assert row.ours is not None and row.ours <= 1  # without credit it asks, and sends nothing
    assert "opened 0 times" in row.note


def test_metadata_alone_are_accepted_and_planned_in_a_process_of_their_own(tmp_path: Path) -> None:
    rate, plan, memory = plane_work.metadata_rows(tmp_path, groups=16, ranks=4)
    assert (rate.ours or 0) > 0
    assert plan.name == "metadata only: plan 256 samples for 4 ranks"
    assert 10 < (memory.ours or 0) < 2000


def test_the_memory_of_metadata_alone_is_not_that_of_whoever_measures_it(tmp_path: Path) -> None:
    much = np.ones(100 << 20, np.uint32)
    *_, memory = plane_work.metadata_rows(tmp_path, groups=8, ranks=2)
    assert (memory.ours or 0) < much.nbytes / 1e6


def test_metadata_that_are_made_up_are_metadata() -> None:
    metadata = metadata_only.make_metadata(9)
    assert len({name for one in metadata for name in one.ids}) == 9 * 16
    assert GroupMetadata.from_bytes(metadata[8].to_bytes()) == metadata[8]
    assert metadata[8].lengths == metadata[0].lengths != metadata[1].lengths
