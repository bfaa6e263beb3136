"""A forest: tokens that samples of a micro-batch have in common stand, and are computed, once.

Samples stand in depth-first order, and each says how many first tokens it has in common with the sample before it.
That is the tree: the others follow from the order. What is left of each sample, end to end, is *node space*:

    sample space   a b c d e | a b c x y | a b z      three samples, end to end, 13 tokens
    shared                 0           3       2      with the sample before
    node space     a b c d e   x y   z                8 places
    index          0 1 2 3 4 | 0 1 2 5 6 | 0 1 7      [13] the place of each token of each sample
    sources       -1 0 1 2 3   2 5   1                [8] the place before each place: one, whoever passes there
    position_ids   0 1 2 3 4   3 4   2                [8] the depth
    segments      (a b)(c)(d e)(x y)(z)               cut where paths part or end; parents -1 0 1 1 0

A place sees the places on its path and no others. A term of the loss is an *edge*: a trained token of a sample, from
the place before it to its own. One place may be the source of several edges, and one edge may be trained by several
samples, each with its own advantage, weight and log-probability. So what may differ by sample stays in sample space,
in the columns of the micro-batch; what follows from the token and those before it stands here, once per place.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import Cells, ImageSpan, Ragged, offsets_of
from penstock.errors import InvalidInput

MASK_TOKENS = 8192
"""The most places for which a dense mask is made: 64 MB."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Edges:
    """The trained tokens of the samples of a micro-batch."""

    tokens: NDArray[np.int64]
    """[E] in sample space: where its columns stand."""
    samples: NDArray[np.int64]
    """[E] the sample, by its number in the micro-batch."""
    sources: NDArray[np.int64]
    """[E] the place whose logits predict it; -1 for a token with nothing before it, which is never trained."""
    targets: NDArray[np.int64]
    """[E] the place of the token itself."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forest:
    """How the samples of a micro-batch share their tokens. U is the number of places, padding included."""

    columns: dict[str, Cells]
    """[U, ...] what the model takes: token_ids, and of mm_token_type_ids and routed_experts those that there are;
    position_ids last."""
    index: NDArray[np.int64]
    """[T] the place of each token of each sample, samples end to end as in the micro-batch's own columns."""
    sources: NDArray[np.int64]
    """[U] the place before each place; -1 at the beginning of a sample and of padding."""
    sample_offsets: NDArray[np.int64]
    """[samples + 1] where each sample starts in `index`."""
    starts: NDArray[np.int32]
    """[segments] first place of each; they cover node space in order, padding is the last."""
    lengths: NDArray[np.int32]
    """[segments] places of each."""
    depths: NDArray[np.int32]
    """[segments] position of its first place: how many tokens come before it on its path."""
    parents: NDArray[np.int32]
    """[segments] the segment before it on its path; -1 for a root."""
    paths: Ragged
    """[samples] the segments of each sample, from its root."""
    images: tuple[ImageSpan, ...]
    """Each image once, its span in node space."""
    padding: int
    """Places of no sample: the last ones."""

    @property
    def num_tokens(self) -> int:
        """U: places to compute, padding included."""
        return len(self.sources)

    @property
    def shared_tokens(self) -> int:
        """Tokens of samples that need not be computed because another sample of the micro-batch has them."""
        return len(self.index) - (self.num_tokens - self.padding)

    @property
    def cu_seqlens(self) -> NDArray[np.int32]:
        """[segments + 1] where segments start: queries, as variable-length attention takes them."""
        return np.append(self.starts, np.int32(self.num_tokens))

    @property
    def cu_seqlens_k(self) -> NDArray[np.int32]:
        """[segments + 1] where the keys of each segment start in `key_index`."""
        return offsets_of(self.depths + self.lengths).astype(np.int32)

    @property
    def key_index(self) -> NDArray[np.int64]:
        """[sum of paths] the places each segment sees, path after path: `key[key_index]` is what attention takes.

        The queries of a segment are the last ones of its path, which is how causal variable-length attention aligns
        them (`flash_attn_varlen_func` from 2.1 on).
        """
        owners = np.searchsorted(self._own_starts(), self.starts, side="right") - 1
        begins = self.sample_offsets[owners].tolist()
        ends = (self.sample_offsets[owners] + self.depths + self.lengths).tolist()
        views = [self.index[a:b] for a, b in zip(begins, ends, strict=True)]
        if self.padding:
            views[-1] = np.arange(self.num_tokens - self.padding, self.num_tokens)
        return np.concatenate(views)

    def _own_starts(self) -> NDArray[np.int64]:
        """[samples] the first place that a sample does not share with the one before it."""
        ends = self.index[self.sample_offsets[1:] - 1] + 1
        return np.concatenate(([0], np.maximum.accumulate(ends)[:-1]))

    @property
    def digested(self) -> dict[str, Cells]:
        """What a digest covers: columns and the places of the samples; all else follows from these."""
        return {**{f"forest.{name}": cells for name, cells in self.columns.items()}, "forest.index": self.index}

    def mask(self) -> NDArray[np.bool_]:
        """[U, U] True where the place of a row sees that of a column; a reference, for few tokens."""
        if self.num_tokens > MASK_TOKENS:
            raise InvalidInput(
                f"mask: {self.num_tokens} tokens; at most {MASK_TOKENS}, attend by cu_seqlens and key_index instead"
            )
        out = np.zeros((self.num_tokens, self.num_tokens), np.bool_)
        for place, source in enumerate(self.sources.tolist()):
            if source >= 0:
                out[place] = out[source]
            out[place, place] = True
        return out

    def edges(self, loss_mask: NDArray[np.bool_]) -> Edges:
        """The edges of the tokens that are trained, in the order of the samples."""
        tokens = np.flatnonzero(loss_mask)
        targets = self.index[tokens]
        return Edges(
            tokens=tokens,
            samples=np.searchsorted(self.sample_offsets, tokens, side="right") - 1,
            sources=self.sources[targets],
            targets=targets,
        )


def places_of(lengths: NDArray[Any], shared: NDArray[Any]) -> NDArray[np.int64]:
    """[T] the place of each token of samples in depth-first order, from what each shares with the one before it.

    >>> places_of(np.array([5, 5, 3]), np.array([0, 3, 2])).tolist()
    [0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 0, 1, 7]
    """
    offsets = offsets_of(lengths)
    index = np.arange(offsets[-1])
    own = offsets_of(lengths - shared)
    for k, (begin, end) in enumerate(pairwise(offsets.tolist())):
        s = int(shared[k])
        if s:
            before = int(offsets[k - 1])
            index[begin : begin + s] = index[before : before + s]
        index[begin + s : end] = np.arange(own[k], own[k + 1])
    return index


def grow(
    lengths: NDArray[Any],
    shared: NDArray[Any],
    *,
    columns: dict[str, Cells],
    images: tuple[ImageSpan, ...] = (),
    padding: int = 0,
) -> Forest:
    """The forest of samples in depth-first order; `columns` are those of node space, padding included.

    >>> from penstock.packing.forest import grow
    >>> forest = grow(np.array([5, 5, 3]), np.array([0, 3, 2]), columns={}, padding=1)
    >>> forest.starts.tolist(), forest.parents.tolist(), forest.depths.tolist()
    ([0, 2, 3, 5, 7, 8], [-1, 0, 1, 1, 0, -1], [0, 2, 3, 3, 2, 0])
    >>> forest.paths.tolist(), forest.num_tokens, forest.shared_tokens
    ([[0, 1, 2], [0, 1, 3], [0, 4]], 9, 5)
    """
    _check(lengths, shared)
    offsets, index = offsets_of(lengths), places_of(lengths, shared)
    own = offsets_of(lengths - shared)
    places = int(own[-1])
    sources = np.arange(-1, places + padding - 1)
    first = np.flatnonzero(shared < lengths)
    sources[own[first]] = np.where(shared[first] > 0, index[offsets[first] + shared[first] - 1], -1)
    # A segment starts where a sample begins on its own, and where another one leaves the sample before it.
    left = np.flatnonzero(shared[1:] < lengths[:-1])
    starts = np.unique(np.concatenate((own[first], index[offsets[left] + shared[left + 1]])))
    segment_of = np.cumsum(np.bincount(starts, minlength=places)[:places]) - 1
    above = sources[starts]
    depths = _depths(lengths, shared)[starts]
    if padding:
        sources[places] = -1
        starts, above, depths = np.append(starts, places), np.append(above, -1), np.append(depths, 0)
    is_start = np.zeros(places, np.bool_)
    is_start[starts[starts < places]] = True
    begins = is_start[index]
    passed = np.add.reduceat(begins, offsets[:-1], dtype=np.int64)
    return Forest(
        columns=columns,
        index=index,
        sources=sources,
        sample_offsets=offsets,
        starts=starts.astype(np.int32),
        lengths=np.diff(np.append(starts, places + padding)).astype(np.int32),
        depths=depths.astype(np.int32),
        parents=np.where(above >= 0, segment_of[above], -1).astype(np.int32),
        paths=Ragged(segment_of[index[begins]].astype(np.int32), offsets_of(passed)),
        images=images,
        padding=padding,
    )


def positions_of(lengths: NDArray[Any], shared: NDArray[Any], padding: int) -> NDArray[np.int64]:
    """[U] the depth of each place; padding from 0."""
    return np.concatenate((_depths(lengths, shared), np.arange(padding)))


def _depths(lengths: NDArray[Any], shared: NDArray[Any]) -> NDArray[np.int64]:
    own = lengths - shared
    depths: NDArray[np.int64] = np.arange(int(own.sum())) - np.repeat(offsets_of(own)[:-1] - shared, own)
    return depths


def _check(lengths: NDArray[Any], shared: NDArray[Any]) -> None:
    most = np.minimum(lengths, np.concatenate(([0], lengths[:-1])))
    wrong = (shared < 0) | (shared > most) | (lengths < 1)
    if not len(lengths) or wrong.any():
        k = int(wrong.argmax()) if len(lengths) else 0
        raise InvalidInput(
            f"shared[{k}]: {shared[k : k + 1].tolist()} of lengths {lengths[max(k - 1, 0) : k + 1].tolist()}; a sample "
            "shares no more tokens than it and the one before it have, and the first shares none"
        )
