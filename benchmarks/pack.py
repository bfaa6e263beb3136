"""Packing against how other trainers pack, on the same seeded lengths: waste, padding, rows, time.

"Waste" is what the step takes beyond a lower bound: the sum over micro-batch indices of the costliest rank, over the
larger of an even share of everything and the sum of the samples that no row can avoid. All packers are given the cost
24,576 per token + 1 per token squared, and all micro-batches are padded to 64 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.lengths import DISTRIBUTIONS, draw
from benchmarks.list_path import MULTIPLE, ToTensors, as_lists, lists_to_tensors, make_samples
from benchmarks.packers import RIVALS, Grid, first_fit_plain, greedy_ffd, kk_kk
from benchmarks.report import Row, best, faster, skipped
from penstock.packing import Cost, Packing, SampleMetadata, plan
from penstock.packing.bins import Caps, Items
from penstock.packing.row_targets import forced_costs, lower_bound
from penstock.packing.settings import UNLIMITED

COST = Cost()
CAPS = (8_192, 32_768, 65_536)
RANKS = {512: (8, 64), 4_096: (8, 64, 512), 32_768: (8, 64, 512), 102_400: (8, 64, 512)}
WASTE_TARGETS = {512: 3.0, 4_096: 2.0}
TIME_TARGETS_MS = {4_096: 30.0, 32_768: 300.0, 102_400: 1200.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How one packing turned out."""

    waste: float
    """Above the simple lower bound, in percent."""
    tight_waste: float
    """Above the tighter bound that also knows what the cap lets a row hold, in percent."""
    padding: float
    """Padding and dummies, in percent of all tokens computed."""
    bins: float
    """Micro-batches with samples over tokens / cap."""
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    lengths: NDArray[np.int64]
    costs: NDArray[np.float64]
    ranks: int
    cap: int
    simple_bound: float
    tight_bound: float


def case(distribution: str, count: int, cap: int, ranks: int) -> Case:
    lengths = np.minimum(draw(distribution, count), cap)
    costs = COST.of_samples(lengths)
    items = Items.of(lengths, costs, Caps(tokens=cap, samples=UNLIMITED, patches=UNLIMITED))
    everything = np.arange(count)
    forced = forced_costs(items, items.longest_first(everything), count)
    return Case(
        name=f"{distribution}, {count:,} samples, cap {cap:,}, {ranks} ranks",
        lengths=lengths,
        costs=costs,
        ranks=ranks,
        cap=cap,
        simple_bound=max(float(costs.sum()) / ranks, float(forced[::ranks].sum())),
        tight_bound=lower_bound(items, everything, ranks).cost,
    )


def ours(lengths: NDArray[np.int64], costs: NDArray[np.float64], ranks: int, cap: int) -> Grid:
    """Our plan in the form of the rivals' grids."""
    del costs
    shares = plan(
        SampleMetadata.of_lengths(lengths), Packing(ranks=ranks, seq_len=cap, pad_to_multiple_of=MULTIPLE)
    ).rank_plans
    return [
        [share.order[share.starts[m] : share.starts[m + 1]].tolist() for share in shares] for m in range(len(shares[0]))
    ]


def score(grid: Grid, given: Case) -> Score:
    """Judge a grid; raises when a sample is missing or a cap broken."""
    tokens = np.array([[int(given.lengths[b].sum()) for b in row] for row in grid])
    costs = np.array([[float(given.costs[b].sum()) for b in row] for row in grid])
    packed = {i for row in grid for b in row for i in b}
    assert packed == set(range(len(given.lengths))) and int(tokens.max()) <= given.cap
    padded = np.maximum(-(-tokens // MULTIPLE), 1) * MULTIPLE
    padding = padded - tokens
    step = float((costs + COST.of_samples(padding)).max(axis=1).sum())
    real = int(given.lengths.sum())
    return Score(
        waste=100 * (step / given.simple_bound - 1),
        tight_waste=100 * (step / given.tight_bound - 1),
        # Copies of samples count as what they are: tokens computed for nothing.
        padding=100 * (1 - real / float(padded.sum())),
        bins=float(np.count_nonzero(tokens)) / -(-real // given.cap),
        rows=len(grid),
    )


def run(*, full: bool, progress: Callable[[str], None]) -> list[Row]:
    """All rows: waste on the grid, planning time, and plan + fill + tensors against lists."""
    sizes = tuple(RANKS) if full else (512, 4_096)
    rows: list[Row] = []
    for count in sizes:
        rows += _waste_rows(count, full=full, progress=progress)
    progress("caps and runs")
    rows += _cap_rows() + _run_rows()
    rows += _time_rows(full=full, progress=progress)
    progress("2M tokens to tensors")
    rows += _tensor_rows()
    return rows


def _waste_rows(count: int, *, full: bool, progress: Callable[[str], None]) -> list[Row]:
    scores: dict[str, dict[str, Score]] = {name: {} for name in ("ours", *RIVALS)}
    for distribution in DISTRIBUTIONS:
        for cap in CAPS:
            for ranks in RANKS[count]:
                given = case(distribution, count, cap, ranks)
                progress(given.name)
                for name, packer in {"ours": ours, **RIVALS}.items():
                    if name == "ours" or _is_quick(name, count, ranks, full=full):
                        grid = packer(given.lengths, given.costs, ranks, cap)
                        scores[name][given.name] = score(grid, given)
    return _summary(count, scores)


def _is_quick(rival: str, count: int, ranks: int, *, full: bool) -> bool:
    """Whether the rival takes seconds rather than minutes for this many samples."""
    if rival == "KK ranks, KK micro (verl strict)":
        return count <= 512 or (count <= 4_096 and (full or ranks > 8))
    if rival == "greedy + ffd (AReaL)":
        return count <= 32_768
    return count <= 4_096 or rival == "next fit (torchtitan, open-instruct)"


def _mean(scores: Iterable[Score], field: str) -> float:
    return float(np.mean([getattr(s, field) for s in scores]))


def _summary(count: int, scores: dict[str, dict[str, Score]]) -> list[Row]:
    mine = scores.pop("ours")
    label = f"{count:,} samples: "
    rows = [
        Row(
            name=f"{label}waste over the bound",
            ours=_mean(mine.values(), "waste"),
            unit="%",
            target=WASTE_TARGETS.get(count),
            bound="max",
            note=f"mean of {len(mine)} configurations",
        ),
        Row(name=f"{label}waste over the tighter bound", ours=_mean(mine.values(), "tight_waste"), unit="%"),
        Row(name=f"{label}padding and dummies", ours=_mean(mine.values(), "padding"), unit="%"),
        Row(name=f"{label}micro-batches over tokens / cap", ours=_mean(mine.values(), "bins")),
        Row(name=f"{label}micro-batches per rank", ours=_mean(mine.values(), "rows")),
    ]
    rows += [_against(label, mine, name, theirs) for name, theirs in scores.items() if theirs]
    margins = [mine[k].waste - min(theirs[k].waste for theirs in scores.values() if k in theirs) for k in mine]
    rows.append(
        Row(
            name=f"{label}lead of the best rival, at its best",
            ours=max(0.0, *margins),
            unit="points",
            target=0.2,
            bound="max",
            note=f"a rival is ahead in {sum(m > 0 for m in margins)} of {len(margins)} configurations",
        )
    )
    return rows


def _against(label: str, mine: dict[str, Score], rival: str, theirs: dict[str, Score]) -> Row:
    """Means over the configurations that the rival ran in."""
    waste, other = _mean((mine[k] for k in theirs), "waste"), _mean(theirs.values(), "waste")
    return Row(
        name=f"{label}waste over the bound",
        ours=waste,
        rival=other,
        rival_name=rival,
        ratio=other / waste,
        unit="%",
        target=1.0,
        note=(
            f"{rival}: padding {_mean(theirs.values(), 'padding'):.2f} %, micro-batches "
            f"{_mean(theirs.values(), 'bins'):.2f} x tokens / cap, {len(theirs)} configurations"
        ),
    )


def _cap_rows() -> list[Row]:
    """What a cap above the longest sample gains: the share of the ranks' time that is lost."""
    metadata = SampleMetadata.of_lengths(draw("cot", 1_024))
    rows = []
    for factor in (1.0, 1.5, 2.0):
        packing = Packing(
            ranks=64,
            seq_len=32_768,
            micro_batch_max_tokens=int(factor * 32_768),
            pad_to_multiple_of=MULTIPLE,
            long_rows=True,
        )
        lost = 100 * plan(metadata, packing).accounting.waste
        rows.append(Row(name=f"cot, 1,024 samples, 64 ranks, cap {factor:g} x seq_len: time lost", ours=lost, unit="%"))
    return rows


def _run_rows() -> list[Row]:
    """Sixteen runs in one step: rows of one modality against rows of one run."""
    lengths = draw("cot", 1_024)
    metadata = replace(SampleMetadata.of_lengths(lengths), run=tuple(f"run{i % 16}" for i in range(len(lengths))))
    packings = [
        Packing(ranks=64, seq_len=32_768, pad_to_multiple_of=MULTIPLE, rows_by="modality"),
        Packing(ranks=64, seq_len=32_768, pad_to_multiple_of=MULTIPLE, rows_by="tenant"),
    ]
    mixed, apart = (plan(metadata, packing).accounting.step_cost for packing in packings)
    even = float(COST.of_samples(lengths).sum()) / 64
    return [
        Row(
            name="16 runs, 1,024 samples, 64 ranks: step time over an even share",
            ours=mixed / even,
            rival=apart / even,
            rival_name="rows of one run",
            ratio=apart / mixed,
        )
    ]


def _time_rows(*, full: bool, progress: Callable[[str], None]) -> list[Row]:
    rows = []
    for count, target in TIME_TARGETS_MS.items():
        progress(f"planning {count:,} samples")
        given = case("grpo", count, 32_768, 64)
        metadata = SampleMetadata.of_lengths(given.lengths)
        packing = Packing(ranks=64, seq_len=32_768, pad_to_multiple_of=MULTIPLE)
        arguments = (given.lengths, given.costs, 64, given.cap)
        rivals: dict[str, Callable[[], Any]] = {"greedy + ffd (AReaL)": partial(greedy_ffd, *arguments)}
        if count <= (32_768 if full else 4_096):
            rivals["KK ranks, KK micro (verl strict)"] = partial(kk_kk, *arguments)
        if count <= 4_096:
            order = np.argsort(-given.lengths, kind="stable").tolist()
            rivals["FFD, plain loop (prime-rl)"] = partial(first_fit_plain, given.lengths.tolist(), order, given.cap)
        seconds, *others = best(partial(plan, metadata, packing), *rivals.values(), repeats=7, budget_s=6.0)
        name = f"planning {count:,} samples for 64 ranks"
        spread = seconds.spread
        rows.append(Row(name=name, ours=seconds * 1e3, unit="ms", target=target, bound="max", ours_ms=spread))
        rows += [faster(name, seconds, other, rival) for rival, other in zip(rivals, others, strict=True)]
    return rows


def _tensor_rows() -> list[Row]:
    try:
        import torch
    except ImportError:
        return [skipped("2M tokens to tensors", "torch is not installed", unit="ms", rival_name="lists", target=80.0)]
    torch.set_num_threads(1)
    samples = make_samples()
    packing = Packing(ranks=2, seq_len=32_768, pad_to_multiple_of=MULTIPLE)
    call, rival = ToTensors(samples, packing), partial(lists_to_tensors, as_lists(samples), 2, packing.cap)
    mine, theirs = best(call, rival, repeats=9, budget_s=15)
    return [
        faster(
            f"{len(samples)} samples, {samples.num_tokens:,} tokens: plan + fill + tensors for 2 ranks",
            mine,
            theirs,
            "lists",
            target=80.0,
            note="from memory, arrays here and lists there, to seven columns; ours fills the same memory each time",
        )
    ]
