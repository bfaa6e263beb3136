"""Positions are those of a walk over the tokens, one at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.arrays import ImageSpan
from penstock.errors import InvalidInput
from penstock.train.vision import mrope_positions
from tests.support.reference import reference_positions


def image(offset: int, grid: tuple[int, int, int], merge: int = 2) -> ImageSpan:
    length = grid[0] * grid[1] * grid[2] // merge**2
    return ImageSpan(hash="0" * 64, grid=grid, offset=offset, length=length, merge=merge)


# A segment is text and images in any order: a number is that many text tokens, a pair an image of h x w tokens.
pieces = st.lists(
    st.integers(1, 5) | st.tuples(st.integers(1, 2), st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=6
)


def laid_out(
    segments: list[list[int | tuple[int, int, int]]], merge: int
) -> tuple[list[ImageSpan], list[int], list[list[ImageSpan]]]:
    """Spans in the row, lengths, and the spans of each segment in its own token space."""
    row, lengths, own = [], [], []
    at = 0
    for segment in segments:
        start, spans = at, []
        for piece in segment:
            if isinstance(piece, int):
                at += piece
                continue
            placed = image(at, (piece[0], piece[1] * merge, piece[2] * merge), merge)
            row.append(placed)
            spans.append(image(at - start, placed.grid, merge))
            at += placed.length
        lengths.append(at - start)
        own.append(spans)
    return row, lengths, own


@settings(max_examples=200)
@given(st.lists(pieces, min_size=1, max_size=4), st.integers(1, 3))
def test_positions_equal_a_walk_over_each_segment(segments: list[list[Any]], merge: int) -> None:
    row, lengths, own = laid_out(segments, merge)
    got = mrope_positions(row, lengths)
    expected = [reference_positions(n, spans) for n, spans in zip(lengths, own, strict=True)]
    for axis in range(3):
        assert got[axis + 1].tolist() == [p for segment in expected for p in segment[axis]]
    assert got[0].tolist() == [p for n in lengths for p in range(n)]
    assert got.dtype == np.int64


def test_two_images_without_text_between_them_stay_two() -> None:
    both = mrope_positions([image(0, (1, 4, 4)), image(4, (1, 4, 4))], [9])
    assert both[1].tolist() == [0, 0, 0, 0, 2, 2, 2, 2, 4]
    one = mrope_positions([image(0, (2, 4, 4))], [9])
    assert one[1].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2]


def test_plain_text_and_padding_count_up_in_all_rows() -> None:
    assert mrope_positions([], [3, 1, 2]).tolist() == [[0, 1, 2, 0, 0, 1]] * 4
    assert mrope_positions([], []).shape == (4, 0)


@pytest.mark.parametrize(
    ("images", "lengths", "types", "match"),
    [
        ([image(2, (1, 4, 4))], [4, 4], None, "cross the end of segment 0"),
        ([image(6, (1, 4, 4))], [8], None, "6..10 of 8"),
        ([image(2, (1, 4, 4)), image(3, (1, 4, 4))], [9], None, "sorted, apart"),
        ([], [4], [0, 2, 2, 0], "video token"),
        ([], [4], [0, 1, 1, 0], "0 images cover 0 tokens, but mm_token_type_ids has 2"),
        ([image(0, (1, 4, 4))], [5], [1, 1, 1, 0, 0], "not all of image type"),
        ([], [4], [0, 0], "2 values for 4 tokens"),
        ([image(0, (1, 1, 4))], [5], None, "multiples of merge"),
    ],
)
def test_rows_that_do_not_add_up_are_refused(
    images: list[ImageSpan], lengths: list[int], types: list[int] | None, match: str
) -> None:
    marks = None if types is None else np.array(types, np.uint8)
    with pytest.raises(InvalidInput, match=match):
        mrope_positions(images, lengths, types=marks)
