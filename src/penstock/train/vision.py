"""Inputs of a vision-language model besides tokens: pixels and grids of a row's images, and their positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.arrays import types_of
from penstock.assets import AssetStore, layout_from_config
from penstock.errors import InvalidInput
from penstock.packing import Forest, MicroBatch
from penstock.train.materialize import Materializer, Metrics, Policy, check_image_tokens, mask_segments, sum_metrics
from penstock.train.mrope import mrope_positions
from penstock.train.run_config import ModelConfig, image_processor
from penstock.train.tensors import FOREST


def check_placeholders(batch: MicroBatch, config: Any) -> None:
    """Raise unless image tokens occur exactly in the spans of the batch's images, and no video token occurs.

    `config` is the model's. A placeholder without an image would silently be trained as text. An image whose tokens are
    not placeholders would be ignored.
    """
    ids, image_token = batch["token_ids"], getattr(config, "image_token_id", None)
    if image_token is None:
        if batch.images:
            raise InvalidInput(
                f"sample {batch.sample_at(batch.images[0].offset)!r}: has an image, but the model "
                f"({config.model_type}) accepts none; train another model or leave the images out"
            )
        return
    video_token = getattr(config, "video_token_id", None)
    if video_token is not None and (ids == video_token).any():
        at = int(np.argmax(ids == video_token))
        raise InvalidInput(
            f"sample {batch.sample_at(at)!r}: token {at} of the row is the video token {video_token}; videos are not "
            "supported: leave the sample out"
        )
    wrong = (ids == image_token) != types_of(batch.images, batch.num_tokens).astype(np.bool_)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise InvalidInput(
            f"sample {batch.sample_at(at)!r}: token {at} of the row is {int(ids[at])}, "
            + (
                "the model's image token, but there is no image; a placeholder was sampled, or images= was left out"
                if ids[at] == image_token
                else f"in the span of an image; the model's image token is {image_token}"
            )
        )


class Vision:
    """Materializes the images of micro-batches on this rank."""

    def __init__(self, model: Any, config: ModelConfig, store: AssetStore, policy: Policy | None = None) -> None:
        """`policy` decides about samples whose image cannot be read. The default raises."""
        self._layout = layout_from_config(model.config.model_type, image_processor(config))
        self._image_token = int(model.config.image_token_id)
        self._materializer = Materializer(store, self._layout, policy=policy)
        self._since: list[Metrics] = []

    def inputs(self, batch: MicroBatch, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Return the model's image arguments. Changes positions in `tensors`, and the loss mask if one is lost."""
        forest, space = batch.forest, "" if batch.forest is None else FOREST
        images = batch.images if forest is None else forest.images  # a forest has each image once
        pixels = self._materializer.materialize(images, batch.sequence_lengths if forest is None else forest.lengths)
        self._since.append(pixels.metrics)
        check_image_tokens(batch.inputs["token_ids"], self._image_token, pixels, self._layout.merge)
        if pixels.masked:
            masked = pixels.masked if forest is None else samples_through(forest, pixels.masked)
            mask = mask_segments(batch["loss_mask"], batch.sequence_lengths, masked)
            tensors["loss_mask"] = torch.from_numpy(np.ascontiguousarray(mask))
        positions = mrope_positions(batch.images, batch.sequence_lengths, types=batch["mm_token_type_ids"])
        if forest is not None:
            positions = in_node_space(positions, forest)
        tensors[f"{space}position_ids"] = torch.from_numpy(positions)  # [4, T]
        return {
            "pixel_values": torch.from_numpy(pixels.pixel_values),
            "image_grid_thw": torch.from_numpy(pixels.image_grid_thw),
            "mm_token_type_ids": tensors[f"{space}mm_token_type_ids"].int()[None],
        }

    def metrics(self) -> dict[str, float]:
        """Return image metrics of this rank since the last call."""
        found = sum_metrics(self._since)
        self._since.clear()
        return {
            "train/image_masked_samples": found.masked_samples,
            "perf/images": found.unique_images,
            "perf/image_cache_hits": found.cache_hits,
            "perf/image_bytes_read": found.bytes_read,
            "perf/image_decode_s": found.decode_s,
        }

    def close(self) -> None:
        self._materializer.close()


def samples_through(forest: Forest, segments: Sequence[int]) -> tuple[int, ...]:
    """Return the samples that have one of these segments on their path."""
    return tuple(i for i, path in enumerate(forest.paths.tolist()) if not set(path).isdisjoint(segments))


def in_node_space(positions: NDArray[np.int64], forest: Forest) -> NDArray[np.int64]:
    """Convert [4, T] positions of samples to [4, U] of places. Samples that share a token agree on its position."""
    out = np.tile(forest.columns["position_ids"], (len(positions), 1))  # padding keeps its own
    out[:, forest.index] = positions
    return out
