"""The work of decoding is bounded by the limits, however few bytes ask for it."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

import penstock as ps
from penstock.errors import CorruptFrame
from penstock.frames import Limits, decode
from penstock.frames.gathering import gather, open_frame

pytestmark = pytest.mark.deep

TOKENS = 1 << 20
LIMITS = Limits(max_samples=1 << 12, max_tokens=TOKENS, max_bytes=24 * TOKENS)
ALTERNATING = np.arange(TOKENS) % 2 == 1


def measured(frame: bytes, limits: Limits) -> tuple[float, int]:
    """(processor seconds, bytes at the peak) of decoding or refusing a frame."""
    tracemalloc.start()
    began = time.process_time()
    try:
        decode(frame, limits=limits)
    except CorruptFrame:
        pass
    finally:
        took, peak = time.process_time() - began, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return took, peak


def test_a_frame_of_a_few_hundred_bytes_that_says_it_holds_millions_of_tokens_costs_nothing_to_refuse() -> None:
    nothing = np.zeros(1 << 22, np.float32)
    sample = ps.Sample(id="bomb", group="bomb", token_ids=np.full(1 << 22, 7), logprobs=nothing, rewards=1.0)
    bomb = ps.encode([sample])
    assert len(bomb) < 400
    took, peak = measured(bomb, LIMITS)
    assert took < 0.05
    assert peak < 1 << 20


def one_run_per_token() -> bytes:
    sample = ps.Sample(id="a", token_ids=np.full(TOKENS, 7), loss_mask=ALTERNATING)
    return ps.encode([sample], profile="small")


def one_run_for_all() -> bytes:
    return ps.encode([ps.Sample(id="a", token_ids=np.full(TOKENS, 7))])


def sparse_by_a_choppy_mask() -> bytes:
    logprobs = np.where(ALTERNATING, -0.5, 0).astype(np.float32)[: TOKENS // 2]
    sample = ps.Sample(
        id="a", token_ids=np.full(TOKENS // 2, 7), loss_mask=ALTERNATING[: TOKENS // 2], logprobs=logprobs
    )
    return ps.encode([sample], profile="small")


def a_chain_of_shared_prefixes() -> bytes:
    ids = [7] * 64
    samples = [ps.Sample(id="x", token_ids=ids + [i % 2] * (i % 64)) for i in range(LIMITS.max_samples)]
    return ps.encode(samples, profile="small")


def as_many_samples_as_there_may_be() -> bytes:
    return ps.encode([ps.Sample(id="x", token_ids=[7] * 4)] * LIMITS.max_samples, profile="small")


def test_a_chain_of_thousands_of_shared_prefixes_is_gathered_from_at_once() -> None:
    """Each sample names the one before as the place of its first tokens, so the way to the first of them is long."""
    beginning = list(range(40))
    alike = ps.encode([ps.Sample(id=str(i), token_ids=[*beginning, i]) for i in range(20_000)])
    growing = ps.encode([ps.Sample(id=str(i), token_ids=[*beginning, *range(i)]) for i in range(1_300)])
    for frame, count in ((alike, 20_000), (growing, 1_300)):
        began = time.process_time()
        opened, samples = open_frame(frame), decode(frame)
        for rows in (np.array([count - 1]), np.arange(0, count, 2), np.arange(count)):
            gathered = decode(gather([(opened, rows)]))
            assert gathered.ids == tuple(samples.ids[i] for i in rows.tolist())
            assert np.array_equal(gathered["token_ids"].values, samples.take(rows)["token_ids"].values)
        assert time.process_time() - began < 5.0


@pytest.mark.parametrize(
    "make",
    [
        one_run_per_token,
        one_run_for_all,
        sparse_by_a_choppy_mask,
        a_chain_of_shared_prefixes,
        as_many_samples_as_there_may_be,
    ],
)
def test_what_little_bytes_unfold_to_stays_within_the_limits(make: Callable[[], bytes]) -> None:
    frame = make()
    assert len(frame) < 8_000
    took, peak = measured(frame, LIMITS)
    assert took < 1.0
    assert peak < 2 * LIMITS.max_bytes
