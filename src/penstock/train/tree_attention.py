"""Attention in a forest: every place sees its path, shared places are computed once, and no mask is ever made.

Segments stand in depth-first order, so all places that see a segment follow it without a gap: its own, then those of
its subtree. In causal order that is one call per segment, with more queries than keys:

    keys      a b                   query i sees the keys up to i; from the third query on that is all of them
    queries   a b c d e x y z       the subtree of (a b)

Segments that nobody branches from (leaves) are stacked by length, as in plain packed rows. A place gets one result from
each segment of its path; they are merged by their log-sum-exps. The backward pass of each call takes the merged result
and its log-sum-exp, which is what makes its gradients those of attention over the path. Nothing is kept between the
passes but queries, keys, values, results and log-sum-exps, and no key is copied for each path that it is on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 256
"""Queries at a time where torch has no fused kernel that gives log-sum-exps."""

_Places: TypeAlias = slice | Tensor


@dataclass(frozen=True, slots=True)
class Bucket:
    """Segments that are computed in one call."""

    gather: Tensor
    """[segments, length] positions in the row; beyond a segment's end any position of the row."""
    places: Tensor
    """[tokens] where each of the bucket's tokens stands in the flattened gather."""
    tokens: Tensor
    """[tokens] and in the row."""


def buckets_at(segments: Iterable[tuple[int, int]]) -> list[Bucket]:
    """(start, length) of segments, grouped by length, rounded up to a power of two: stacking wastes less than half."""
    by_size: dict[int, list[tuple[int, int]]] = {}
    for start, length in segments:
        by_size.setdefault(1 << max(length - 1, 0).bit_length(), []).append((start, length))
    out = []
    for members in by_size.values():
        size = max(length for _, length in members)
        starts = torch.tensor([start for start, _ in members])[:, None]
        ends = torch.tensor([start + length for start, length in members])[:, None]
        gather = starts + torch.arange(size)
        inside = gather < ends
        out.append(
            Bucket(
                gather=torch.where(inside, gather, starts),
                places=torch.nonzero(inside.reshape(-1))[:, 0],
                tokens=gather[inside],
            )
        )
    return out


@dataclass(frozen=True, slots=True)
class Stem:
    """A segment from which others branch, and all that see it."""

    start: int
    """First place of the segment."""
    stop: int
    """Where its keys end."""
    last: int
    """Where its subtree ends."""


@dataclass(frozen=True, slots=True)
class Tree:
    """The calls that make up the attention of a forest."""

    stems: list[Stem]
    leaves: list[Bucket]
    num_tokens: int
    longest: int
    """Tokens of the longest path."""


def tree_of(lengths: NDArray[Any], parents: NDArray[Any]) -> Tree:
    """The calls for segments of these lengths, in depth-first order; `parents` are -1 for roots.

    >>> tree = tree_of(np.array([2, 1, 2, 2, 1]), np.array([-1, 0, 1, 1, 0]))
    >>> [(stem.start, stem.stop, stem.last) for stem in tree.stems], tree.longest
    ([(0, 2, 8), (2, 3, 7)], 5)
    """
    ends = np.cumsum(lengths).tolist()
    above, own = parents.tolist(), lengths.tolist()
    last, depths = list(range(len(own))), list(own)
    for k, parent in enumerate(above):
        if parent >= 0:
            depths[k] += depths[parent]
    for k in range(len(own) - 1, -1, -1):
        if above[k] >= 0:
            last[above[k]] = max(last[above[k]], last[k])
    begins = [end - n for end, n in zip(ends, own, strict=True)]
    inner = [k for k, end in enumerate(last) if end > k]
    outer = [k for k, end in enumerate(last) if end == k]
    return Tree(
        stems=[Stem(begins[k], ends[k], ends[last[k]]) for k in inner],
        leaves=buckets_at([(begins[k], own[k]) for k in outer]),
        num_tokens=ends[-1],
        longest=max(depths),
    )


def tree_attention(query: Tensor, key: Tensor, value: Tensor, tree: Tree, scale: float | None = None) -> Tensor:
    """[heads, U, size] of queries, keys and values (of which there may be fewer heads) -> [heads, U, size]."""
    out: Tensor = _TreeAttention.apply(query, key, value, tree, query.shape[-1] ** -0.5 if scale is None else scale)
    return out


class _TreeAttention(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, tree: Tree, scale: float) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        merged = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=wide)
        norms = query.new_full(query.shape[:-1], -torch.inf, dtype=wide)
        for part in _parts(tree, query.shape[0] // key.shape[0]):
            found, norm = attend(part.queries(query), part.keys(key), part.keys(value), scale)
            part.merge(merged, norms, found, norm)
        out = merged.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, norms)
        ctx.tree, ctx.scale = tree, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, norms = ctx.saved_tensors
        to_query, to_key, to_value = (torch.zeros_like(x) for x in (query, key, value))
        for part in _parts(ctx.tree, query.shape[0] // key.shape[0]):
            found = attend_backward(
                part.valid(grads[0]),
                *(part.queries(query), part.keys(key), part.keys(value), part.queries(out), part.queries(norms)),
                ctx.scale,
            )
            part.add_queries(to_query, found[0])
            part.add_keys(to_key, found[1])
            part.add_keys(to_value, found[2])
        return to_query, to_key, to_value, None, None


def _parts(tree: Tree, groups: int) -> Iterator[_StemPart | _LeafPart]:
    for stem in tree.stems:
        yield _StemPart(stem, groups)
    for bucket in tree.leaves:
        yield _LeafPart(bucket, groups)


@dataclass(frozen=True, slots=True)
class _StemPart:
    """What one call takes and gives, for a stem: slices, without a copy where heads are not repeated."""

    stem: Stem
    groups: int
    """Heads of queries to one of keys."""

    def queries(self, x: Tensor) -> Tensor:
        return x[None, :, self.stem.start : self.stem.last]

    valid = queries

    def keys(self, x: Tensor) -> Tensor:
        return _repeated(x[None, :, self.stem.start : self.stem.stop], self.groups)

    def merge(self, merged: Tensor, norms: Tensor, found: Tensor, norm: Tensor) -> None:
        _merge(merged, norms, slice(self.stem.start, self.stem.last), found[0], norm[0])

    def add_queries(self, into: Tensor, grad: Tensor) -> None:
        into[:, self.stem.start : self.stem.last] += grad[0]

    def add_keys(self, into: Tensor, grad: Tensor) -> None:
        into[:, self.stem.start : self.stem.stop] += _summed(grad, self.groups)[0]


@dataclass(frozen=True, slots=True)
class _LeafPart:
    """The same for leaves of about one length: gathered, and scattered again."""

    bucket: Bucket
    groups: int

    def queries(self, x: Tensor) -> Tensor:
        return x[:, self.bucket.gather.to(x.device)].transpose(0, 1)

    def valid(self, x: Tensor) -> Tensor:
        """Of gradients: 0 beyond a leaf's end, where another token stands in."""
        stacked = torch.zeros_like(self.queries(x).transpose(0, 1)).flatten(1, 2)
        stacked[:, self.bucket.places.to(x.device)] = x[:, self.bucket.tokens.to(x.device)]
        return stacked.unflatten(1, self.bucket.gather.shape).transpose(0, 1)

    def keys(self, x: Tensor) -> Tensor:
        return _repeated(self.queries(x), self.groups)

    def _flat(self, x: Tensor) -> Tensor:
        """[leaves, heads, length, ...] -> [heads, tokens, ...]"""
        return x.transpose(0, 1).flatten(1, 2)[:, self.bucket.places.to(x.device)]

    def merge(self, merged: Tensor, norms: Tensor, found: Tensor, norm: Tensor) -> None:
        _merge(merged, norms, self.bucket.tokens.to(norms.device), self._flat(found), self._flat(norm))

    def add_queries(self, into: Tensor, grad: Tensor) -> None:
        into[:, self.bucket.tokens.to(into.device)] += self._flat(grad)

    def add_keys(self, into: Tensor, grad: Tensor) -> None:
        self.add_queries(into, _summed(grad, self.groups))


def _repeated(x: Tensor, groups: int) -> Tensor:
    return x if groups == 1 else x.repeat_interleave(groups, 1)


def _summed(x: Tensor, groups: int) -> Tensor:
    return x if groups == 1 else x.unflatten(1, (-1, groups)).sum(2)


def _merge(merged: Tensor, norms: Tensor, places: _Places, found: Tensor, norm: Tensor) -> None:
    """Add what was attended to now to what was before: both are means, weighted by their sums of exponentials."""
    before, norm = norms[:, places], norm.to(norms.dtype)
    both = torch.logaddexp(before, norm)
    merged[:, places] = (
        merged[:, places] * (before - both).exp()[..., None] + found.to(merged.dtype) * (norm - both).exp()[..., None]
    )
    norms[:, places] = both


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """[batch, heads, queries, size] -> the same and its log-sum-exp; query i sees the keys up to i, of which there may
    be fewer than queries."""
    if query.device.type == "cpu":
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        found: tuple[Tensor, Tensor] = fused(query, key, value, 0.0, True, scale=scale)
        return found
    return attend_plain(query, key, value, scale)


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, norm: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to queries, keys and values, from the result and log-sum-exp over all that a query sees."""
    if query.device.type == "cpu":
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        found: tuple[Tensor, Tensor, Tensor] = fused(grad, query, key, value, out, norm, 0.0, True, scale=scale)
        return found
    return attend_backward_plain(grad, query, key, value, out, norm, scale)


def attend_plain(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """`attend` in plain torch, for any device."""
    outs, norms = [], []
    for a in range(0, query.shape[2], BLOCK):
        scores = _scores(query[:, :, a : a + BLOCK], key, scale, a)
        norms.append(scores.logsumexp(-1))
        outs.append(((scores - norms[-1][..., None]).exp() @ value.to(scores.dtype)).to(query.dtype))
    return torch.cat(outs, 2), torch.cat(norms, 2)


def attend_backward_plain(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, norm: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`attend_backward` in plain torch, for any device."""
    wide = norm.dtype
    keys, values = key.to(wide), value.to(wide)
    to_query, to_key, to_value = [], torch.zeros_like(keys), torch.zeros_like(values)
    for a in range(0, query.shape[2], BLOCK):
        q, g, o = (x[:, :, a : a + BLOCK].to(wide) for x in (query, grad, out))
        p = (_scores(q, keys, scale, a) - norm[:, :, a : a + BLOCK, None]).exp()
        to_value += p.transpose(-1, -2) @ g
        to_scores = p * (g @ values.transpose(-1, -2) - (g * o).sum(-1, keepdim=True)) * scale
        to_query.append(to_scores @ keys)
        to_key += to_scores.transpose(-1, -2) @ q
    return torch.cat(to_query, 2).to(query.dtype), to_key.to(key.dtype), to_value.to(value.dtype)


def _scores(query: Tensor, key: Tensor, scale: float, first: int) -> Tensor:
    """Of queries from number `first` on; -inf where a key comes after the query."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).transpose(-1, -2) * scale
    if first >= key.shape[2]:
        return scores
    numbers = torch.arange(first, first + query.shape[2], device=query.device)
    return scores.masked_fill(torch.arange(key.shape[2], device=query.device) > numbers[:, None], -torch.inf)
