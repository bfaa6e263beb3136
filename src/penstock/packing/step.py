"""A step: what all ranks train between two optimizer updates; and `pack`, which builds one from samples.

A step holds the samples and the plan. Micro-batches are filled on demand, so building a step for sixty-four ranks on
one host copies nothing until a rank iterates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Unpack, overload

from penstock.arrays import Sample, SampleMetadata, Samples
from penstock.config import LateSignature
from penstock.notebook import html_table
from penstock.packing.accounting import Accounting, Denominators, Totals
from penstock.packing.filling import fill
from penstock.packing.micro_batch import MicroBatch
from penstock.packing.rank_plan import Plan, RankPlan

if TYPE_CHECKING:  # a rank fills what others planned, and must not load the planner
    from penstock.packing.packing_keywords import PackingKeywords
    from penstock.packing.settings import Packing


class StepOfRank(ABC):
    """One rank's micro-batches of a step, in order, with the denominators over all ranks.

    It can be indexed and iterated like a sequence but is not one: a data loader would convert a sequence to a list and
    lose the denominators.
    """

    def __init__(self, rank_plan: RankPlan) -> None:
        self.rank_plan = rank_plan

    @property
    def rank(self) -> int:
        return self.rank_plan.rank

    @property
    def totals(self) -> Totals:
        return self.rank_plan.totals

    @property
    def denominators(self) -> Denominators:
        """Of the step, over all ranks."""
        return self.rank_plan.totals.step

    @property
    def loss_tokens(self) -> int:
        """Trained tokens of the step, over all ranks: divide a summed loss by this."""
        return self.rank_plan.totals.step.loss_tokens

    @property
    def accounting(self) -> Accounting:
        return self.rank_plan.accounting

    def __len__(self) -> int:
        return len(self.rank_plan)

    @abstractmethod
    def __iter__(self) -> Iterator[MicroBatch]: ...

    def samples(self) -> Iterator[Sample]:
        """Yield the samples of this rank as they are trained: see `MicroBatch.samples`."""
        for batch in self:
            yield from batch.samples()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._shown()})"

    def _shown(self) -> str:
        return f"rank {self.rank}, {len(self)} micro-batches, {self.loss_tokens} trained tokens on all ranks"

    def _repr_html_(self) -> str:
        rows = [(i, b.sample_count, b.num_tokens, b.loss_tokens, b.modality) for i, b in enumerate(self)]
        return html_table(self, rows, ("micro-batch", "samples", "tokens", "trained", "modality"))


class RankStep(StepOfRank):
    """A rank's part of a step that was packed here. Micro-batches are filled on demand."""

    def __init__(self, samples: Samples, rank_plan: RankPlan) -> None:
        super().__init__(rank_plan)
        self.all_samples = samples
        """Of the step, for any rank."""

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(fill(self.all_samples, self.rank_plan))

    @overload
    def __getitem__(self, index: int) -> MicroBatch: ...
    @overload
    def __getitem__(self, index: slice) -> list[MicroBatch]: ...
    def __getitem__(self, index: int | slice) -> MicroBatch | list[MicroBatch]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        return fill(self.all_samples, self.rank_plan.only(range(len(self))[index]))[0]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PackedStep:
    """A step that was packed here, for all ranks: `pack` returns it."""

    plan: Plan
    ranks: tuple[RankStep, ...]
    """By rank; all have the same number of micro-batches."""

    @property
    def denominators(self) -> Denominators:
        return self.plan.totals.step

    @property
    def loss_tokens(self) -> int:
        """Trained tokens over all ranks: divide a summed loss by this."""
        return self.plan.totals.step.loss_tokens

    @property
    def totals(self) -> Totals:
        """The denominators, also by mode and by tenant."""
        return self.plan.totals

    @property
    def accounting(self) -> Accounting:
        return self.plan.accounting

    @property
    def num_micro_batches(self) -> int:
        """Of each rank."""
        return self.plan.accounting.rows

    def __repr__(self) -> str:
        each = f"{self.num_micro_batches} micro-batches each"
        return f"PackedStep({len(self.ranks)} ranks, {each}, {self.loss_tokens} trained tokens)"

    def _repr_html_(self) -> str:
        rows = [
            (rank.rank, len(rank), sum(b.num_tokens for b in rank), sum(b.loss_tokens for b in rank))
            for rank in self.ranks
        ]
        return html_table(self, rows, ("rank", "micro-batches", "tokens", "trained"))


def pack(samples: Samples | Sequence[Sample], **packing: Unpack[PackingKeywords]) -> PackedStep:
    """Pack samples into micro-batches: the same number per rank, within all caps, no sample lost, little waiting.

    `seq_len` cuts samples. `micro_batch_max_tokens` caps micro-batches, padding included; it defaults to `seq_len`.
    With `long_rows=True` it may be larger: 1.5 to 2 times `seq_len` removes most of the waste of a heavy tail. A sample
    longer than the cap is not cut again: it is alone in its micro-batch and counted (`over_cap="strict"` raises
    instead). `max_samples` and `max_patches` cap a micro-batch in the same manner.

    These never share a micro-batch: two tenants, two modalities (unless `modalities` declares it safe), two samples
    with images (unless `packed_images` declares what that needs), samples with and without routed experts. An empty
    batch gives a step without micro-batches. `columns` declares columns that Penstock does not know.

    >>> from penstock import Sample
    >>> batch = [Sample(id=str(n), token_ids=range(1, n + 1), loss_mask=[0] + [1] * (n - 1)) for n in (5, 3, 2, 2)]
    >>> step = pack(batch, ranks=2, seq_len=8, pad_to_multiple_of=4)
    >>> [[batch.sequence_lengths.tolist() for batch in rank] for rank in step.ranks]
    [[[5, 3]], [[3, 2, 2, 1]]]
    >>> step.loss_tokens, step.accounting.total.padding_tokens
    (8, 4)
    """
    from penstock.config import build

    return pack_with(build(_settings(), packing, "pack"), samples)


def _settings() -> type[Packing]:
    from penstock.packing.settings import Packing

    return Packing


pack.__signature__ = LateSignature(pack, _settings)  # type: ignore[attr-defined]


def pack_with(packing: Packing, samples: Samples | Sequence[Sample]) -> PackedStep:
    """`pack` with settings that were built and checked before."""
    from penstock.frames import find_node_prefixes
    from penstock.packing.planning import plan

    columns = Samples.of(samples).conformed(packing.own)
    metadata = SampleMetadata.of(columns, packing.seq_len)
    if packing.trees:
        metadata = replace(metadata, shared=find_node_prefixes(columns))
    made = plan(metadata, packing)
    return PackedStep(plan=made, ranks=tuple(RankStep(columns, rank_plan) for rank_plan in made.rank_plans))
