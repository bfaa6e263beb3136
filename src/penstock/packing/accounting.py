"""The counts of a step: the denominators of its loss, and the accounts of every token, sample and micro-batch.

**Denominators** are what a loss is divided by, counted over all ranks and all micro-batches. A loss averaged per
micro-batch or per rank changes with the packing. Summed and divided by these numbers it does not: any cap, any number
of ranks and any order gives the same loss and the same gradient. In a step without trained tokens these are zero and
`per_loss_token` is 0, so that a loss of 0 stays 0 instead of becoming NaN.

**Accounts** are counted from the plan that is carried out. Nothing is estimated from a first micro-batch or a
configured size. `Accounting.check` states how the numbers must add up; the tests run it on every plan they make.

    input = packed + truncated + dropped + stale      trained tokens; for all tokens, without stale
    computed = tokens - shared + padding + dummies    for each rank, and in total
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import SampleMetadata

if TYPE_CHECKING:  # a rank reads an accounting, and must not load the planner
    from penstock.packing.bins import Items
    from penstock.packing.cost import Observation
    from penstock.packing.grid import Grid, Placed
    from penstock.packing.row_targets import Bound
    from penstock.packing.settings import Packing


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    loss_tokens: int = 0
    """Trained tokens."""
    samples: int = 0
    groups: int = 0
    """Distinct groups; a sample without one counts as its own group."""
    rl_tokens: int = 0
    """Trained tokens with a weight in the policy-gradient term."""
    ce_tokens: int = 0
    """Trained tokens with a weight in the cross-entropy term."""
    ref_kl_tokens: int = 0
    """Trained tokens with a weight in the KL term against the reference."""

    @property
    def per_loss_token(self) -> float:
        """1 / loss_tokens, or 0 when nothing is trained."""
        return 1.0 / self.loss_tokens if self.loss_tokens else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    step: Denominators
    """Of everything packed."""
    modes: dict[str, Denominators]
    """Of each training mode (rl, opd, sft) present."""
    tenants: dict[str, Denominators]
    """Of each tenant present, by the samples' `run`."""


def count_totals(metadata: SampleMetadata, packed: NDArray[np.intp]) -> Totals:
    """Count the denominators of the packed samples."""
    step = _counted(metadata, packed)

    def split(values: Sequence[str]) -> dict[str, Denominators]:
        own = [values[i] for i in packed.tolist()]
        names = sorted(set(own))
        if len(names) == 1:
            return {names[0]: step}
        return {name: _counted(metadata, packed[[value == name for value in own]]) for name in names}

    return Totals(step=step, modes=split(metadata.mode), tenants=split(metadata.run))


def _counted(metadata: SampleMetadata, rows: NDArray[np.intp]) -> Denominators:
    picked = rows.tolist()
    groups = list(map(metadata.group.__getitem__, picked))
    named = set(zip(map(metadata.run.__getitem__, picked), groups, strict=True))
    alone = groups.count("")
    terms = metadata.term_tokens[rows].sum(axis=0).tolist()
    return Denominators(
        loss_tokens=int(metadata.kept_loss_tokens[rows].sum()),
        samples=len(rows),
        groups=sum(bool(group) for _, group in named) + alone,
        rl_tokens=terms[0],
        ce_tokens=terms[1],
        ref_kl_tokens=terms[2],
    )


# ------------------------------------------------------------------ accounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Counts of what one rank computes in a step, or all ranks together."""

    tokens: int = 0
    """Of samples."""
    loss_tokens: int = 0
    samples: int = 0
    micro_batches: int = 0
    """Dummies included."""
    dummy_micro_batches: int = 0
    max_micro_batch_tokens: int = 0
    """Of the longest micro-batch, padding included."""
    padding_tokens: int = 0
    """After the samples of micro-batches that have samples."""
    dummy_tokens: int = 0
    """In micro-batches that have none."""
    cost: float = 0.0
    """Of everything computed, in the unit of the cost."""
    shared_tokens: int = 0
    """Tokens of samples that are not computed again, because the sample before them in the micro-batch has them."""

    @property
    def computed_tokens(self) -> int:
        return self.tokens - self.shared_tokens + self.padding_tokens + self.dummy_tokens


def add_counts(counts: Iterable[Counts]) -> Counts:
    """Sum the counts; maxima are combined by maximum."""
    listed = list(counts)
    sums = {name: sum(getattr(c, name) for c in listed) for name in Counts.__slots__}
    sums["max_micro_batch_tokens"] = max((c.max_micro_batch_tokens for c in listed), default=0)
    return Counts(**sums)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    num_ranks: int
    rows: int
    """Micro-batches per rank."""
    micro_batch_max_tokens: int
    """The cap as configured."""
    total: Counts
    ranks: dict[int, Counts]
    """By rank: all of them in a plan, only its own in what a rank receives."""
    input_samples: int
    input_tokens: int
    input_loss_tokens: int
    truncated_samples: int
    truncated_tokens: int
    truncated_loss_tokens: int
    dropped: dict[str, int]
    """Samples not packed, by reason."""
    dropped_tokens: int
    dropped_loss_tokens: int
    over_cap: int
    """Samples beyond a cap, each alone in its micro-batch."""
    sample_cost: float
    """Cost of the samples alone, without padding, dummies and overhead; with trees, shared tokens once."""
    step_cost: float
    """Sum over rows of the costliest micro-batch: how long the step takes."""
    lower_bound: float
    """The least step cost that any packing of these samples could have."""
    bound_by_longest_sample: bool
    """Whether single samples keep the other ranks waiting, however they are packed."""
    path_tokens: int
    """Tokens of the costliest micro-batch of every row, padding included: they determine the step's time."""
    path_squares: int
    """Sum of squared sample lengths in those micro-batches, without the squares of what samples share."""
    path_patches: int
    """Image patches in those micro-batches."""
    parted_tokens: int = 0
    """With trees: tokens with equal ids that each sample computes itself, because experts or images differ."""
    stale_samples: int = 0
    """Samples with trained tokens that were left out of the loss because they are too old."""
    stale_loss_tokens: int = 0
    """These tokens. They are computed, and not trained."""

    @property
    def efficiency(self) -> float:
        """Tokens of samples over the tokens that fit: ranks x rows x cap."""
        room = self.num_ranks * self.rows * self.micro_batch_max_tokens
        return (self.total.tokens - self.total.shared_tokens) / room if room else 0.0

    @property
    def waste(self) -> float:
        """Share of the ranks' time spent on waiting, padding, dummies, overhead and tokens computed twice."""
        return 1 - self.sample_cost / (self.num_ranks * self.step_cost) if self.step_cost else 0.0

    @property
    def least_waste(self) -> float:
        """The same share at the lower bound."""
        return 1 - self.sample_cost / (self.num_ranks * self.lower_bound) if self.lower_bound else 0.0

    def observed(self, seconds: float) -> Observation:
        """Return the input of `Cost.fit`: the time a step took, and what was on its critical path."""
        from penstock.packing.cost import Observation

        return Observation(
            seconds=seconds,
            tokens=self.path_tokens,
            squares=self.path_squares,
            patches=self.path_patches,
            micro_batches=self.rows,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return everything, with the derived numbers, as plain values."""
        derived = {name: getattr(self, name) for name in ("efficiency", "waste", "least_waste")}
        return {**asdict(self), **derived}

    def metrics(self, rank: int) -> dict[str, float]:
        """Return the numbers a training loop logs on one rank, flat."""
        own = self.ranks[rank]
        return {
            "local_tokens": own.tokens,
            "local_loss_tokens": own.loss_tokens,
            "local_samples": own.samples,
            "local_micro_batches": own.micro_batches,
            "local_computed_tokens": own.computed_tokens,
            "tokens": self.total.tokens,
            "loss_tokens": self.total.loss_tokens,
            "samples": self.total.samples,
            "computed_tokens": self.total.computed_tokens,
            "shared_tokens": self.total.shared_tokens,
            "parted_tokens": self.parted_tokens,
            "padding_tokens": self.total.padding_tokens,
            "dummy_tokens": self.total.dummy_tokens,
            "max_micro_batch_tokens": self.total.max_micro_batch_tokens,
            "micro_batch_max_tokens": self.micro_batch_max_tokens,
            "over_cap": self.over_cap,
            "truncated_tokens": self.truncated_tokens,
            "stale_loss_tokens": self.stale_loss_tokens,
            "dropped_samples": sum(self.dropped.values()),
            "efficiency": self.efficiency,
            "waste": self.waste,
            "least_waste": self.least_waste,
        }

    def check(self) -> None:
        """Raise AssertionError unless the numbers add up; for tests, and cheap enough for every step."""
        total = self.total
        assert self.input_samples == total.samples + sum(self.dropped.values())
        assert self.input_tokens == total.tokens + self.truncated_tokens + self.dropped_tokens
        lost = self.truncated_loss_tokens + self.dropped_loss_tokens + self.stale_loss_tokens
        assert self.input_loss_tokens == total.loss_tokens + lost
        assert total.micro_batches == self.num_ranks * self.rows
        assert total.loss_tokens <= total.tokens and 0 <= total.shared_tokens <= total.tokens
        assert total.dummy_micro_batches <= total.micro_batches
        assert all(own.micro_batches == self.rows for own in self.ranks.values())
        assert self.lower_bound <= self.step_cost * (1 + 1e-9) and self.efficiency >= 0 and -1e-9 <= self.waste < 1
        if len(self.ranks) == self.num_ranks:
            summed = add_counts(self.ranks[rank] for rank in sorted(self.ranks))
            exact = [name for name in Counts.__slots__ if name != "cost"]
            assert [getattr(summed, n) for n in exact] == [getattr(total, n) for n in exact]
            assert abs(summed.cost - total.cost) <= 1e-9 * max(total.cost, 1.0)


def account(
    metadata: SampleMetadata,
    items: Items,
    packing: Packing,
    grid: Grid,
    bounds: Sequence[Bound],
    dropped: Mapping[int, str],
) -> Accounting:
    """Compute the accounts of a planned grid."""
    lost = np.array(sorted(dropped), np.intp)
    packed = np.setdiff1d(np.arange(len(metadata)), lost)
    trained = metadata.kept_loss_tokens.tolist()
    stale = np.zeros(len(metadata), np.int64) if metadata.stale_loss_tokens is None else metadata.stale_loss_tokens
    ranks = {rank: _count([row[rank] for row in grid], trained) for rank in range(packing.ranks)}
    overhead = packing.cost.overhead
    return Accounting(
        num_ranks=packing.ranks,
        rows=len(grid),
        micro_batch_max_tokens=packing.cap,
        total=add_counts(ranks.values()),
        ranks=ranks,
        input_samples=len(metadata),
        input_tokens=int(metadata.lengths.sum()),
        input_loss_tokens=int(metadata.loss_tokens.sum()),
        truncated_samples=int((metadata.kept < metadata.lengths)[packed].sum()),
        truncated_tokens=int((metadata.lengths - metadata.kept)[packed].sum()),
        truncated_loss_tokens=int((metadata.loss_tokens - metadata.kept_loss_tokens - stale)[packed].sum()),
        stale_samples=int((stale[packed] > 0).sum()),
        stale_loss_tokens=int(stale[packed].sum()),
        dropped=dict(Counter(dropped[i] for i in lost.tolist())),
        dropped_tokens=int(metadata.lengths[lost].sum()),
        dropped_loss_tokens=int(metadata.loss_tokens[lost].sum()),
        over_cap=int(items.beyond_caps(packed).sum()),
        sample_cost=sum(bound.work for bound in bounds),
        step_cost=sum(max(placed.cost for placed in row) for row in grid),
        lower_bound=sum(bound.cost + overhead * bound.rows for bound in bounds),
        bound_by_longest_sample=any(bound.by_longest for bound in bounds),
        parted_tokens=0 if metadata.shared is None or not packing.trees else int(metadata.shared.parted[packed].sum()),
        **_path([max(row, key=lambda placed: placed.cost) for row in grid], items),
    )


def _path(costliest: Sequence[Placed], items: Items) -> dict[str, int]:
    squares = [sum(items.lengths[i] ** 2 for i in p.samples) for p in costliest if not p.dummy]
    squares += [-sum(s * s for s in p.shared) for p in costliest]
    padding = [p.padding for p in costliest]
    return {
        "path_tokens": sum(p.padded for p in costliest),
        "path_squares": sum(squares) + sum(n * n for n in padding),
        "path_patches": sum(items.patches[i] for p in costliest if not p.dummy for i in p.samples),
    }


def _count(column: Sequence[Placed], trained: Sequence[int]) -> Counts:
    real = [placed for placed in column if not placed.dummy]
    return Counts(
        tokens=sum(placed.tokens for placed in real),
        loss_tokens=sum(sum(map(trained.__getitem__, placed.samples)) for placed in real),
        samples=sum(len(placed.samples) for placed in real),
        micro_batches=len(column),
        dummy_micro_batches=len(column) - len(real),
        max_micro_batch_tokens=max((placed.padded for placed in column), default=0),
        padding_tokens=sum(placed.padding for placed in real),
        dummy_tokens=sum(placed.padded for placed in column if placed.dummy),
        cost=sum(placed.cost for placed in column),
        shared_tokens=sum(sum(placed.shared) for placed in real),
    )
