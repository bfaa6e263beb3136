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
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from penstock.assets.layouts import Grid, Layout
from penstock.assets.store import SAFE_ID
from penstock.errors import InvalidReference

_PARTS = {
    "run": SAFE_ID,
    "fingerprint": re.compile(r"[a-f0-9]{16,64}"),
    "modality": SAFE_ID,
    "hash": re.compile(r"[a-f0-9]{16,128}"),
    "raw_image_id": SAFE_ID,
    "grid": re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})x([1-9][0-9]{0,5})"),
}
"""The grammar of each part."""
MAX_REFERENCE = 1024
"""Characters; the longest valid reference is shorter."""


class _Reference:
    """A reference. Its fields are its parts, in the order of the text."""

    __slots__ = ()
    scheme: ClassVar[str]
    error_type: ClassVar[str]

    def __post_init__(self) -> None:
        for name, text in self._texts().items():
            if not isinstance(text, str) or not _PARTS[name].fullmatch(text):
                raise InvalidReference(
                    f"reference {name} {str(text)[:80]!r}: must match {_PARTS[name].pattern}",
                    error_type=self.error_type,
                )

    def __str__(self) -> str:
        return ":".join((self.scheme, "v1", *self._texts().values()))

    def _texts(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in _names(type(self))}
        return {name: "x".join(map(str, value)) if name == "grid" else value for name, value in values.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRef(_Reference):
    """A source image and the grid its consumer must find.

    >>> text = "mmraw:v1:demo:" + "0" * 32 + ":image:" + "ab" * 32 + ":" + "ab" * 32 + ".png:1x44x80"
    >>> str(parse(text)) == text, parse(text).grid
    (True, (1, 44, 80))
    """

    scheme = "mmraw"
    error_type = "invalid_mm_raw_ref"
    run: str
    fingerprint: str
    """Of the processor layout (`processor_fingerprint`)."""
    modality: str = "image"
    hash: str
    """The image's sha256."""
    raw_image_id: str
    """The hash with the file's extension."""
    grid: Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureRef(_Reference):
    """Processed features of one image under one fingerprint.

    >>> str(parse("mmfile:v1:demo:" + "0" * 32 + ":image:" + "ab" * 32)).count(":")
    5
    """

    scheme = "mmfile"
    error_type = "invalid_mm_feature_ref"
    run: str
    fingerprint: str
    """Of the software that computed the features (`feature_fingerprint`)."""
    modality: str = "image"
    hash: str


def parse(text: object, *, default_run: str | None = None) -> RawRef | FeatureRef:
    """Parse a reference. An `mmfile` without a run gets `default_run`. Raises `InvalidReference` for what breaks the
    grammar."""
    kind = FeatureRef if isinstance(text, str) and text.startswith("mmfile:") else RawRef
    if not isinstance(text, str) or len(text) > MAX_REFERENCE:
        raise InvalidReference(
            f"{kind.scheme} reference: not a string of at most {MAX_REFERENCE}", error_type=kind.error_type
        )
    names, parts = _names(kind), text.split(":")
    if kind is FeatureRef and default_run is not None and len(parts) == len(names) + 1:
        parts.insert(2, default_run)
    if parts[:2] != [kind.scheme, "v1"] or len(parts) != len(names) + 2:
        raise InvalidReference(
            f"reference {text[:60]!r}: {len(parts)} parts; must be {kind.scheme}:v1 with {len(names) + 2} in all",
            error_type=kind.error_type,
        )
    values: dict[str, Any] = dict(zip(names, parts[2:], strict=True))
    grid = _PARTS["grid"].fullmatch(values.get("grid", "1x1x1"))
    if grid is None:
        raise InvalidReference(f"mmraw grid {values['grid'][:40]!r}: must be <t>x<h>x<w> without leading zeros")
    if "grid" in values:
        values["grid"] = tuple(map(int, grid.groups()))
    return kind(**values)


def _names(kind: type[Any]) -> list[str]:
    return [field.name for field in fields(kind)]


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
