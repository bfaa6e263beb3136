"""Leaves tokens of outdated policy versions out of a step's counts, using metadata alone.

Metadata counts the trained tokens of each sample by the version that sampled them. So the plane knows what a step
trains once old tokens are masked, and every denominator is right, before any frame is read. The plan carries the oldest
version that is trained, and each rank masks its own tokens (`packing.filling`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from penstock.arrays import MODE_WEIGHTS, SampleMetadata
from penstock.frames.metadata import GroupMetadata

_WEIGHS = {mode: np.array([weight != 0 for weight in weights]) for mode, weights in MODE_WEIGHTS.items()}


def mask_stale(joined: SampleMetadata, groups: Sequence[GroupMetadata], oldest_version: int) -> SampleMetadata:
    """Return the metadata of a step's samples without trained tokens of versions before `oldest_version`.

    Tokens of an unknown version stay. `joined` is the metadata of `groups`, joined.
    """
    if oldest_version <= 0:
        return joined
    stale, terms = np.zeros(len(joined), np.int64), np.zeros((len(joined), 3), np.int64)
    at = 0
    for group in groups:
        known = group.policy_version is not None and group.policy_version < oldest_version
        for i in range(at, at + group.num_samples):
            if not group.versions:
                # All of its samples have the version of the group.
                if known:
                    stale[i], terms[i] = joined.kept_loss_tokens[i], joined.term_tokens[i]
                continue
            for k, (version, count) in enumerate(group.versions[i - at]):
                if 0 <= version < oldest_version:
                    stale[i] += count
                    terms[i] += (
                        group.version_terms[i - at][k] if group.version_terms else count * _WEIGHS[joined.mode[i]]
                    )
        at += group.num_samples
    # A worker vouches for these counts. They must not make a denominator negative.
    stale, terms = np.minimum(stale, joined.kept_loss_tokens), np.minimum(terms, joined.term_tokens)
    return replace(
        joined,
        kept_loss_tokens=joined.kept_loss_tokens - stale,
        term_tokens=joined.term_tokens - terms,
        stale_loss_tokens=stale,
        oldest_version=oldest_version,
    )
