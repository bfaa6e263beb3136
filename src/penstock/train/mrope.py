"""Compute the rotary positions (M-RoPE) of packed text and images, per segment.

Qwen-VL gives every token three positions: time, height, width. Text advances all three together. An image of
T x H x W tokens starts where the text before it ended and counts along its own axes. The text after it continues at
the start plus the larger of H and W:

    text text [ image 1 x 2 x 3 ] text       time    0 1 2 2 2 2 2 2 5
                                             height  0 1 2 2 2 3 3 3 5
                                             width   0 1 2 3 4 2 3 4 5

Each segment starts at 0 again. Images are placed by their spans, not by runs of image tokens, so two images
without text between them stay two.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import ImageSpan, check_spans
from penstock.errors import InvalidInput
from penstock.train.tensors import checked_lengths


def mrope_positions(
    images: Sequence[ImageSpan],
    sequence_lengths: Sequence[int] | NDArray[np.integer],
    *,
    types: NDArray[np.uint8] | None = None,
) -> NDArray[np.int64]:
    """Return the [4, T] positions of one row: plain ones that restart per segment, then time, height and width.

    Four rows, because given three, a model treats the row as one sequence and attends across its samples.
    `images` are in the row's token space; with `types` (mm_token_type_ids) every image token must be in a span.

    >>> image = ImageSpan(hash="0" * 64, grid=(1, 4, 6), offset=2, length=6)
    >>> mrope_positions([image], [9]).tolist()[1:]
    [[0, 1, 2, 2, 2, 2, 2, 2, 5], [0, 1, 2, 2, 2, 3, 3, 3, 5], [0, 1, 2, 3, 4, 2, 3, 4, 5]]
    """
    lengths = checked_lengths(sequence_lengths)
    starts = np.cumsum(lengths) - lengths
    num_tokens = int(lengths.sum())
    _check(images, lengths, starts, num_tokens, types)
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


def _check(
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
