"""What a vision-language model gets beside the tokens: pixels and grids of a row's images, positions per segment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.assets import AssetStore
from penstock.assets.layouts import layout_from_config
from penstock.errors import ConfigError
from penstock.pack import MicroBatch
from penstock.train.materialize import Materializer, mask_segments
from penstock.train.mrope import mrope_positions
from penstock.train.run_config import ModelConfig


class Vision:
    """Materializes the images of micro-batches on this rank."""

    def __init__(self, model: Any, config: ModelConfig, store: AssetStore) -> None:
        found = config.image_processor
        path = Path(config.path) / "preprocessor_config.json"
        if not found and config.path and path.is_file():
            found = json.loads(path.read_text())
        if not found:
            raise ConfigError("model.image_processor: not given, and no preprocessor_config.json; images need a layout")
        self._materializer = Materializer(store, layout_from_config(model.config.model_type, found))

    def inputs(self, batch: MicroBatch, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Arguments for the model; positions, and the loss mask where an image is lost, are changed in `tensors`."""
        pixels = self._materializer.materialize(batch.images, batch.sequence_lengths)
        if pixels.masked:
            mask = mask_segments(batch["loss_mask"], batch.sequence_lengths, pixels.masked)
            tensors["loss_mask"] = torch.from_numpy(np.ascontiguousarray(mask))[None]
        positions = mrope_positions(batch.images, batch.sequence_lengths)
        tensors["position_ids"] = torch.from_numpy(positions)[:, None]
        return {
            "pixel_values": torch.from_numpy(pixels.pixel_values),
            "image_grid_thw": torch.from_numpy(pixels.image_grid_thw),
            "mm_token_type_ids": tensors["mm_token_type_ids"].int(),
        }

    def close(self) -> None:
        self._materializer.close()
