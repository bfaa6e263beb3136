"""Patches and positions equal those of Hugging Face transformers; in one module, because its import takes seconds."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.arrays import ImageSpan
from penstock.assets import QWEN2_5_VL, QWEN2_VL, QWEN3_VL, Layout
from penstock.assets.image_files import decode_rgb
from penstock.testing import draw_screenshot
from penstock.train.vision import mrope_positions

pytestmark = [
    pytest.mark.deep,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


SMALL = dataclasses.replace(QWEN3_VL, family="small", patch=4, min_pixels=16 * 16, max_pixels=64 * 64)


@pytest.fixture(scope="module")
def real_images() -> list[NDArray[np.uint8]]:
    """Two photographs that ship with scikit-learn, and drawn pictures of odd sizes."""
    package = find_spec("sklearn")  # found, not imported: the import alone takes seconds
    assert package is not None
    assert package.origin is not None
    folder = Path(package.origin).parent / "datasets" / "images"
    photographs = [decode_rgb((folder / name).read_bytes()) for name in ("china.jpg", "flower.jpg")]
    sizes = [(1280, 720), (33, 31), (20, 500), (1, 1), (28, 28), (701, 13), (64, 64)]
    drawn = [decode_rgb(draw_screenshot(seed=i, width=w, height=h)) for i, (w, h) in enumerate(sizes)]
    return [*photographs, *drawn]


@pytest.mark.parametrize("layout", [QWEN2_VL, QWEN2_5_VL, QWEN3_VL, SMALL], ids=lambda layout: layout.family)
def test_patches_equal_the_hugging_face_processor(layout: Layout, real_images: list[NDArray[np.uint8]]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(
        patch_size=layout.patch,
        merge_size=layout.merge,
        temporal_patch_size=layout.temporal_patch,
        size={"shortest_edge": layout.min_pixels, "longest_edge": layout.max_pixels},
        image_mean=list(layout.mean),
        image_std=list(layout.std),
    )
    for rgb in real_images:
        theirs = processor(images=[rgb], input_data_format="channels_last", return_tensors="np")
        assert tuple(theirs["image_grid_thw"][0].tolist()) == layout.grid(rgb.shape[1], rgb.shape[0])
        prepared = layout.prepare(rgb)
        ours = np.full((theirs["image_grid_thw"][0].prod(), layout.row_size), np.nan, np.float32)
        layout.fill(prepared, ours)
        assert theirs["pixel_values"].dtype == np.float32
        assert ours.tobytes() == theirs["pixel_values"].tobytes()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_equal_those_of_the_models(family: str) -> None:
    import torch
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

    torch.set_num_threads(1)

    class Vision:
        spatial_merge_size = 2
        tokens_per_second = 2

    class Config:
        vision_config = Vision()

    kind: Any = {"qwen2_5_vl": Qwen2_5_VLModel, "qwen3_vl": Qwen3VLModel}[family]
    model = kind.__new__(kind)  # positions need the configuration, not the weights
    torch.nn.Module.__init__(model)
    model.config = Config()

    rng = np.random.default_rng(3)
    for _ in range(20):
        images, types = [], [0] * int(rng.integers(1, 6))
        for _ in range(int(rng.integers(1, 4))):  # with text between them: the models go by runs of image tokens
            grid = (1, 2 * int(rng.integers(1, 5)), 2 * int(rng.integers(1, 5)))
            length = grid[1] * grid[2] // 4
            images.append(ImageSpan(hash="0" * 64, grid=grid, offset=len(types), length=length))
            types += [1] * length + [0] * int(rng.integers(1, 6))
        theirs, _ = model.get_rope_index(
            torch.zeros((1, len(types)), dtype=torch.long),
            mm_token_type_ids=torch.tensor([types]),
            image_grid_thw=torch.tensor([image.grid for image in images]),
        )
        assert np.array_equal(mrope_positions(images, [len(types)])[1:], theirs[:, 0].numpy())
