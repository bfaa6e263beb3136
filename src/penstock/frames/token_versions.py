"""Count the trained tokens of a group's samples by the policy version that sampled them."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import MODE_WEIGHTS, WEIGHTS, Samples

Counts: TypeAlias = tuple[tuple[tuple[int, int], ...], ...]
"""Per sample: (policy version, trained tokens), by version."""
Terms: TypeAlias = tuple[tuple[tuple[int, int, int], ...], ...]
"""Per sample and version: tokens with a weight in each term of the loss."""


def count_versions(samples: Samples, kept: NDArray[np.int64]) -> dict[str, Any]:
    """Return `versions` and `version_terms` of a group's metadata; nothing where one version sampled all of it.

    `kept` are the tokens that each sample keeps.
    """
    column = samples.columns.get("weight_versions")
    if (column is None or not len(column.values)) and len(set(samples.policy_versions.tolist())) == 1:
        return {"versions": ()}
    weights = [samples.columns[name] for name in WEIGHTS if name in samples.columns]
    weighted = any(len(one.values) for one in weights)
    found: list[tuple[tuple[int, int], ...]] = []
    terms: list[tuple[tuple[int, int, int], ...]] = []
    for i, own in enumerate(samples.policy_versions.tolist()):
        n = int(kept[i])
        mask = samples.columns["loss_mask"][i][:n]
        row = () if column is None else column[i]
        versions = row[:n][mask] if len(row) else np.full(int(mask.sum()), own)
        values, at, counts = np.unique(versions, return_inverse=True, return_counts=True)
        found.append(tuple(zip(values.tolist(), counts.tolist(), strict=True)))
        if weighted:
            by_term = [np.bincount(at, one[mask] != 0, len(values)) for one in _weights_of(samples, i, n)]
            terms.append(tuple((int(a), int(b), int(c)) for a, b, c in zip(*by_term, strict=True)))
    return {"versions": tuple(found), "version_terms": tuple(terms)}


def _weights_of(samples: Samples, i: int, n: int) -> list[NDArray[Any]]:
    """Return the weights of a sample's first `n` tokens in the three terms, given or by its mode."""
    found: list[NDArray[Any]] = []
    for name, by_mode in zip(WEIGHTS, MODE_WEIGHTS[samples.text["mode"][i]], strict=True):
        column = samples.columns.get(name)
        found.append(column[i][:n] if column is not None and len(column[i]) else np.full(n, by_mode))
    return found


def versions_problem(versions: Counts, terms: Terms, loss_tokens: NDArray[np.int64]) -> str:
    """Return what is wrong with counts that a worker sent, or ""."""
    if len(versions) not in (0, len(loss_tokens)) or len(terms) not in (0, len(versions)):
        return f"versions of {len(versions)} samples and terms of {len(terms)}; it has {len(loss_tokens)}"
    for i, (row, trained) in enumerate(zip(versions, loss_tokens.tolist(), strict=False)):
        counts = [count for _, count in row]
        if min(counts, default=0) < 0 or sum(counts) > trained:
            return f"versions of sample {i} count {sum(counts)} tokens; it trains {trained}"
        of_terms = terms[i] if terms else ()
        too_many = any(min(one) < 0 or max(one) > n for one, n in zip(of_terms, counts, strict=False))
        if terms and (len(of_terms) != len(counts) or too_many):
            return f"versions of sample {i} and their terms do not fit together"
    return ""
