"""How a vision model cuts an image into patches: sizes from the header alone, pixels only on the rank.

The Qwen-VL family (2, 2.5 and 3) resizes an image so that both sides are multiples of patch x merge and the area lies
between two bounds, normalises it, and lists its patches in blocks of merge x merge, so that the patches of one token
are adjacent. With patch 1 and merge 2 the pixels of a 4 x 2 image

    a b c d
    e f g h        become rows in the order   a b e f | c d g h

Each row holds channel, time, height, width; a still image repeats its pixels `temporal_patch` times. A resized pixel
has 256 possible values, so rescaling and normalising is a table of 3 x 256 floats, computed once with the operations
and roundings of the Hugging Face processor. The result equals its output bit for bit.

A rank turns decoded pixels into patch rows with a `Processor`: a `Layout`, or any function (`FromCallable`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, ImageRefused, IncompatibleAsset

Grid = tuple[int, int, int]
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
MAX_ASPECT = 200


class Processor(Protocol):
    """Two halves: a costly one whose result is cached, and a cheap one that writes floats where they are needed."""

    @property
    def row_size(self) -> int:
        """Floats per patch row."""

    def prepare(self, rgb: NDArray[np.uint8]) -> Any:
        """Convert [height, width, 3] pixels to what is cached: an array, or anything else with `nbytes`."""

    def grid_of(self, prepared: Any) -> Grid:
        """(time, height, width) in patches."""

    def fill(self, prepared: Any, out: NDArray[np.float32]) -> None:
        """Write the patch rows into [patches, row_size]."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The patch layout of one model family.

    >>> QWEN3_VL.grid(32, 32), QWEN3_VL.num_tokens((1, 16, 16))
    ((1, 16, 16), 64)
    """

    family: str
    patch: int
    """Pixels of a patch along each side."""
    merge: int = 2
    """Patches of a token along each side."""
    temporal_patch: int = 2
    """Frames of a patch; a still image fills all of them."""
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    """Of each channel, after scaling to 0..1."""
    std: tuple[float, float, float]

    def __post_init__(self) -> None:
        sizes = (self.patch, self.merge, self.temporal_patch, self.min_pixels)
        if min(sizes) < 1 or self.max_pixels < max(self.min_pixels, (self.patch * self.merge) ** 2):
            raise ConfigError(
                f"layout {self.family!r}: patch {self.patch}, merge {self.merge}, frames {self.temporal_patch}, "
                f"pixels {self.min_pixels}..{self.max_pixels}; sizes must be positive and one token must fit"
            )

    def fit(self, width: int, height: int) -> tuple[int, int]:
        """Return (width, height) that the image is resized to."""
        if width < 1 or height < 1 or max(width, height) > MAX_ASPECT * min(width, height):
            raise ImageRefused(f"image of {width} x {height}: sides must not differ by more than {MAX_ASPECT} times")
        factor = self.patch * self.merge
        # Python rounds halves to even (720 / 32 = 22.5 -> 22), and so do the models' own processors.
        w, h = round(width / factor), round(height / factor)
        if w * h * factor**2 > self.max_pixels:
            shrink = math.sqrt(width * height / self.max_pixels)
            w, h = (max(1, math.floor(side / shrink / factor)) for side in (width, height))
        elif w * h * factor**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (width * height))
            w, h = (math.ceil(side * grow / factor) for side in (width, height))
        # A side below half a factor rounds to 0, which lands in the second branch and comes out as at least 1.
        return w * factor, h * factor

    def grid(self, width: int, height: int) -> Grid:
        """Return (time, height, width) in patches of an upright image of that size."""
        w, h = self.fit(width, height)
        return 1, h // self.patch, w // self.patch

    def num_tokens(self, grid: Grid) -> int:
        return grid[0] * grid[1] * grid[2] // self.merge**2

    @property
    def row_size(self) -> int:
        """Floats of one patch."""
        return 3 * self.temporal_patch * self.patch**2

    def prepare(self, rgb: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return the resized [height, width, 3] image. Cached: it is costly, and eight times smaller than patches."""
        from PIL import Image

        width, height = self.fit(rgb.shape[1], rgb.shape[0])
        if (height, width) == rgb.shape[:2]:
            return rgb
        return np.asarray(Image.fromarray(rgb).resize((width, height), Image.Resampling.BICUBIC))

    def grid_of(self, prepared: NDArray[np.uint8]) -> Grid:
        return 1, prepared.shape[0] // self.patch, prepared.shape[1] // self.patch

    def fill(self, prepared: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        """Write the [patches, row_size] rows of a prepared image into `out`."""
        _, h, w = self.grid_of(prepared)
        p, m = self.patch, self.merge
        # Axes: block row, patch in block, pixel in patch; the same along the width; channel. Reordered to block row,
        # block column, patch row, patch column, channel, pixel row, pixel column.
        blocks = prepared.reshape(h // m, m, p, w // m, m, p, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        rows = out.reshape(h // m, w // m, m, m, 3, self.temporal_patch, p, p)
        for channel in range(3):
            values = self._table[channel][blocks[:, :, :, :, channel]]
            rows[:, :, :, :, channel] = values[:, :, :, :, None]

    @cached_property
    def _table(self) -> NDArray[np.float32]:
        """[3, 256] the normalised value of each channel's byte."""
        # float64 product, then float32, like the processors. Computing in float32 alone differs in the last bit.
        scaled = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        return np.stack([(scaled - mean[c]) / std[c] for c in range(3)])


_QWEN2 = {"patch": 14, "min_pixels": 56 * 56, "max_pixels": 28 * 28 * 16384, "mean": _CLIP_MEAN, "std": _CLIP_STD}
QWEN2_VL = Layout(family="qwen2_vl", **_QWEN2)  # type: ignore[arg-type]
QWEN2_5_VL = Layout(family="qwen2_5_vl", **_QWEN2)  # type: ignore[arg-type]
QWEN3_VL = Layout(
    family="qwen3_vl",
    patch=16,
    min_pixels=256 * 256,
    max_pixels=4096 * 4096,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
)


def layout_from_config(family: str, config: Mapping[str, Any]) -> Layout:
    """Return the layout that a model's `preprocessor_config.json` describes.

    >>> layout_from_config("qwen2_vl", {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2,
    ...     "size": {"shortest_edge": 3136, "longest_edge": 12845056},
    ...     "image_mean": QWEN2_VL.mean, "image_std": QWEN2_VL.std}) == QWEN2_VL
    True
    """
    size = config.get("size") or {}
    try:
        return Layout(
            family=family,
            patch=int(config["patch_size"]),
            merge=int(config["merge_size"]),
            temporal_patch=int(config["temporal_patch_size"]),
            min_pixels=int(config.get("min_pixels") or size["shortest_edge"]),
            max_pixels=int(config.get("max_pixels") or size["longest_edge"]),
            mean=tuple(map(float, config["image_mean"])),  # type: ignore[arg-type]
            std=tuple(map(float, config["image_std"])),  # type: ignore[arg-type]
        )
    except KeyError as error:
        raise ConfigError(f"preprocessor config of {family!r}: no {error}; pass the model's own file") from None


# ------------------------------------------------------------------ any function


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Patch rows as a function returned them."""

    patches: NDArray[np.float32]
    grid: Grid

    @property
    def nbytes(self) -> int:
        return self.patches.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FromCallable:
    """A processor from any function of [height, width, 3] pixels to (patch rows, grid).

    A Hugging Face image processor, for example:

        def process(rgb):
            out = processor(images=[rgb], return_tensors="np")
            return out["pixel_values"], out["image_grid_thw"][0]
    """

    function: Callable[[NDArray[np.uint8]], tuple[NDArray[np.float32], Sequence[int]]]
    row_size: int

    def prepare(self, rgb: NDArray[np.uint8]) -> Rows:
        patches, (t, h, w) = self.function(rgb)
        if hasattr(patches, "detach"):  # a tensor: numpy has no bfloat16, and reads no other device
            patches = patches.detach().float().cpu().numpy()
        try:
            return Rows(patches=np.asarray(patches, np.float32), grid=(int(t), int(h), int(w)))
        except (TypeError, ValueError) as error:
            raise IncompatibleAsset(
                f"processor: {type(patches).__name__} of patch rows, grid {(t, h, w)!r:.60}: {error}; return numbers",
                error_type="raw_mm_grid_mismatch",
            ) from None

    def grid_of(self, prepared: Rows) -> Grid:
        return prepared.grid

    def fill(self, prepared: Rows, out: NDArray[np.float32]) -> None:
        if prepared.patches.shape != out.shape:
            raise IncompatibleAsset(
                f"processor: {prepared.patches.shape} patch rows for grid {prepared.grid}; must be {out.shape}",
                error_type="raw_mm_grid_mismatch",
            )
        out[:] = prepared.patches
