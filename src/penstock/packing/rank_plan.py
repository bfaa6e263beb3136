"""A plan, and each rank's part of it: which samples, in which order, cut where, in which micro-batch.

A rank plan holds indices and lengths, no tokens: eight bytes per sample, ten per micro-batch. It can be filled from all
samples of the step or, after `relative`, from only those the rank received; the micro-batches are the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.arrays import APART, MAX_EXTENT, MODALITIES, Column, Description, Own, Shape, own_of, table_with
from penstock.errors import CorruptFrame
from penstock.packing.accounting import Accounting, Totals

VERSION = 1
MAX_BYTES = 4 << 30
"""Default bound on the bytes of a column with trailing dimensions where no sample has it."""
MAX_TOKENS = 1 << 28
"""Default bound on the tokens of all micro-batches of a rank plan, padding included; the same as in `frames.Limits`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """One rank's part of a plan."""

    rank: int
    order: NDArray[np.int32]
    """[segments] the sample of each segment, micro-batch after micro-batch."""
    cuts: NDArray[np.int32]
    """[segments] how many of its leading tokens are taken."""
    starts: NDArray[np.int32]
    """[micro_batches + 1] where each micro-batch starts in `order`."""
    padded: NDArray[np.int32]
    """[micro_batches] tokens to compute, with padding."""
    dummy: NDArray[np.bool_]
    """[micro_batches] True where the segments are borrowed to keep ranks in step, and nothing is trained."""
    modality: NDArray[np.uint8]
    """[micro_batches] index into MODALITIES."""
    dummy_tenants: tuple[str, ...]
    """[dummies] the tenant of each dummy's row; other micro-batches have that of their samples."""
    columns: tuple[str, ...]
    """Columns of every micro-batch of the step, whichever samples are in it."""
    shared: NDArray[np.int32]
    """[segments] how many first tokens it shares with the segment before it in its micro-batch: computed once."""
    shapes: dict[str, Shape]
    """dtype and trailing dimensions of shaped columns, for micro-batches whose samples lack the column."""
    own: Own
    """Declarations of columns that are not in the table."""
    pad_id: int
    totals: Totals
    accounting: Accounting
    oldest_version: int = 0
    """Tokens that an earlier policy version sampled are taken out of `loss_mask`."""

    def __len__(self) -> int:
        return len(self.padded)

    @property
    def is_forest(self) -> NDArray[np.bool_]:
        """[micro_batches] where samples share tokens."""
        return np.diff(np.concatenate(([0], np.cumsum(self.shared, dtype=np.int64)))[self.starts]) > 0

    @property
    def laid(self) -> NDArray[np.int64]:
        """[micro_batches] tokens of the columns: those of samples and, without a forest, padding."""
        taken = np.diff(np.concatenate(([0], np.cumsum(self.cuts, dtype=np.int64)))[self.starts])
        return np.where(self.is_forest, taken, self.padded)

    @property
    def needs(self) -> NDArray[np.intp]:
        """The samples this rank needs, ascending: what to send it."""
        return np.unique(self.order).astype(np.intp)

    @property
    def table(self) -> Mapping[str, Column]:
        """The possible columns along tokens, in order."""
        return table_with(self.own)

    def relative(self) -> RankPlan:
        """Return the rank plan for a rank that holds only `samples.take(rank_plan.needs)`.

        Order [7, 2, 7, 5] needs [2, 5, 7], so it becomes [2, 0, 2, 1].
        """
        return replace(self, order=np.searchsorted(self.needs, self.order).astype(np.int32))

    def only(self, index: int) -> RankPlan:
        """Return the rank plan with one micro-batch of it."""
        a, b = int(self.starts[index]), int(self.starts[index + 1])
        one = slice(index, index + 1)
        return replace(
            self,
            order=self.order[a:b],
            cuts=self.cuts[a:b],
            shared=self.shared[a:b],
            starts=np.array([0, b - a], np.int32),
            padded=self.padded[one],
            dummy=self.dummy[one],
            modality=self.modality[one],
            dummy_tenants=self.dummy_tenants[int(self.dummy[:index].sum()) :][: int(self.dummy[index])],
        )

    def to_bytes(self) -> bytes:
        """Encode as msgpack; `from_bytes` is the inverse."""
        own = replace(self.accounting, ranks={self.rank: self.accounting.ranks[self.rank]})
        return msgspec.msgpack.encode(
            _Wire(
                version=VERSION,
                rank=self.rank,
                order=self.order.astype("<i4").tobytes(),
                cuts=self.cuts.astype("<i4").tobytes(),
                starts=self.starts.astype("<i4").tobytes(),
                padded=self.padded.astype("<i4").tobytes(),
                dummy=self.dummy.tobytes(),
                modality=self.modality.tobytes(),
                columns=self.columns,
                pad_id=self.pad_id,
                totals=self.totals,
                accounting=own,
                dummy_tenants=self.dummy_tenants,
                shapes=self.shapes,
                own={name: column.described() for name, column in self.own.items()},
                shared=self.shared.astype("<i4").tobytes() if self.shared.any() else b"",
                oldest_version=self.oldest_version,
            )
        )

    @staticmethod
    def from_bytes(data: bytes | memoryview, *, max_tokens: int = MAX_TOKENS, max_bytes: int = MAX_BYTES) -> RankPlan:
        """Decode a rank plan. Allocates nothing larger than `data`. `fill` will build at most `max_tokens` from it, and
        at most `max_bytes` of a column that no sample has."""
        try:
            wire = _READ.decode(data)
            rank_plan = RankPlan(
                rank=wire.rank,
                order=np.frombuffer(wire.order, "<i4").astype(np.int32),
                cuts=np.frombuffer(wire.cuts, "<i4").astype(np.int32),
                starts=np.frombuffer(wire.starts, "<i4").astype(np.int32),
                padded=np.frombuffer(wire.padded, "<i4").astype(np.int32),
                dummy=np.frombuffer(wire.dummy, np.uint8) != 0,
                modality=np.frombuffer(wire.modality, np.uint8),
                columns=wire.columns,
                pad_id=wire.pad_id,
                totals=wire.totals,
                accounting=wire.accounting,
                dummy_tenants=wire.dummy_tenants or ("",) * (len(wire.dummy) - wire.dummy.count(0)),
                shapes=wire.shapes,
                own=own_of(wire.own),
                shared=np.frombuffer(wire.shared or bytes(len(wire.order)), "<i4").astype(np.int32),
                oldest_version=wire.oldest_version,
            )
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise CorruptFrame(f"rank plan: {error}; the sender and this reader disagree, or bytes were lost") from None
        _check(rank_plan, wire.version)
        _check_fields(rank_plan, max_tokens)
        _check_shapes(rank_plan, max_bytes)
        return rank_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where every sample of a step goes."""

    rank_plans: tuple[RankPlan, ...]
    """By rank."""
    dropped: dict[int, str]
    """Samples that cannot be packed, with the reason."""
    totals: Totals
    accounting: Accounting


class _Wire(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    version: int
    rank: int
    order: bytes
    cuts: bytes
    starts: bytes
    padded: bytes
    dummy: bytes
    modality: bytes
    columns: tuple[str, ...]
    pad_id: int
    totals: Totals
    accounting: Accounting
    dummy_tenants: tuple[str, ...] = ()
    """Missing in plans of earlier writers."""
    shapes: dict[str, Shape] = {}
    """Missing in plans of earlier writers."""
    own: dict[str, Description] = {}
    """Missing in plans of earlier writers."""
    shared: bytes = b""
    """Empty where nothing is shared."""
    oldest_version: int = 0
    """Missing in plans of earlier writers."""


# Made at import: msgspec crashes when two threads are the first to decode a type.
_READ = msgspec.msgpack.Decoder(_Wire)


def _check(rank_plan: RankPlan, version: int) -> None:
    count, starts = len(rank_plan.padded), rank_plan.starts.astype(np.int64)
    sound = (
        len(rank_plan.order) == len(rank_plan.cuts) == len(rank_plan.shared)
        and len(starts) == count + 1
        and len(rank_plan.dummy) == len(rank_plan.modality) == count
        and len(rank_plan.dummy_tenants) == int(rank_plan.dummy.sum())
        and starts[0] == 0
        and starts[-1] == len(rank_plan.order)
        and bool((np.diff(starts) >= 0).all())
        and bool((rank_plan.cuts > 0).all() and (rank_plan.order >= 0).all() and (rank_plan.padded > 0).all())
        and bool((rank_plan.modality < len(MODALITIES)).all())
    )
    if version != VERSION or not sound:
        raise CorruptFrame(
            f"rank plan: version {version}, {len(rank_plan.order)} segments in {count} micro-batches do not add up "
            f"(expected version {VERSION} and consistent arrays)"
        )
    _check_shared(rank_plan)
    taken = np.concatenate(([0], np.cumsum(rank_plan.cuts - rank_plan.shared, dtype=np.int64)))[starts]
    if (np.diff(taken) > rank_plan.padded).any():
        raise CorruptFrame("rank plan: a micro-batch is shorter than its segments; bytes were altered")


def _check_shared(rank_plan: RankPlan) -> None:
    """Check that segments share at most what both have, and that the first of a micro-batch shares nothing."""
    before = np.concatenate(([0], rank_plan.cuts[:-1]))[: len(rank_plan.cuts)]
    before[rank_plan.starts[:-1][np.diff(rank_plan.starts) > 0]] = 0
    shared, dummies = rank_plan.shared, np.repeat(rank_plan.dummy, np.diff(rank_plan.starts))
    if (shared < 0).any() or (shared > np.minimum(before, rank_plan.cuts)).any() or shared[dummies].any():
        raise CorruptFrame("rank plan: segments share more tokens than they have; bytes were altered")


def _check_fields(rank_plan: RankPlan, max_tokens: int) -> None:
    """Check what is not an array: known columns, a valid pad id, accounts of this rank, a bounded size."""
    names, tokens = rank_plan.columns, int(max(rank_plan.padded.sum(dtype=np.int64), rank_plan.laid.sum()))
    needed = {"token_ids", "loss_mask"} if len(rank_plan) else set()  # a step without samples has no columns
    if not needed <= set(names) <= rank_plan.table.keys() or len(set(names)) < len(names):
        raise CorruptFrame(f"rank plan: columns {', '.join(names)[:200]!r}; not those of a micro-batch")
    accounts = rank_plan.accounting
    if not 0 <= rank_plan.pad_id < 2**32 or rank_plan.rank not in accounts.ranks or accounts.num_ranks < 1:
        raise CorruptFrame(
            f"rank plan: pad id {rank_plan.pad_id}, rank {rank_plan.rank} of {accounts.num_ranks} with accounts of "
            f"{list(accounts.ranks)[:8]}; bytes were altered"
        )
    if tokens > max_tokens:
        raise CorruptFrame(f"rank plan: {tokens} tokens with padding; this reader takes {max_tokens}")


def _check_shapes(rank_plan: RankPlan, max_bytes: int) -> None:
    """Check the shapes of columns with trailing dimensions: known dtypes, and at most the allowed bytes."""
    laid = np.maximum(rank_plan.laid, rank_plan.padded)
    dummies, tokens = (int(part.sum(dtype=np.int64)) for part in (rank_plan.padded[rank_plan.dummy], laid))
    for name, (dtype, sizes) in rank_plan.shapes.items():
        column = rank_plan.table.get(name)
        sound = name in rank_plan.columns and column is not None and dtype in column.dtypes
        sound = sound and column is not None and len(sizes) == column.trailing
        if not sound or not all(0 < n < MAX_EXTENT for n in sizes):
            raise CorruptFrame(f"rank plan: {name!r:.80} of {dtype!r:.20} and {sizes!r:.80}; no column looks like that")
        needed = (dummies if name == APART else tokens) * math.prod(sizes) * np.dtype(dtype).itemsize
        if needed > max_bytes:
            raise CorruptFrame(f"rank plan: {needed} bytes of {name}; this reader takes {max_bytes}")
