"""Trees: what is computed, what the step takes, and how long planning takes, against those who plan otherwise.

"Forwarded" is tokens computed, padding included, over unique tokens; "pairs" is attention over that of unique paths;
"barrier cost" is the sum over rows of the costliest micro-batch, over a bound that no plan goes below: every token
once, evenly over the ranks, or the costliest sample. Costs are 24,576 per token + 1 per pair of tokens; micro-batches
are padded to 64 tokens. A cap splits families that do not fit it; whole families are all others in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.list_path import MULTIPLE
from benchmarks.report import Row, best
from benchmarks.tree_cases import Case, cases
from benchmarks.tree_packers import RIVALS
from penstock.arrays import offsets_of
from penstock.packing import Cost, Packing, Plan, plan
from penstock.packing.bins import Bin, Items
from penstock.packing.trees import Trees

COST = Cost()
PLANNING_MS = 60.0
FORWARDED = 1.03
BEHIND = 1.0
"""Percent by which a rival may be ahead."""
BALANCED = 1.05
"""Where whole families come this close to the bound, balance allows sharing, and forwarded tokens have a target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    forwarded: float
    pairs: float
    cost: float
    """Over the bound."""
    rows: int


def packing_of(case: Case) -> Packing:
    return Packing(ranks=case.ranks, seq_len=case.cap, pad_to_multiple_of=MULTIPLE, cost=COST, trees=True)


def bins_of(made: Plan) -> list[Bin]:
    return [
        share.order[share.starts[m] : share.starts[m + 1]].tolist()
        for m in range(len(made.rank_plans[0]))
        for share in made.rank_plans
        if not share.dummy[m]
    ]


def score(bins: Sequence[Bin], case: Case, packing: Packing) -> Score:
    """Judge micro-batches; raises when a sample is missing or the cap broken."""
    metadata, unique = case.metadata, _unique(case)
    trees = Trees.of(metadata)
    ids = np.array([i for b in bins for i in b], np.intp)
    shared = np.zeros(len(ids), np.int64)
    if trees is not None:
        ordered, shared, _ = trees.common(bins)
        ids = np.array([i for b in ordered for i in b], np.intp)
    assert sorted(ids.tolist()) == list(range(len(metadata)))
    starts = offsets_of([len(b) for b in bins])[:-1]
    lengths = metadata.kept[ids]
    tokens = np.add.reduceat(lengths - shared, starts)
    assert int(tokens.max()) <= packing.cap
    padding = -tokens % MULTIPLE
    costs = np.add.reduceat(COST.of_samples(lengths) - COST.of_samples(shared), starts) + COST.of_samples(padding)
    by_cost = np.sort(costs)[::-1]
    return Score(
        forwarded=float((tokens + padding).sum()) / unique.tokens,
        pairs=float((lengths**2 - shared**2).sum()) / unique.pairs,
        cost=float(by_cost[:: case.ranks].sum()) / unique.bound,
        rows=-(-len(bins) // case.ranks),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unique:
    tokens: int
    pairs: int
    bound: float


def _unique(case: Case) -> _Unique:
    shared, lengths = case.metadata.shared, case.metadata.kept
    assert shared is not None
    work = float((COST.of_samples(lengths) - COST.of_samples(shared.lengths)).sum())
    return _Unique(
        tokens=int((lengths - shared.lengths).sum()),
        pairs=int((lengths**2 - shared.lengths**2).sum()),
        bound=max(work / case.ranks, float(COST.of_samples(lengths).max())),
    )


def run(*, full: bool, progress: Callable[[str], None]) -> list[Row]:
    """For every case what is forwarded, attended and waited for, and against each rival; then planning times."""
    rows: list[Row] = []
    counts = (512, 4_096, 32_768) if full else (512, 4_096)
    for case in cases(counts, (8, 64)):
        progress(case.name)
        rows += _case_rows(case)
    progress("planning times")
    return rows + [_time_row(case) for case in cases((4_096,), (8, 64))]


def _case_rows(case: Case) -> list[Row]:
    packing = packing_of(case)
    made = plan(case.metadata, packing)
    ours = score(bins_of(made), case, packing)
    items = Items.of(case.metadata.kept, COST.of_samples(case.metadata.kept), packing.caps)
    others = {name: score(packer(case, items, packing), case, packing) for name, packer in RIVALS.items()}
    if "nothing shared" in case.name:
        plain = plan(case.metadata, replace(packing, trees=False))
        same = all(a.to_bytes() == b.to_bytes() for a, b in zip(made.rank_plans, plain.rank_plans, strict=True))
        return [Row(name=f"{case.name}: plans that differ", ours=float(not same), target=0.0, bound="max")]
    return [
        *_own_rows(case, ours, others),
        *(_against(case, ours, name, other) for name, other in others.items()),
    ]


def _own_rows(case: Case, ours: Score, others: Mapping[str, Score]) -> list[Row]:
    whole, plain = others["families never split"], others["today's rows"]
    allows = whole.cost <= BALANCED
    return [
        Row(name=f"{case.name}: the bound", ours=_unique(case).bound / COST.per_token, unit="tokens' cost"),
        Row(
            name=f"{case.name}: forwarded over unique tokens",
            ours=ours.forwarded,
            rival=plain.forwarded,
            rival_name="today's rows",
            ratio=plain.forwarded / ours.forwarded,
            unit="x",
        ),
        Row(
            name=f"{case.name}: forwarded over whole families",
            ours=ours.forwarded / whole.forwarded,
            unit="x",
            target=FORWARDED if allows else None,
            bound="max",
            note=f"whole families: {whole.cost:.3f} x the bound{'' if allows else ', so balance asks for splits'}",
        ),
        Row(
            name=f"{case.name}: attention pairs over unique",
            ours=ours.pairs,
            rival=plain.pairs,
            rival_name="today's rows",
            ratio=plain.pairs / ours.pairs,
            unit="x",
        ),
    ]


def _against(case: Case, ours: Score, name: str, other: Score) -> Row:
    return Row(
        name=f"{case.name}: barrier cost over the bound",
        ours=ours.cost,
        rival=other.cost,
        rival_name=name,
        ratio=other.cost / ours.cost,
        unit="x",
        target=1 / (1 + BEHIND / 100),
        note=f"{name}: forwarded {other.forwarded:.2f} x, pairs {other.pairs:.2f} x, {other.rows} rows",
    )


def _time_row(case: Case) -> Row:
    packing = packing_of(case)
    plain = replace(packing, trees=False)
    ours, today = best(lambda: plan(case.metadata, packing), lambda: plan(case.metadata, plain), repeats=5)
    return Row(
        name=f"{case.name}: planning",
        ours=ours * 1e3,
        rival=today * 1e3,
        rival_name="without trees",
        ratio=today / ours,
        unit="ms",
        target=PLANNING_MS,
        bound="max",
    )
