"""How decoded pixels become a model's patch rows: with a `Layout`, or with any function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.assets.layouts import Grid
from penstock.errors import IncompatibleAsset


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
