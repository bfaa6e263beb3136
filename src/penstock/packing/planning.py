"""Decide which sample goes into which micro-batch of which rank, from lengths and keys alone.

Samples are sorted into classes of rows (one modality each) and, within a class, into keys (one tenant, with or without
routed experts) that never share a micro-batch. Each class is packed into rows (`rows`), and each row is dealt to the
ranks (`grid`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import ALL_OR_NONE, APART, MODALITIES, TEXT, WEIGHTS, SampleMetadata, offsets_of, table_with
from penstock.errors import InvalidInput
from penstock.packing.accounting import Accounting, Totals, account, count_totals
from penstock.packing.bins import Items
from penstock.packing.cost import Cost
from penstock.packing.grid import Grid, Placed, cheapest_dummy, place, planned
from penstock.packing.rank_plan import Plan, RankPlan
from penstock.packing.row_targets import Bound, lower_bound
from penstock.packing.rows import rows_of
from penstock.packing.settings import Packing
from penstock.packing.tree_rows import tree_rows
from penstock.packing.trees import Trees

UNPACKABLE = "unpackable"
"""Drop reason of a sample that begins with an image longer than seq_len."""


def plan(metadata: SampleMetadata, packing: Packing) -> Plan:
    """Plan a step. Deterministic: the same metadata and settings give the same plan, in any process."""
    dropped = {int(i): UNPACKABLE for i in np.flatnonzero(metadata.kept == 0)}
    packed = np.flatnonzero(metadata.kept > 0)
    if dropped and not len(packed):
        _raise_nothing_left(metadata, packing)
    check_columns(metadata)
    costs = packing.cost.of_samples(metadata.kept, metadata.patches)
    alone = (metadata.modality != TEXT) & bool(packing.packed_images.refusals)
    items = Items.of(metadata.kept, costs, packing.caps, metadata.patches, alone)
    if packing.over_cap == "strict":
        _raise_over_cap(metadata, items, packed, packing)
    grid, bounds = _grid(metadata, items, _classes(metadata, packed, packing), packing)
    totals = count_totals(metadata, packed)
    accounting = account(metadata, items, packing, grid, bounds, dropped)
    columns = _columns(metadata, packed)
    return Plan(
        rank_plans=tuple(
            _rank_plan(rank, [row[rank] for row in grid], metadata, columns, packing.pad_id, totals, accounting)
            for rank in range(packing.ranks)
        ),
        dropped=dropped,
        totals=totals,
        accounting=accounting,
    )


def check_columns(metadata: SampleMetadata) -> None:
    """Raise when samples that need a column lack it, while others of the step, in any mode, have it."""
    for name, modes in ALL_OR_NONE.items():
        have = int(metadata.has[name].sum()) if name in metadata.has else 0
        missing = np.flatnonzero(metadata.lacking(name))
        if have and len(missing):
            names = ", ".join(repr(metadata.ids[i]) for i in missing[:5].tolist())
            raise InvalidInput(
                f"samples {names}{' and others' if len(missing) > 5 else ''}: no {name}, which {have} other samples of "
                f"the step have; record them for all trained samples of mode {' or '.join(modes)}, with weights of "
                "these modes, or for none"
            )


def _raise_nothing_left(metadata: SampleMetadata, packing: Packing) -> None:
    names = ", ".join(repr(name) for name in metadata.ids[:3])
    raise InvalidInput(
        f"samples {names}: none of {len(metadata)} can be packed, each was dropped as longer than seq_len "
        f"{packing.seq_len}, or begins with an image that does not fit it; raise seq_len or use smaller images"
    )


def _raise_over_cap(metadata: SampleMetadata, items: Items, packed: NDArray[np.intp], packing: Packing) -> None:
    beyond = packed[items.beyond_caps(packed)]
    if len(beyond):
        i = int(beyond[0])
        raise InvalidInput(
            f"sample {metadata.ids[i]!r}: {metadata.kept[i]} tokens and {metadata.patches[i]} patches in a micro-batch "
            f"of at most {packing.caps.tokens} tokens and {packing.max_patches or 'any number of'} patches; raise the "
            "cap, lower seq_len, or pass over_cap='soft'"
        )


def _columns(metadata: SampleMetadata, packed: NDArray[np.intp]) -> tuple[str, ...]:
    """Return the columns of every micro-batch: those that any sample of the step has.

    Of the step, not of the micro-batch: a training loop that tests for a column must take the same branch on every
    rank, or a collective in it hangs.
    """
    present = {name for name, has in metadata.has.items() if has[packed].any()}
    if {metadata.mode[i] for i in packed.tolist()} - {"rl"}:
        present |= set(WEIGHTS)
    return tuple(name for name in table_with(metadata.own) if name in present)


def _classes(metadata: SampleMetadata, packed: NDArray[np.intp], packing: Packing) -> list[list[NDArray[np.intp]]]:
    """Group samples by class of rows and, within it, by key. Images come first, as the largest allocations."""
    tenants = sorted(set(metadata.run))
    number = {tenant: k for k, tenant in enumerate(tenants)}
    tenant_of = (
        np.array([number[tenant] for tenant in metadata.run]) if len(tenants) > 1 else np.zeros(len(metadata), np.int64)
    )
    class_of = np.array([-packing.modalities.class_of(m) for m in range(len(MODALITIES))])[metadata.modality]
    routed = metadata.has.get(APART, np.zeros(len(metadata), np.bool_))
    row_keys = (class_of, tenant_of if packing.rows_by == "tenant" else np.zeros_like(tenant_of))
    keys = np.stack([*row_keys, tenant_of, routed], axis=1)[packed]
    # lexsort sorts by its last key first, hence the reversal. Then every change of the key starts a new group.
    order = np.lexsort(keys.T[::-1])
    changes = np.flatnonzero((np.diff(keys[order], axis=0) != 0).any(axis=1)) + 1
    classes: dict[tuple[int, int], list[NDArray[np.intp]]] = {}
    for members in np.split(order, changes) if len(order) else []:
        classes.setdefault((keys[members[0], 0], keys[members[0], 1]), []).append(packed[members])
    return list(classes.values())


def _grid(
    metadata: SampleMetadata, items: Items, classes: Sequence[Sequence[NDArray[np.intp]]], packing: Packing
) -> tuple[Grid, list[Bound]]:
    grid: Grid = []
    bounds: list[Bound] = []
    loads = [0.0] * packing.ranks
    trees = Trees.of(metadata) if packing.trees else None
    for keys in classes:
        members = np.concatenate(keys)
        plain = lower_bound(items, members, packing.ranks)
        bounds.append(plain if trees is None else trees.bound(items, keys, packing, plain))
        dummy = cheapest_dummy(metadata, members, packing)
        if trees is None:
            rows = rows_of(items, keys, packing.ranks, packing.cost.overhead)
        else:
            rows = tree_rows(items, keys, packing, trees, plain)
        placed = iter(planned(metadata, items, [b for row in rows for b in row], packing, trees))
        grid += [place(list(islice(placed, len(row))), dummy, loads) for row in rows]
    return grid, bounds


def _rank_plan(
    rank: int,
    column: Sequence[Placed],
    metadata: SampleMetadata,
    columns: tuple[str, ...],
    pad_id: int,
    totals: Totals,
    accounting: Accounting,
) -> RankPlan:
    order = np.array([i for placed in column for i in placed.samples], np.int32)
    cuts = metadata.kept[order].astype(np.int32)
    starts = offsets_of([len(placed.samples) for placed in column]).astype(np.int32)
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
        dummy_tenants=tuple(placed.tenant for placed in column if placed.dummy),
        columns=columns,
        own={name: column for name, column in metadata.own.items() if name in columns},
        shared=np.array([s for p in column for s in p.shared or [0] * len(p.samples)], np.int32),
        shapes={name: metadata.shapes[name] for name in columns if name in metadata.shapes},
        pad_id=pad_id,
        totals=totals,
        accounting=accounting,
        oldest_version=metadata.oldest_version,
    )


def assign(
    lengths: Sequence[int] | NDArray[np.integer], *, ranks: int, cap: int, cost: Cost | None = None
) -> list[list[list[int]]]:
    """Assign sequences to micro-batches of at most `cap` tokens. Returns indices: `result[rank][micro_batch]`.

    This is the packer on its own, for trainers that keep their own samples and tensors.

    Every rank gets the same number of micro-batches, and each index appears once. Ranks that meet at every micro-batch
    wait as little as the lengths allow. A micro-batch may be empty where there is not enough to share. `cost` is the
    time model (default: linear in tokens plus attention). A length above `cap` raises `InvalidInput`.

    >>> assign([5, 3, 2, 6], ranks=2, cap=8)
    [[[2, 3]], [[0, 1]]]
    """
    tokens = _checked_lengths(lengths, cap)
    made = plan(SampleMetadata.of_lengths(tokens), Packing(ranks=ranks, seq_len=cap, cost=cost or Cost()))
    return [
        [part.order[part.starts[m] : part.starts[m + 1]].tolist() for m in range(len(part))] for part in made.rank_plans
    ]


def _checked_lengths(lengths: Sequence[int] | NDArray[np.integer], cap: int) -> NDArray[np.int64]:
    found = np.asarray(lengths)
    if found.ndim != 1 or (found.size and not np.issubdtype(found.dtype, np.integer)):
        raise InvalidInput(f"lengths: {found.dtype} of shape {list(found.shape)}; give one whole number per sequence")
    tokens = found.astype(np.int64)
    for at in np.flatnonzero((tokens < 1) | (tokens > cap))[:1]:
        raise InvalidInput(f"lengths[{at}]: {tokens[at]}; must be from 1 to cap = {cap}; cut the sequence or raise cap")
    return tokens
