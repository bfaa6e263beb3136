"""Inputs of a vision-language model besides tokens: pixels and grids of a row's images, and their positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import ImageSpan, check_spans, types_of
from penstock.assets import AssetStore, layout_from_config
from penstock.errors import InvalidInput
from penstock.packing import Forest, MicroBatch
from penstock.train.materialize import Materializer, Metrics, Policy, check_image_tokens, mask_segments, sum_metrics
from penstock.train.tensors import FOREST, checked_lengths

if TYPE_CHECKING:
    from torch import Tensor


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

    def __init__(
        self, model: Any, processor: Mapping[str, Any], store: AssetStore, policy: Policy | None = None
    ) -> None:
        """`processor` is the model's preprocessor_config.json. `policy` decides about samples whose image cannot be
        read. The default raises."""
        self._layout = layout_from_config(model.config.model_type, processor)
        self._image_token = int(model.config.image_token_id)
        self._materializer = Materializer(store, self._layout, policy=policy)
        self._since: list[Metrics] = []

    def inputs(self, batch: MicroBatch, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Return the model's image arguments. Changes positions in `tensors`, and the loss mask if one is lost."""
        import torch

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
            "perf/image_s": found.wall_s,
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


# ------------------------------------------------------------------ positions


def mrope_positions(
    images: Sequence[ImageSpan],
    sequence_lengths: Sequence[int] | NDArray[np.integer],
    *,
    types: NDArray[np.uint8] | None = None,
) -> NDArray[np.int64]:
    """Return the [4, T] positions of one row: plain ones that restart per segment, then time, height and width.

    Qwen-VL gives every token three positions: time, height, width (M-RoPE). Text advances all three together. An image
    of T x H x W tokens starts where the text before it ended and counts along its own axes. The text after it continues
    at the start plus the larger of H and W:

        text text [ image 1 x 2 x 3 ] text       time    0 1 2 2 2 2 2 2 5
                                                 height  0 1 2 2 2 3 3 3 5
                                                 width   0 1 2 3 4 2 3 4 5

    Each segment starts at 0 again. Images are placed by their spans, not by runs of image tokens, so two images without
    text between them stay two.

    Four rows, because given three, a model treats the row as one sequence and attends across its samples.
    `images` are in the row's token space; with `types` (mm_token_type_ids) every image token must be in a span.

    >>> image = ImageSpan(hash="0" * 64, grid=(1, 4, 6), offset=2, length=6)
    >>> mrope_positions([image], [9]).tolist()[1:]
    [[0, 1, 2, 2, 2, 2, 2, 2, 5], [0, 1, 2, 2, 2, 3, 3, 3, 5], [0, 1, 2, 3, 4, 2, 3, 4, 5]]
    """
    lengths = checked_lengths(sequence_lengths)
    starts = np.cumsum(lengths) - lengths
    num_tokens = int(lengths.sum())
    _check_positions(images, lengths, starts, num_tokens, types)
    plain = np.arange(num_tokens) - np.repeat(starts, lengths)
    out = np.tile(plain, (4, 1))
    ends = starts + lengths
    for image in images:
        end = int(ends[np.searchsorted(ends, image.offset, side="right")])
        first = int(out[1, image.offset])
        frames, height, width = image.grid[0], image.grid[1] // image.merge, image.grid[2] // image.merge
        out[1:, image.offset : image.end] = first + np.indices((frames, height, width)).reshape(3, -1)
        # The text after an image continues at its larger side, not at its number of tokens: 2 x 3 tokens advance it
        # by 3, and the plain positions already advanced by 6, so it moves by -3.
        out[1:, image.end : end] += max(height, width) - image.length
    return out


def _check_positions(
    images: Sequence[ImageSpan],
    lengths: NDArray[np.int64],
    starts: NDArray[np.int64],
    num_tokens: int,
    types: NDArray[np.uint8] | None,
) -> None:
    if types is not None and len(types) != num_tokens:
        raise InvalidInput(f"types: {len(types)} values for {num_tokens} tokens; must be one per token")
    check_spans(images, num_tokens, types, "row")
    for i, image in enumerate(images):
        if image.grid[1] % image.merge or image.grid[2] % image.merge:
            raise InvalidInput(f"images[{i}].grid: {image.grid}; sides must be multiples of merge {image.merge}")
        inside = int(np.searchsorted(starts, image.offset, side="right")) - 1
        if image.end > int(starts[inside] + lengths[inside]):
            raise InvalidInput(f"images[{i}]: tokens {image.offset}..{image.end} cross the end of segment {inside}")
