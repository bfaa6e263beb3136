"""Patches are those of the plain path bit for bit, and sizes follow from the header alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.assets import QWEN2_5_VL, QWEN2_VL, QWEN3_VL, ImageRef, Layout, describe, layout_from_config, span
from penstock.errors import ConfigError, ImageRefused
from tests.support.reference import reference_fit, reference_patches

SMALL = dataclasses.replace(QWEN3_VL, family="small", patch=4, min_pixels=16 * 16, max_pixels=64 * 64)
LAYOUTS = [QWEN2_VL, QWEN2_5_VL, QWEN3_VL, SMALL]


def patches_of(rgb: NDArray[np.uint8], layout: Layout) -> NDArray[np.float32]:
    prepared = layout.prepare(rgb)
    t, h, w = layout.grid_of(prepared)
    out = np.full((t * h * w, layout.row_size), np.nan, np.float32)
    layout.fill(prepared, out)
    return out


def same_bits(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


@settings(max_examples=60)
@given(
    width=st.integers(1, 90),
    height=st.integers(1, 90),
    patch=st.integers(1, 5),
    merge=st.integers(1, 3),
    temporal=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_patches_equal_the_plain_path_bit_for_bit(
    width: int, height: int, patch: int, merge: int, temporal: int, seed: int
) -> None:
    layout = dataclasses.replace(
        QWEN2_VL, patch=patch, merge=merge, temporal_patch=temporal, min_pixels=400, max_pixels=3000
    )
    rgb = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    ours = patches_of(rgb, layout)
    assert same_bits(ours, reference_patches(rgb, layout))
    assert len(ours) == np.prod(layout.grid(width, height))


@settings(max_examples=500)
@given(st.integers(1, 20_000), st.integers(1, 20_000), st.sampled_from(LAYOUTS))
def test_the_fitted_size_is_whole_within_bounds_and_as_written_out(width: int, height: int, layout: Layout) -> None:
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(ImageRefused, match="200 times"):
            layout.fit(width, height)
        return
    w, h = layout.fit(width, height)
    factor = layout.patch * layout.merge
    assert w % factor == 0
    assert h % factor == 0
    assert w * h >= layout.min_pixels
    assert w * h <= layout.max_pixels or min(w, h) == factor
    assert (w, h) == reference_fit(width, height, layout)


def test_a_known_size_has_its_known_number_of_tokens() -> None:
    ref = ImageRef(hash="0" * 64, media_type="image/png", width=32, height=32, num_bytes=1)
    assert describe(ref, QWEN3_VL) == ((1, 16, 16), 64)
    placed = span(ref, QWEN3_VL, offset=7)
    assert (placed.offset, placed.length, placed.merge, placed.end) == (7, 64, 2, 71)
    assert (placed.width, placed.height, placed.media_type, placed.num_bytes) == (32, 32, "image/png", 1)
    screenshot = ImageRef(hash="0" * 64, media_type="image/png", width=1280, height=720, num_bytes=1)
    assert describe(screenshot, QWEN3_VL) == ((1, 44, 80), 880)
    assert describe(screenshot, QWEN2_5_VL) == ((1, 52, 92), 1196)


def test_a_layout_can_be_read_from_a_models_own_file() -> None:
    config: dict[str, Any] = {
        "patch_size": 16,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    assert layout_from_config("qwen3_vl", config) == QWEN3_VL
    assert layout_from_config("x", {**config, "min_pixels": 9, "max_pixels": 99_999}).max_pixels == 99_999
    for missing in ("patch_size", "size", "image_std"):
        with pytest.raises(ConfigError, match="preprocessor config"):
            layout_from_config("x", {name: value for name, value in config.items() if name != missing})
    with pytest.raises(ConfigError, match="patch 0"):
        layout_from_config("x", {**config, "patch_size": 0})
