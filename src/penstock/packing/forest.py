"""A forest: tokens that samples of a micro-batch share are stored and computed once.

Samples are in depth-first order, and each says how many first tokens it shares with the sample before it. That defines
the tree; all else follows from the order. What remains of each sample, end to end, is *node space*:

    sample space   a b c d e | a b c x y | a b z      three samples, end to end, 13 tokens
    shared                 0           3       2      with the sample before
    node space     a b c d e   x y   z                8 places
    index          0 1 2 3 4 | 0 1 2 5 6 | 0 1 7      [13] the place of each token of each sample
    sources       -1 0 1 2 3   2 5   1                [8] the place before each place, the same for all samples
    position_ids   0 1 2 3 4   3 4   2                [8] the depth
    segments      (a b)(c)(d e)(x y)(z)               cut where paths diverge or end; parents -1 0 1 1 0

A place sees the places on its path and no others. A term of the loss is an *edge*: a trained token of a sample, from
the place before it to its own. One place may be the source of several edges, and several samples may train one edge,
each with its own advantage, weight and log-probability. So what may differ by sample stays in sample space, in the
columns of the micro-batch. What follows from the token and those before it is here, once per place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import PER_NODE, TOKEN_COLUMNS, Array, Cells, ImageSpan, Ragged, Samples, offsets_of
from penstock.errors import InvalidInput

MASK_TOKENS = 8192
"""The most places for which a dense mask is built: 64 MB."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Edges:
    """The trained tokens of the samples of a micro-batch."""

    tokens: NDArray[np.int64]
    """[E] in sample space: where its columns are."""
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
    """[U, ...] the model's inputs: token_ids, then mm_token_type_ids and routed_experts if present, position_ids last.
    """
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
    """Each image once, with its span in node space."""
    padding: int
    """Places of no sample: the last ones."""

    @property
    def num_tokens(self) -> int:
        """U: places to compute, padding included."""
        return len(self.sources)

    @property
    def shared_tokens(self) -> int:
        """Tokens of samples that are not computed because another sample of the micro-batch has them."""
        return len(self.index) - (self.num_tokens - self.padding)

    @property
    def cu_seqlens(self) -> NDArray[np.int32]:
        """[segments + 1] where segments start: queries for variable-length attention."""
        return np.append(self.starts, np.int32(self.num_tokens))

    @property
    def cu_seqlens_k(self) -> NDArray[np.int32]:
        """[segments + 1] where the keys of each segment start in `key_index`."""
        return offsets_of(self.depths + self.lengths).astype(np.int32)

    @property
    def key_index(self) -> NDArray[np.int64]:
        """[sum of paths] the places each segment sees, path after path: attend over `key[key_index]`.

        The queries of a segment are the last ones of its path, which is how causal variable-length attention aligns
        them (`flash_attn_varlen_func` from 2.1 on).
        """
        # The owner of a segment is the sample that stores its first place. The owner's path up to the end of the
        # segment is what the segment sees: for (x y) above that is index[5:10] = 0 1 2 5 6.
        owners = np.searchsorted(self._own_starts(), self.starts, side="right") - 1
        begins = self.sample_offsets[owners].tolist()
        ends = (self.sample_offsets[owners] + self.depths + self.lengths).tolist()
        views = [self.index[a:b] for a, b in zip(begins, ends, strict=True)]
        if self.padding:
            views[-1] = np.arange(self.num_tokens - self.padding, self.num_tokens)
        return np.concatenate(views)

    def _own_starts(self) -> NDArray[np.int64]:
        """Return [samples], the first place that a sample does not share with the one before it."""
        ends = self.index[self.sample_offsets[1:] - 1] + 1
        return np.concatenate(([0], np.maximum.accumulate(ends)[:-1]))

    @property
    def digested(self) -> dict[str, Cells]:
        """The arrays that a digest covers: the columns and the places of the samples. All else follows from these."""
        return {**{f"forest.{name}": cells for name, cells in self.columns.items()}, "forest.index": self.index}

    def mask(self) -> NDArray[np.bool_]:
        """Return [U, U], True where the place of a row sees that of a column. A reference for few tokens."""
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
        """Return the edges of the trained tokens, in the order of the samples."""
        tokens = np.flatnonzero(loss_mask)
        targets = self.index[tokens]
        return Edges(
            tokens=tokens,
            samples=np.searchsorted(self.sample_offsets, tokens, side="right") - 1,
            sources=self.sources[targets],
            targets=targets,
        )


def places_of(lengths: NDArray[Any], shared: NDArray[Any]) -> NDArray[np.int64]:
    """Return [T], the place of each token of samples in depth-first order. `shared`: with the sample before.

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
    """Build the forest of samples in depth-first order. `columns` are those of node space, padding included.

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
    # The first own place of a sample follows the last token it shares: x (place 5) follows c, index[5 + 3 - 1] = 2.
    sources[own[first]] = np.where(shared[first] > 0, index[offsets[first] + shared[first] - 1], -1)
    # A segment starts where a sample's own part begins (places 0, 5, 7), and where the next sample leaves the one
    # before it: sample 1 leaves at token 3 of sample 0 (place 3), sample 2 at token 2 of sample 1 (place 2).
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
    """Return [U], the depth of each place; padding counts from 0."""
    return np.concatenate((_depths(lengths, shared), np.arange(padding)))


def _depths(lengths: NDArray[Any], shared: NDArray[Any]) -> NDArray[np.int64]:
    own = lengths - shared
    # Own places of a sample continue at depth `shared`: x at place 5 has depth 5 - (5 - 3) = 3.
    depths: NDArray[np.int64] = np.arange(int(own.sum())) - np.repeat(offsets_of(own)[:-1] - shared, own)
    return depths


def _check(lengths: NDArray[Any], shared: NDArray[Any]) -> None:
    most = np.minimum(lengths, np.concatenate(([0], lengths[:-1])))
    wrong = (shared < 0) | (shared > most) | (lengths < 1)
    if not len(lengths) or wrong.any():
        k = int(wrong.argmax()) if len(lengths) else 0
        raise InvalidInput(
            f"shared[{k}]: {shared[k : k + 1].tolist()} of lengths {lengths[max(k - 1, 0) : k + 1].tolist()}; a sample "
            "shares at most the tokens that it and the one before it have, and the first shares none"
        )


def fill_forest(
    samples: Samples,
    rows: NDArray[np.intp],
    lengths: NDArray[np.int64],
    shared: NDArray[Any],
    columns: Mapping[str, Cells],
    *,
    padded: int,
    pad_id: int,
) -> Forest:
    """Build the forest of the samples `rows`, cut to `lengths`, whose columns are end to end in `columns`."""
    padding = padded - int((lengths - shared).sum())
    offsets, found = offsets_of(lengths), {}
    _check_shared(columns["token_ids"], offsets, shared)
    begins, ends = (offsets[:-1] + shared).tolist(), offsets[1:].tolist()
    for name in PER_NODE:
        column = TOKEN_COLUMNS[name]
        if column.trailing:
            pieces = _from_samples(samples, name, rows, lengths, shared)
        else:
            pieces = [columns[name][a:b] for a, b in zip(begins, ends, strict=True)] if name in columns else []
        if pieces:
            pad = pad_id if name == "token_ids" else column.pad
            tail = np.full((padding, *pieces[0].shape[1:]), pad, pieces[0].dtype)
            found[name] = np.concatenate([*pieces, tail])
    found["position_ids"] = positions_of(lengths, shared, padding)
    images = _images(samples, rows, lengths, shared)
    return grow(lengths, shared, columns=found, images=images, padding=padding)


def _check_shared(token_ids: Array, offsets: NDArray[np.int64], shared: NDArray[Any]) -> None:
    """Check that samples begin with the tokens that the plan says they share. One memory comparison each."""
    starts = offsets.tolist()
    for k in np.flatnonzero(shared).tolist():
        n, here, before = int(shared[k]), starts[k], starts[k - 1]
        if not np.array_equal(token_ids[here : here + n], token_ids[before : before + n]):
            raise InvalidInput(
                f"samples: number {k} of a micro-batch does not begin with the {n} tokens of the one before it, which "
                "the rank plan has them share; pass the samples it was planned for"
            )


def _from_samples(
    samples: Samples, name: str, rows: NDArray[np.intp], lengths: NDArray[np.int64], shared: NDArray[Any]
) -> Sequence[Array]:
    """Return a column that the micro-batch itself lacks, straight from the samples. Either all have it or none has."""
    column = samples.columns.get(name)
    if column is None or not column.lengths[rows].any():
        return []
    return [column[i][a:b] for i, a, b in zip(rows.tolist(), shared.tolist(), lengths.tolist(), strict=True)]


def _images(
    samples: Samples, rows: NDArray[np.intp], lengths: NDArray[np.int64], shared: NDArray[Any]
) -> tuple[ImageSpan, ...]:
    """Return the images of what the samples do not share, in node space."""
    if samples.images is None:
        return ()
    shifts = offsets_of(lengths - shared)[:-1] - shared
    return tuple(
        span.shifted(shift)
        for row, n, s, shift in zip(rows.tolist(), lengths.tolist(), shared.tolist(), shifts.tolist(), strict=True)
        for span in samples.images[row]
        if s <= span.offset and span.end <= n
    )
