"""Fingerprints: a cached or referenced thing made under other rules can never be mistaken for one of ours.

Each is the first 32 hex digits of the sha256 of compact JSON with sorted keys.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from penstock.assets.layouts import Layout

FEATURE_KIND = "penstock.patches"


def fingerprint(content: Mapping[str, object]) -> str:
    """32 hex digits of any JSON content.

    >>> fingerprint({"b": 1, "a": 2}) == fingerprint({"a": 2, "b": 1})
    True
    """
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def processor_fingerprint(layout: Layout, *, transformers: str = "missing") -> str:
    """Of the layout: which grid an image gets. Name transformers' version where its processor is what runs."""
    return fingerprint(
        {
            "schema_version": 1,
            "kind": "raw-image-processor-layout",
            "family": layout.family,
            "patch_size": layout.patch,
            "merge_size": layout.merge,
            "temporal_patch_size": layout.temporal_patch,
            "min_pixels": layout.min_pixels,
            "max_pixels": layout.max_pixels,
            "transformers": transformers,
        }
    )


def feature_fingerprint(layout: Layout, versions: Mapping[str, str], *, kind: str = FEATURE_KIND) -> str:
    """Of processed features: the layout with its normalisation, and the versions of the software that made them."""
    return fingerprint(
        {
            "schema_version": 1,
            "kind": kind,
            "family": layout.family,
            "spatial_merge_size": layout.merge,
            "processor": processor_fingerprint(layout),
            "mean": list(layout.mean),
            "std": list(layout.std),
            "versions": dict(versions),
        }
    )
