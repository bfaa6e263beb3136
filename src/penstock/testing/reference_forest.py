"""Forests in plain Python, token by token: what `penstock.packing.forest` must match, and trees of samples to try."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainForest:
    index: list[list[int]]
    """Per sample the place of each token."""
    sources: list[int]
    sees: list[set[int]]
    """Per place the places on its path, itself included."""
    segments: list[list[int]]
    """The places of each, in order."""
    parents: list[int]
    paths: list[list[int]]


def plain_forest(lengths: Sequence[int], shared: Sequence[int]) -> PlainForest:
    """The forest of samples in depth-first order, each of which shares its first tokens with the one before it."""
    index: list[list[int]] = []
    sources: list[int] = []
    for n, s in zip(lengths, shared, strict=True):
        path = index[-1][:s] if index else []
        while len(path) < n:
            sources.append(path[-1] if path else -1)
            path = [*path, len(sources) - 1]
        index.append(path)
    sees: list[set[int]] = []
    for place, source in enumerate(sources):
        sees.append({place} | (sees[source] if source >= 0 else set()))
    ends = {path[-1] for path in index}
    children = [sources.count(place) for place in range(len(sources))]
    segments: list[list[int]] = []
    for place, source in enumerate(sources):
        if source >= 0 and source not in ends and children[source] == 1:
            segments[-1].append(place)
        else:
            segments.append([place])
    of = {place: k for k, own in enumerate(segments) for place in own}
    return PlainForest(
        index=index,
        sources=sources,
        sees=sees,
        segments=segments,
        parents=[of[sources[own[0]]] if sources[own[0]] >= 0 else -1 for own in segments],
        paths=[sorted({of[place] for place in path}) for path in index],
    )


def unique_prefixes(paths: Sequence[Sequence[object]]) -> int:
    """How many tokens a trie of these has: the fewest that anything can compute."""
    return len({tuple(path[: n + 1]) for path in paths for n in range(len(path))})
