"""Where an image sits in a sample: which image, its patch grid, and its placeholder tokens.

A sample carries references, never pixels. Offsets count in the sample's own tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidInput, shown

_TEXTS = (
    ("hash", re.compile(r"[0-9a-f]{64}"), "the 64 hex digits of a sha256"),
    ("media_type", re.compile(r"[!-~]{0,127}"), "like image/png"),
)
_COUNTS = ("offset", "length", "merge", "width", "height", "num_bytes")


class ImageSpan(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    hash: str
    """sha256 of the original bytes, 64 hex digits: the image's identity."""
    grid: tuple[int, int, int]
    """(time, height, width) in patches."""
    offset: int
    """First placeholder token in the sample."""
    length: int
    """Number of placeholder tokens: the grid's product over merge squared."""
    merge: int = 2
    """Patches per token along each side."""
    media_type: str = ""
    width: int = 0
    height: int = 0
    num_bytes: int = 0

    @property
    def num_patches(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def end(self) -> int:
        return self.offset + self.length

    def shifted(self, by: int) -> ImageSpan:
        """Return the same image, `by` tokens further on.

        >>> ImageSpan(hash="0" * 64, grid=(1, 2, 2), offset=3, length=1).shifted(-2).offset
        1
        """
        return msgspec.structs.replace(self, offset=self.offset + by)


def types_of(spans: Sequence[ImageSpan], num_tokens: int) -> NDArray[np.uint8]:
    """Return [num_tokens] mm_token_type_ids: 1 on image tokens, 0 elsewhere."""
    types = np.zeros(num_tokens, np.uint8)
    for span in spans:
        types[span.offset : span.end] = 1
    return types


def check_spans(spans: Sequence[ImageSpan], num_tokens: int, types: NDArray[np.uint8] | None, where: str) -> None:
    """Raise unless the spans lie inside the sample, sorted, without overlap, on image tokens, and match their grids.

    With `types` (mm_token_type_ids), every image token must be in a span, and there may be no video token.
    """
    if types is not None and int(types.max(initial=0)) > 1:
        video = int(np.argmax(types > 1))
        raise InvalidInput(
            f"{where}.mm_token_type_ids[{video}]: {int(types[video])}, a video token; videos are not "
            "supported, leave the sample out"
        )
    if not isinstance(spans, Sequence):
        raise InvalidInput(f"{where}.images: {shown(spans)}; give a list of ImageSpan")
    end = 0
    for i, span in enumerate(spans):
        at = f"{where}.images[{i}]"
        _check_fields(span, at)
        if min(span.grid) < 1 or span.merge < 1 or span.num_patches != span.length * span.merge**2:
            raise InvalidInput(
                f"{at}: {span.length} placeholder tokens for grid {span.grid} with merge {span.merge}; "
                f"must be {span.num_patches / max(span.merge, 1) ** 2:g}"
            )
        if span.offset < end or span.end > num_tokens:
            raise InvalidInput(
                f"{at}: tokens {span.offset}..{span.end} of {num_tokens}, previous image ends at {end}; "
                "spans must be sorted, apart and inside the sample"
            )
        if types is not None and not (types[span.offset : span.end] == 1).all():
            raise InvalidInput(
                f"{at}: tokens {span.offset}..{span.end} are not all of image type 1 in mm_token_type_ids"
            )
        end = span.end
    if types is not None:
        placeholders = int(np.count_nonzero(types == 1))
        covered = sum(span.length for span in spans)
        if placeholders != covered:
            raise InvalidInput(
                f"{where}.images: {len(spans)} images cover {covered} tokens, but mm_token_type_ids has {placeholders} "
                "image tokens; give the span of every image"
            )


def _check_fields(span: object, at: str) -> None:
    """Raise unless every field has its type and range: a msgspec struct does not check its arguments."""
    if not isinstance(span, ImageSpan):
        raise InvalidInput(f"{at}: a {type(span).__name__}; must be an ImageSpan")
    for name, pattern, form in _TEXTS:
        text: object = getattr(span, name)
        if not isinstance(text, str) or not pattern.fullmatch(text):
            raise InvalidInput(f"{at}.{name}: {str(text)[:80]!r}; must be {form}")
    grid: object = span.grid
    if not isinstance(grid, tuple) or len(grid) != 3 or not all(_is_count(n) for n in grid):
        raise InvalidInput(f"{at}.grid: {str(grid)[:80]}; must be a tuple of three whole numbers")
    for name in _COUNTS:
        value: object = getattr(span, name)
        if not _is_count(value):
            raise InvalidInput(f"{at}.{name}: {str(value)[:80]}; must be a Python int from 0 to 2**63 - 1")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63
