"""References on the wire: strings an inference server gets instead of pixels.

    mmraw:v1:<run>:<fingerprint>:<modality>:<hash>:<raw_image_id>:<t>x<h>x<w>     a source image, to be processed
    mmfile:v1:<run>:<fingerprint>:<modality>:<hash>                               processed features, to be loaded

A reference names no path and no host. Every part is checked against a fixed grammar before it is used, and
it resolves only inside its own run's store. `mmfile` also exists without a run, from older writers; the
reader then supplies its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.assets.layouts import Grid
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
"""Characters; the longest legal reference is shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRef:
    """A source image and the grid its consumer must find.

    >>> text = "mmraw:v1:demo:" + "0" * 32 + ":image:" + "ab" * 32 + ":" + "ab" * 32 + ".png:1x44x80"
    >>> str(parse_raw(text)) == text, parse_raw(text).grid
    (True, (1, 44, 80))
    """

    run: str
    fingerprint: str
    """Of the processor layout: see fingerprints.py."""
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
    """Of the software that made the features: see fingerprints.py."""
    modality: str = "image"
    hash: str

    def __post_init__(self) -> None:
        _check(self, ("run", "fingerprint", "modality", "hash"), "invalid_mm_feature_ref")

    def __str__(self) -> str:
        return ":".join(("mmfile", "v1", self.run, self.fingerprint, self.modality, self.hash))


def parse_raw(text: object) -> RawRef:
    """The parts of an `mmraw` reference; `InvalidReference` when it breaks the grammar."""
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
    """The parts of an `mmfile` reference; one without a run gets `default_run`."""
    parts = _split(text, "mmfile", (6,) if default_run is None else (5, 6), "invalid_mm_feature_ref")
    if len(parts) == 3:
        assert default_run is not None
        parts.insert(0, default_run)
    return FeatureRef(run=parts[0], fingerprint=parts[1], modality=parts[2], hash=parts[3])


def parse(text: object, *, default_run: str | None = None) -> RawRef | FeatureRef:
    """Either reference, by its first word."""
    if isinstance(text, str) and text.startswith("mmfile:"):
        return parse_feature(text, default_run=default_run)
    return parse_raw(text)


def _split(text: object, scheme: str, arities: tuple[int, ...], error_type: str) -> list[str]:
    """The parts behind scheme and version."""
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
