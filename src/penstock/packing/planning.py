"""Which sample goes into which micro-batch of which rank, from lengths and keys alone.

Samples are sorted into classes of rows (one modality each) and, within a class, into keys (one run, with or without
routed experts) that never share a micro-batch. Each class is packed into rows (`rows`), and each row is dealt to the
ranks (`grid`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import ALL_OR_NONE, APART, MODALITIES, TEXT, WEIGHTS, SampleFacts, table_with
from penstock.errors import InvalidInput
from penstock.packing.accounting import Accounting, account
from penstock.packing.bins import Items
from penstock.packing.denominators import Totals, count_totals
from penstock.packing.grid import Grid, Placed, cheapest_dummy, place, planned
from penstock.packing.rank_plan import Plan, RankPlan
from penstock.packing.row_targets import Bound, lower_bound
from penstock.packing.rows import rows_of
from penstock.packing.settings import Packing
from penstock.packing.tree_rows import tree_rows
from penstock.packing.trees import Trees

UNPACKABLE = "unpackable"
"""Reason of a sample that begins with an image longer than seq_len."""


def plan(facts: SampleFacts, packing: Packing) -> Plan:
    """Plan a step. Deterministic: the same facts and settings give the same plan, in any process."""
    dropped = {int(i): UNPACKABLE for i in np.flatnonzero(facts.kept == 0)}
    packed = np.flatnonzero(facts.kept > 0)
    if dropped and not len(packed):
        _raise_nothing_left(facts, packing)
    check_columns(facts)
    costs = packing.cost.of_samples(facts.kept, facts.patches)
    alone = (facts.modality != TEXT) & bool(packing.packed_images.refusals)
    items = Items.of(facts.kept, costs, packing.caps, facts.patches, alone)
    if packing.over_cap == "strict":
        _raise_over_cap(facts, items, packed, packing)
    grid, bounds = _grid(facts, items, _classes(facts, packed, packing), packing)
    totals = count_totals(facts, packed)
    accounting = account(facts, items, packing, grid, bounds, dropped)
    columns = _columns(facts, packed)
    return Plan(
        rank_plans=tuple(
            _rank_plan(rank, [row[rank] for row in grid], facts, columns, packing.pad_id, totals, accounting)
            for rank in range(packing.ranks)
        ),
        dropped=dropped,
        totals=totals,
        accounting=accounting,
    )


def check_columns(facts: SampleFacts) -> None:
    """Raise when samples that need a column lack it, and others of the step, of whatever mode, have it."""
    for name, modes in ALL_OR_NONE.items():
        have = int(facts.has[name].sum()) if name in facts.has else 0
        missing = np.flatnonzero(facts.lacking(name))
        if have and len(missing):
            names = ", ".join(repr(facts.ids[i]) for i in missing[:5].tolist())
            raise InvalidInput(
                f"samples {names}{' and others' if len(missing) > 5 else ''}: no {name}, which {have} other samples of "
                f"the step have; record them for all trained samples of mode {' or '.join(modes)}, or for none"
            )


def _raise_nothing_left(facts: SampleFacts, packing: Packing) -> None:
    names = ", ".join(repr(name) for name in facts.ids[:3])
    raise InvalidInput(
        f"samples {names}: none of {len(facts)} can be packed, each was dropped as longer than seq_len "
        f"{packing.seq_len}, or begins with an image that does not fit it; raise seq_len or use smaller images"
    )


def _raise_over_cap(facts: SampleFacts, items: Items, packed: NDArray[np.intp], packing: Packing) -> None:
    beyond = packed[items.beyond_caps(packed)]
    if len(beyond):
        i = int(beyond[0])
        raise InvalidInput(
            f"sample {facts.ids[i]!r}: {facts.kept[i]} tokens and {facts.patches[i]} patches in a micro-batch of at "
            f"most {packing.caps.tokens} tokens and {packing.max_patches or 'any number of'} patches; raise the cap, "
            "lower seq_len, or pass over_cap='soft'"
        )


def _columns(facts: SampleFacts, packed: NDArray[np.intp]) -> tuple[str, ...]:
    """Columns of every micro-batch: those that any sample of the step has.

    Of the step, not of the micro-batch: a training loop that asks whether a column is there must take the same
    branch on every rank, or a collective in it hangs.
    """
    present = {name for name, has in facts.has.items() if has[packed].any()}
    if {facts.mode[i] for i in packed.tolist()} - {"rl"}:
        present |= set(WEIGHTS)
    return tuple(name for name in table_with(facts.own) if name in present)


def _classes(facts: SampleFacts, packed: NDArray[np.intp], packing: Packing) -> list[list[NDArray[np.intp]]]:
    """Samples by class of rows and, within it, by key; images before text, as the largest allocations."""
    runs = sorted(set(facts.run))
    number = {run: k for k, run in enumerate(runs)}
    run_of = np.zeros(len(facts), np.int64) if len(runs) < 2 else np.array([number[run] for run in facts.run])
    class_of = np.array([-packing.modalities.class_of(m) for m in range(len(MODALITIES))])[facts.modality]
    routed = facts.has.get(APART, np.zeros(len(facts), np.bool_))
    row_keys = (class_of, run_of if packing.rows_by == "run" else np.zeros_like(run_of))
    keys = np.stack([*row_keys, run_of, routed], axis=1)[packed]
    order = np.lexsort(keys.T[::-1])
    changes = np.flatnonzero((np.diff(keys[order], axis=0) != 0).any(axis=1)) + 1
    classes: dict[tuple[int, int], list[NDArray[np.intp]]] = {}
    for members in np.split(order, changes) if len(order) else []:
        classes.setdefault((keys[members[0], 0], keys[members[0], 1]), []).append(packed[members])
    return list(classes.values())


def _grid(
    facts: SampleFacts, items: Items, classes: Sequence[Sequence[NDArray[np.intp]]], packing: Packing
) -> tuple[Grid, list[Bound]]:
    grid: Grid = []
    bounds: list[Bound] = []
    loads = [0.0] * packing.ranks
    trees = Trees.of(facts) if packing.trees else None
    for keys in classes:
        members = np.concatenate(keys)
        plain = lower_bound(items, members, packing.ranks)
        bounds.append(plain if trees is None else trees.bound(items, keys, packing, plain))
        dummy = cheapest_dummy(facts, members, packing)
        if trees is None:
            rows = rows_of(items, keys, packing.ranks, packing.cost.overhead)
        else:
            rows = tree_rows(items, keys, packing, trees, plain)
        placed = iter(planned(facts, items, [b for row in rows for b in row], packing, trees))
        grid += [place(list(islice(placed, len(row))), dummy, loads) for row in rows]
    return grid, bounds


def _rank_plan(
    rank: int,
    column: Sequence[Placed],
    facts: SampleFacts,
    columns: tuple[str, ...],
    pad_id: int,
    totals: Totals,
    accounting: Accounting,
) -> RankPlan:
    order = np.array([i for placed in column for i in placed.samples], np.int32)
    cuts = facts.kept[order].astype(np.int32)
    starts = np.zeros(len(column) + 1, np.int32)
    np.cumsum([len(placed.samples) for placed in column], out=starts[1:])
    for m, placed in enumerate(column):
        if placed.dummy and placed.samples:
            cuts[starts[m]] = placed.tokens
    return RankPlan(
        rank=rank,
        order=order,
        cuts=cuts,
        starts=starts,
        padded=np.array([placed.padded for placed in column], np.int32),
        dummy=np.array([placed.dummy for placed in column], np.bool_),
        modality=np.array([placed.modality for placed in column], np.uint8),
        dummy_runs=tuple(placed.run for placed in column if placed.dummy),
        columns=columns,
        own={name: column for name, column in facts.own.items() if name in columns},
        shared=np.array([s for p in column for s in p.shared or [0] * len(p.samples)], np.int32),
        shapes={name: facts.shapes[name] for name in columns if name in facts.shapes},
        pad_id=pad_id,
        totals=totals,
        accounting=accounting,
    )
