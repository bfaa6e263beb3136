"""References on the wire: strings that an inference server gets instead of pixels, and the fingerprints in them.

    mmraw:v1:<run>:<fingerprint>:<modality>:<hash>:<raw_image_id>:<t>x<h>x<w>     a source image, to be processed
    mmfile:v1:<run>:<fingerprint>:<modality>:<hash>                               processed features, to be loaded

A reference names no path and no host. Every part is checked against a fixed grammar before it is used, and it resolves
only inside its own run's store. `mmfile` also exists without a run, from older writers; the reader then supplies its
own.

A fingerprint is the first 32 hex digits of the sha256 of compact JSON with sorted keys. Features or grids computed
under different rules have a different fingerprint, so they are never mistaken for ours.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.assets.layouts import Grid, Layout
from penstock.assets.store import SAFE_ID
from penstock.errors import InvalidReference

_PARTS = {
    "run": SAFE_ID,
    "fingerprint": re.compile(r"[a-f0-9]{16,64}"),
    "modality": SAFE_ID,
    "hash": re.compile(r"[a-f0-9]{16,128}"),
    "raw_image_id": SAFE_ID,
}
_GRID = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})x([1-9][0-9]{0,5})")
MAX_REFERENCE = 1024
"""Characters; the longest valid reference is shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRef:
    """A source image and the grid its consumer must find.

    >>> text = "mmraw:v1:demo:" + "0" * 32 + ":image:" + "ab" * 32 + ":" + "ab" * 32 + ".png:1x44x80"
    >>> str(parse_raw(text)) == text, parse_raw(text).grid
    (True, (1, 44, 80))
    """

    run: str
    fingerprint: str
    """Of the processor layout (`processor_fingerprint`)."""
    modality: str = "image"
    hash: str
    """The image's sha256."""
    raw_image_id: str
    """The hash with the file's extension."""
    grid: Grid

    def __post_init__(self) -> None:
        _check(self, ("run", "fingerprint", "modality", "hash", "raw_image_id"), "invalid_mm_raw_ref")
        if not _GRID.fullmatch(_grid_text(self.grid)):
            raise InvalidReference(f"mmraw grid {self.grid!r:.80}: must be three numbers from 1 to 999999")

    def __str__(self) -> str:
        parts = ("mmraw", "v1", self.run, self.fingerprint, self.modality, self.hash, self.raw_image_id)
        return ":".join((*parts, _grid_text(self.grid)))


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureRef:
    """Processed features of one image under one fingerprint.

    >>> str(parse_feature("mmfile:v1:demo:" + "0" * 32 + ":image:" + "ab" * 32)).count(":")
    5
    """

    run: str
    fingerprint: str
    """Of the software that computed the features (`feature_fingerprint`)."""
    modality: str = "image"
    hash: str

    def __post_init__(self) -> None:
        _check(self, ("run", "fingerprint", "modality", "hash"), "invalid_mm_feature_ref")

    def __str__(self) -> str:
        return ":".join(("mmfile", "v1", self.run, self.fingerprint, self.modality, self.hash))


def parse_raw(text: object) -> RawRef:
    """Parse an `mmraw` reference. Raises `InvalidReference` if it breaks the grammar."""
    parts = _split(text, "mmraw", (8,), "invalid_mm_raw_ref")
    grid = _GRID.fullmatch(parts[5])
    if grid is None:
        raise InvalidReference(f"mmraw grid {parts[5][:40]!r}: must be <t>x<h>x<w> without leading zeros")
    return RawRef(
        run=parts[0],
        fingerprint=parts[1],
        modality=parts[2],
        hash=parts[3],
        raw_image_id=parts[4],
        grid=(int(grid[1]), int(grid[2]), int(grid[3])),
    )


def parse_feature(text: object, *, default_run: str | None = None) -> FeatureRef:
    """Parse an `mmfile` reference. One without a run gets `default_run`."""
    parts = _split(text, "mmfile", (6,) if default_run is None else (5, 6), "invalid_mm_feature_ref")
    if len(parts) == 3:
        assert default_run is not None
        parts.insert(0, default_run)
    return FeatureRef(run=parts[0], fingerprint=parts[1], modality=parts[2], hash=parts[3])


def parse(text: object, *, default_run: str | None = None) -> RawRef | FeatureRef:
    """Parse either kind of reference, by its scheme."""
    if isinstance(text, str) and text.startswith("mmfile:"):
        return parse_feature(text, default_run=default_run)
    return parse_raw(text)


def _split(text: object, scheme: str, arities: tuple[int, ...], error_type: str) -> list[str]:
    """Return the parts after scheme and version."""
    if not isinstance(text, str) or len(text) > MAX_REFERENCE:
        raise InvalidReference(f"{scheme} reference: not a string of at most {MAX_REFERENCE}", error_type=error_type)
    parts = text.split(":")
    if parts[:2] != [scheme, "v1"] or len(parts) not in arities:
        raise InvalidReference(
            f"reference {text[:60]!r}: {len(parts)} parts; must be {scheme}:v1 with {max(arities)} in all",
            error_type=error_type,
        )
    return parts[2:]


def _check(ref: RawRef | FeatureRef, names: tuple[str, ...], error_type: str) -> None:
    for name in names:
        value = getattr(ref, name)
        if not isinstance(value, str) or not _PARTS[name].fullmatch(value):
            raise InvalidReference(
                f"reference {name} {str(value)[:80]!r}: must match {_PARTS[name].pattern}", error_type=error_type
            )


def _grid_text(grid: Grid) -> str:
    return "x".join(str(int(n)) for n in grid)


FEATURE_KIND = "penstock.patches"


def fingerprint(content: Mapping[str, object]) -> str:
    """Return 32 hex digits for any JSON content.

    >>> fingerprint({"b": 1, "a": 2}) == fingerprint({"a": 2, "b": 1})
    True
    """
    # Sorted and compact, so that equal content gives equal bytes in any process and Python version.
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def processor_fingerprint(layout: Layout, *, transformers: str = "missing") -> str:
    """Fingerprint a layout, which decides the grid of an image. Pass transformers' version if its processor runs."""
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
    """Fingerprint processed features: the layout with its normalisation, and the versions of the software."""
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
