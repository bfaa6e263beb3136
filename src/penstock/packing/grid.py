"""The grid of a step: for every row the micro-batch of every rank.

Within a row the costliest micro-batch goes to the rank with the least work so far, which also evens out the ranks'
totals. A rank left without one gets a dummy: a row of padding for text; for images the shortest prefix of a sample that
still holds an image, so that the vision tower runs on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import TEXT, SampleMetadata, offsets_of
from penstock.packing.bins import Bin, Items
from penstock.packing.settings import Packing
from penstock.packing.trees import Trees


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A planned micro-batch."""

    samples: Bin
    """In input order, or depth first where they share tokens. A dummy has at most the one sample it borrows from."""
    tokens: int
    """Of those samples."""
    padded: int
    """With padding."""
    cost: float
    dummy: bool
    modality: int
    tenant: str = ""
    """Of its samples; a dummy has the tenant of its row."""
    shared: tuple[int, ...] = ()
    """For each sample the tokens it shares with the one before it; empty where nothing is shared."""

    @property
    def padding(self) -> int:
        """Tokens computed for no sample."""
        return self.padded - self.tokens + sum(self.shared)


Grid: TypeAlias = list[list[Placed]]
"""[rows][ranks]"""


def planned(
    metadata: SampleMetadata, items: Items, bins: Sequence[Bin], packing: Packing, trees: Trees | None = None
) -> list[Placed]:
    """Return the micro-batches of these bins. With `trees`, tokens that samples of a bin share count once."""
    shared = patches = np.zeros(sum(map(len, bins)), np.int64)
    if trees is not None:
        bins, shared, patches = trees.common(bins)
    ids = np.array([i for b in bins for i in b], np.intp)
    starts = offsets_of([len(b) for b in bins])[:-1]
    tokens = np.add.reduceat(items.length_array[ids], starts)
    # Three samples of 5, 5 and 3 tokens that share 0, 3 and 2 compute 13 - 5 = 8. Padding is added to those 8.
    computed = tokens - np.add.reduceat(shared, starts)
    padded = -(-computed // packing.pad_to_multiple_of) * packing.pad_to_multiple_of
    costs = np.add.reduceat(items.cost_array[ids], starts)
    costs += packing.cost.overhead + packing.cost.of_samples(padded - computed)
    if trees is not None:
        costs -= np.add.reduceat(packing.cost.of_samples(shared, patches), starts)
    modality = np.maximum.reduceat(metadata.modality[ids], starts)
    columns = (tokens.tolist(), padded.tolist(), costs.tolist(), modality.tolist(), (tokens - computed).tolist())
    return [
        Placed(
            samples=b if saved else sorted(b),
            tokens=t,
            padded=p,
            cost=c,
            dummy=False,
            modality=m,
            tenant=metadata.run[b[0]],
            shared=tuple(shared[start : start + len(b)].tolist()) if saved else (),
        )
        for b, start, t, p, c, m, saved in zip(bins, starts.tolist(), *columns, strict=True)
    ]


def cheapest_dummy(metadata: SampleMetadata, ids: NDArray[np.intp], packing: Packing) -> Placed:
    """Return the cheapest micro-batch with which a rank can take part in rows of these samples."""
    overhead = packing.cost.overhead
    if metadata.modality[ids].min() == TEXT:
        # A text class, or one declared not to need images on every rank (`Modalities.together`).
        padded = packing.padded(0)
        cost = overhead + float(packing.cost.of_samples(np.array(padded)))
        return Placed(samples=[], tokens=0, padded=padded, cost=cost, dummy=True, modality=TEXT)
    costs = packing.cost.of_samples(metadata.stub[ids], metadata.stub_patches[ids])
    i = int(ids[np.argmin(costs)])
    tokens = int(metadata.stub[i])
    padded = packing.padded(tokens)
    return Placed(
        samples=[i],
        tokens=tokens,
        padded=padded,
        cost=overhead + float(costs.min()) + float(packing.cost.of_samples(np.array(padded - tokens))),
        dummy=True,
        modality=int(metadata.modality[i]),
    )


def place(row: Sequence[Placed], dummy: Placed, loads: list[float]) -> list[Placed]:
    """Deal a row to the ranks. Updates `loads`, the cost that each rank has so far.

    Loads 9 4 6 and a row of costs 5 3: rank 1 gets 5, rank 2 gets 3, rank 0 gets the dummy.
    """
    by_load = sorted(range(len(loads)), key=lambda rank: (loads[rank], rank))
    out = [replace(dummy, tenant=row[0].tenant)] * len(loads)
    for rank, micro_batch in zip(by_load, sorted(row, key=lambda p: -p.cost), strict=False):
        out[rank] = micro_batch
    for rank, micro_batch in enumerate(out):
        loads[rank] += micro_batch.cost
    return out
