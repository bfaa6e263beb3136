"""Fuzz targets for frames and rank plans: bytes that become arrays."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np

from penstock.arrays import Sample, Samples
from penstock.errors import CorruptFrame, InvalidInput, PenstockError
from penstock.frames import Limits, Pieces, RangedFrame, assemble, decode, encode, front_of, layout, read_head
from penstock.frames.gathering import gather, open_frame
from penstock.frames.layout import PREFIX_SIZE
from penstock.frames.metadata import check_group
from penstock.packing import RankPlan, fill, pack
from penstock.testing.strategies import OWN_COLUMNS, values_of
from tests.support.fuzz_mutation import Change, change_tree
from tests.support.groups import named_group

LIMITS = Limits(max_samples=1 << 10, max_tokens=1 << 16, max_bytes=6 << 20)


class Frames:
    """`decode`: samples or CorruptFrame; what is taken is as good as a sample made by hand, and can be packed."""

    def __init__(self, _: Path) -> None:
        """Needs nothing on disk."""

    def seeds(self) -> list[bytes]:
        batches = [[], named_group("g", samples=3, tokens=80), *[[sample] for sample in _odd_samples()], _odd_samples()]
        return [encode(batch, profile=profile) for batch in batches for profile in ("fast", "small")]

    def mutate(self, rng: Random, data: bytes, change: Change) -> bytes:
        if len(data) < PREFIX_SIZE or rng.random() < 0.02:
            return change(data)
        header_size, head_size = (int.from_bytes(data[at : at + 4], "little") for at in (12, 16))
        behind = PREFIX_SIZE + header_size
        header, head, body = data[PREFIX_SIZE:behind], data[behind : behind + head_size], data[behind + head_size :]
        kind = rng.randrange(4)
        if kind < 2:
            header = _change_packed(rng, header, change) if kind else change(header)
        elif kind == 2 or not body:
            head = change(head)
        else:
            body = change(body)
        return b"".join(layout.assemble(header, [head], [body]))

    def run(self, data: bytes) -> bool:
        try:
            samples = decode(data, limits=LIMITS)
        except CorruptFrame:
            return False
        rebuilt = [sample.replace() for sample in samples]
        assert Samples.of(rebuilt) == samples
        assert decode(encode(samples), limits=LIMITS) == samples
        front = read_head(data, limits=LIMITS)
        assert front.lengths.tolist() == [sample.num_tokens for sample in rebuilt]
        assert front.loss_tokens.tolist() == [sample.loss_tokens for sample in rebuilt]
        _check_gathered(data, samples)
        try:
            check_group(data, group=samples.text["group"][0] if len(samples) else "", seq_len=256, limits=LIMITS)
            step = pack(samples, ranks=2, seq_len=256, columns=tuple(samples.own.values()))
        except PenstockError:
            return True
        for rank in step.ranks:
            _check_batches(list(rank))
        return True

    def close(self) -> None:
        """Nothing is open."""


class Ranges(Frames):
    """`RangedFrame` and `assemble`: what decoding gives, or our error, whatever front and body say."""

    def run(self, data: bytes) -> bool:
        try:
            ranged = RangedFrame(front_of(data), limits=LIMITS)
        except CorruptFrame:
            return False
        assert ranged.size >= ranged.front_size
        count, taken = len(ranged), False
        for rows in (list(range(count)), list(range(0, count, 2))[::-1], [count - 1]):
            if count:
                taken |= self._assembled(data, ranged, rows)
        return taken

    def _assembled(self, data: bytes, ranged: RangedFrame, rows: list[int]) -> bool:
        """Whether these samples can be read from nothing but their ranges; they are then as good as those decoded."""
        ranges = ranged.ranges(rows, gap=len(rows))
        assert all(ranged.front_size <= a < b <= ranged.size for a, b in ranges)
        assert all(before[1] < after[0] for before, after in pairwise(ranges))
        try:
            got = assemble([(ranged, rows, Pieces(ranges, [data[a:b] for a, b in ranges]))])
        except (CorruptFrame, InvalidInput):
            assert not _decodes(data), f"decode takes what cannot be read by range: rows {rows}"
            return False
        assert Samples.of([sample.replace() for sample in got]) == got
        with suppress(CorruptFrame):  # a range reader does not see what is wrong with samples it does not read
            assert decode(data, limits=LIMITS).take(rows) == got
        return True


class RankPlans:
    """`RankPlan.from_bytes` and `fill`: micro-batches of the samples at hand, or our error."""

    def __init__(self, _: Path) -> None:
        samples = [*_odd_samples(), *named_group("g", samples=6, tokens=24), *_branches()]
        self._all = Samples.of(samples)
        settings: dict[str, Any] = {"seq_len": 64, "pad_to_multiple_of": 8, "columns": OWN_COLUMNS}
        plain = pack(samples, ranks=2, **settings)
        trees = pack(samples, ranks=1, micro_batch_max_tokens=256, long_rows=True, trees=True, **settings)
        assert trees.accounting.total.shared_tokens
        self._seeds = [plan.to_bytes() for plan in (*plain.plan.rank_plans, *trees.plan.rank_plans)]

    def seeds(self) -> list[bytes]:
        return self._seeds

    def mutate(self, rng: Random, data: bytes, change: Change) -> bytes:
        return _change_packed(rng, data, lambda part: _change_numbers(rng, part, change))

    def run(self, data: bytes) -> bool:
        try:
            rank_plan = RankPlan.from_bytes(data, max_tokens=LIMITS.max_tokens, max_bytes=LIMITS.max_bytes)
            batches = fill(self._all, rank_plan)
        except (CorruptFrame, InvalidInput):
            return False
        _check_batches(batches)
        assert RankPlan.from_bytes(rank_plan.to_bytes()).to_bytes() == rank_plan.to_bytes()
        own = fill(self._all.take(rank_plan.needs), rank_plan.relative())
        assert [batch.digest for batch in own] == [batch.digest for batch in batches]
        rank_plan.accounting.metrics(rank_plan.rank)
        return True

    def close(self) -> None:
        """Nothing is open."""


def _branches() -> list[Sample]:
    """Samples that share their first 40 tokens."""
    ids = np.arange(48)
    return [
        Sample(
            id=f"t{i}",
            group="t",
            token_ids=np.where(ids < 40, ids, ids + i),
            loss_mask=ids > 40,
            logprobs=np.full(48, -0.5),
            advantages=1.0,
        )
        for i in range(4)
    ]


def _odd_samples() -> list[Sample]:
    """One of each kind: with every column, with experts, without log-probabilities, of one token, with own columns."""
    rng = np.random.default_rng(0)
    own = {column: values_of(rng, column, 12) for column in OWN_COLUMNS}
    some = rng.random(12).astype(np.float32)
    mask = [0] * 4 + [1] * 8
    return [
        Sample(id="one", token_ids=[7]),
        Sample(id="bare", mode="sft", token_ids=range(12), loss_mask=mask),
        Sample(
            id="full",
            group="g",
            env="e",
            token_ids=range(12),
            loss_mask=mask,
            logprobs=-some,
            teacher_logprobs=-some,
            temperatures=0.5,
            advantages=some,
            rewards=1.0,
            rl_weights=some,
            mm_token_type_ids=[0] * 12,
            weight_versions=[1] * 12,
            policy_version=1,
        ),
        Sample(
            id="kept",
            mode="sft",
            token_ids=range(12),
            loss_mask=mask,
            sampling_mask=[[] if not on else [*range(0, token, 2), token, 100_000] for token, on in enumerate(mask)],
        ),
        Sample(id="own", mode="sft", token_ids=range(12), loss_mask=mask, columns=own),
        Sample(
            id="taught",
            mode="sft",
            token_ids=range(12),
            loss_mask=mask,
            teacher_topk_ids=rng.integers(0, 900, (12, 3)) * np.array(mask)[:, None],
            teacher_topk_logprobs=-rng.random((12, 3)) * np.array(mask)[:, None],
        ),
        Sample(
            id="experts",
            mode="sft",
            token_ids=range(12),
            loss_mask=mask,
            routed_experts=rng.integers(0, 9, (12, 2, 3)),
        ),
    ]


def _decodes(data: bytes) -> bool:
    try:
        decode(data, limits=LIMITS)
    except CorruptFrame:
        return False
    return True


def _check_gathered(data: bytes, samples: Samples) -> None:
    """Samples gathered from the bytes are the samples that are decoded: all of them, every other one, the last."""
    count = len(samples)
    opened = open_frame(data, limits=LIMITS)
    for rows in (np.arange(count), np.arange(0, count, 2), np.arange(max(count - 1, 0), count)):
        if len(rows):
            assert decode(gather([(opened, rows)]), limits=LIMITS) == samples.take(rows)


def _check_batches(batches: list[Any]) -> None:
    for batch in batches:
        assert {len(values) for values in batch.columns.values()} == {batch.num_tokens}
        assert int(batch.sequence_lengths.sum()) == batch.num_tokens
        assert not batch["loss_mask"][batch.sample_tokens :].any() or not batch.is_dummy


def _change_packed(rng: Random, data: bytes, change: Change) -> bytes:
    """msgpack with one thing in its tree changed; as bytes where it is no msgpack."""
    try:
        return msgspec.msgpack.encode(change_tree(rng, msgspec.msgpack.decode(data), change))
    except (ValueError, TypeError, RecursionError, OverflowError):  # DecodeError is a ValueError
        return change(data)


def _change_numbers(rng: Random, data: bytes, change: Change) -> bytes:
    """An array of int32 with one number changed; or changed as bytes."""
    if len(data) % 4 or not data or rng.random() < 0.3:
        return change(data)
    values = np.frombuffer(data, "<i4").copy()
    at = rng.randrange(len(values))
    values[at] = rng.choice([0, 1, -1, 2**31 - 1, -(2**31), 1 << 20, int(values[at]) ^ 1, rng.choice(values.tolist())])
    return values.tobytes()
