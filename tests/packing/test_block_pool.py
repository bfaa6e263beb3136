"""Memory that is used again: never while anybody looks at it."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.packing import BlockPool, filling


def test_a_block_is_free_when_its_last_view_is_gone() -> None:
    pool, size = BlockPool(), filling.LARGE_BYTES
    view = pool.take(size)[1000:2000].view(np.uint16).reshape(-1, 4)
    address = view.ctypes.data - 1000
    other = view.data
    del view
    assert pool.take(size).ctypes.data != address  # a buffer of a view of a view
    other.release()
    assert pool.take(size).ctypes.data == address


def test_blocks_that_became_too_small_are_let_go_and_few_are_kept() -> None:
    pool, size = BlockPool(), filling.LARGE_BYTES
    pool.take(size)
    assert len(pool.take(2 * size)) == 2 * size
    assert len(pool._blocks) == 1  # the smaller one is gone
    held = [pool.take(size) for _ in range(20)]
    assert len({one.ctypes.data for one in held}) == 20
    assert len(pool._blocks) <= 8


def experts(step: int, tokens: int) -> Any:
    return np.random.default_rng(step).integers(0, 255, (tokens, 4, 2)).astype(np.uint8)


def test_steps_that_are_held_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "LARGE_BYTES", 0)
    plane = ps.open(tmp_path / "run", ranks=1, seq_len=64, groups_per_step=1, untrained_groups="accept")
    with plane, plane.source(rank=0) as source:
        for i in range(6):
            rows: dict[str, Any] = {"token_ids": np.arange(40) + i, "routed_experts": experts(i, 40)}
            assert plane.put([ps.Sample(id=f"{i}", group=f"{i}", **rows)])
        held: list[tuple[int, Any, Any]] = []
        for i in range(6):
            step = source.step(timeout=60)
            (batch,) = step
            held.append((i, batch.columns["token_ids"][:40], batch.columns["routed_experts"][:40]))
            source.commit(step)
            if i == 3:
                held.clear()  # from here on memory may come back
            del step, batch
            gc.collect()
            for number, ids, routed in held:
                assert np.array_equal(ids, np.arange(40) + number)
                assert np.array_equal(routed, experts(number, 40))
