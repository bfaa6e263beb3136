"""Limits in bytes and in work: what one sender may cost everybody."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from penstock.arrays import Ragged, Samples
from penstock.arrays.columns import TEXT_COLUMNS
from penstock.errors import CorruptFrame, InvalidInput, PenstockError
from penstock.frames import encode
from penstock.plane.intake import limits_of
from penstock.plane.settings import Replay
from penstock.protocol import Amount
from tests.support.groups import named_group
from tests.support.planes import OpenEngine, OpenPlane


def bomb(tokens: int) -> bytes:
    """A group of a few hundred bytes that unfolds to so many tokens."""
    offsets = np.array([0, tokens], np.int64)
    names = {"id": "bomb", "group": "bomb", "mode": "rl"}
    text: dict[str, tuple[str, ...]] = {name: (names.get(name, ""),) for name in TEXT_COLUMNS}
    columns = {
        "token_ids": Ragged(np.zeros(tokens, np.uint32), offsets),
        "loss_mask": Ragged(np.zeros(tokens, np.bool_), offsets),
    }
    return encode(Samples(columns=columns, text=text, policy_versions=np.zeros(1, np.int64)))


def many(samples: int) -> bytes:
    """A group of so many samples, each of one token."""
    offsets = np.arange(samples + 1, dtype=np.int64)
    text: dict[str, tuple[str, ...]] = dict.fromkeys(TEXT_COLUMNS, ("",) * samples)
    text |= {"id": tuple(f"many/{i}" for i in range(samples)), "group": ("many",) * samples, "mode": ("rl",) * samples}
    columns = {
        "token_ids": Ragged(np.ones(samples, np.uint32), offsets),
        "loss_mask": Ragged(np.zeros(samples, np.bool_), offsets),
    }
    return encode(Samples(columns=columns, text=text, policy_versions=np.full(samples, -1, np.int64)))


def test_the_samples_of_a_group_are_bounded_so_that_the_loop_never_pauses_for_one(open_engine: OpenEngine) -> None:
    engine = open_engine()
    most = limits_of(engine.settings).max_samples
    frame = many(most + 1)
    began = time.process_time()
    outcome = engine.put(1, "many", frame)
    assert time.process_time() - began < 0.1
    assert outcome is not None and f"says {most + 1} samples" in str(outcome.error)
    assert engine.put(2, "many", many(most)) is None  # checked and kept beside the loop
    began = time.process_time()
    assert [found.error for found in engine.flush()] == [None]
    assert time.process_time() - began < 1.0  # this is the loop's part
    assert engine.ledger.accepted == most


def test_a_small_frame_that_unfolds_to_a_huge_group_is_refused_in_milliseconds(open_engine: OpenEngine) -> None:
    frame = bomb(1 << 27)
    assert len(frame) < 600
    engine = open_engine()
    began = time.process_time()
    outcome = engine.put(1, "bomb", frame)
    spent = time.process_time() - began
    assert outcome is not None and isinstance(outcome.error, CorruptFrame)
    assert "134217728 tokens" in str(outcome.error)
    assert spent < 0.1
    assert engine.ledger.accepted == 0


def test_how_much_a_group_may_unfold_to_is_a_setting(open_engine: OpenEngine, open_plane: OpenPlane) -> None:
    engine = open_engine(max_group_tokens=1000)
    assert engine.put(1, "a", encode(named_group("a", tokens=400))) is None
    outcome = engine.put(2, "b", encode(named_group("b", tokens=600)))
    assert outcome is not None and "1200 tokens" in str(outcome.error)
    assert limits_of(open_engine().settings).max_tokens == 1 << 20
    plane = open_plane(max_group_bytes=4000)
    with pytest.raises(PenstockError, match="unfold to"):
        plane.put(named_group("c", tokens=600))


@pytest.mark.parametrize("length", [0, 513])
def test_a_group_id_is_bounded(open_engine: OpenEngine, length: int) -> None:
    outcome = open_engine().put(1, "x" * length, b"")
    assert outcome is not None and isinstance(outcome.error, InvalidInput)


def test_one_bad_frame_does_not_fail_its_neighbours_in_the_same_write(open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine(tmp_path)
    outcomes = [engine.put(i, f"g{i}", b"not a frame" if i == 2 else encode(named_group(f"g{i}"))) for i in range(5)]
    assert [outcome is None for outcome in outcomes] == [True, True, False, True, True]
    assert [outcome.error for outcome in engine.flush()] == [None] * 4


@pytest.mark.parametrize("capacity", [4, 9, 70, 5_000])
@pytest.mark.parametrize("reserved", [0, 1, 66])
def test_credit_is_the_largest_power_of_four_that_the_table_takes(
    capacity: int, reserved: int, open_engine: OpenEngine
) -> None:
    engine = open_engine(replay=Replay(capacity=capacity))
    table = engine.tenant_tables.table("")
    powers = [4**power for power in range(1, 10)]
    fitting = [n for n in powers if table.may_insert(ahead=reserved + n - 1)]
    assert engine.acceptance.spare(Amount(reserved, 0)).groups == max(fitting, default=0)
