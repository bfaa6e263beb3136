"""Spans built from stored images always pass the sample's own check; a span that is off by anything never does."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.arrays import TOKEN_COLUMNS, ImageSpan, Ragged, Sample, Samples
from penstock.assets import QWEN2_5_VL, QWEN3_VL, ImageRef, Layout, span
from penstock.capture import Turn
from penstock.errors import CorruptFrame, InvalidInput
from penstock.frames import decode, encode

SPAN = ImageSpan(hash="0" * 64, grid=(1, 4, 4), offset=2, length=4)

sizes = st.tuples(st.integers(8, 900), st.integers(8, 900))
# Text tokens before each image, then the image; adjacent images have none between them.
pieces = st.lists(st.tuples(st.integers(0, 4), sizes), min_size=1, max_size=4)


def placed(parts: list[tuple[int, tuple[int, int]]], layout: Layout) -> tuple[list[ImageSpan], list[int]]:
    spans, types = [], [0]
    for i, (text, (width, height)) in enumerate(parts):
        types += [0] * text
        ref = ImageRef(hash=f"{i:064x}", media_type="image/png", width=width, height=height, num_bytes=1)
        spans.append(span(ref, layout, offset=len(types)))
        types += [1] * spans[-1].length
    return spans, [*types, 0]


@settings(max_examples=100)
@given(pieces, st.sampled_from([QWEN2_5_VL, QWEN3_VL]))
def test_spans_from_references_make_a_sample(parts: list[tuple[int, tuple[int, int]]], layout: Layout) -> None:
    spans, types = placed(parts, layout)
    sample = Sample(token_ids=np.ones(len(types), np.uint32), mm_token_type_ids=types, images=spans)
    assert sample.images == tuple(spans)
    assert sum(s.length for s in spans) == sum(types)


@settings(max_examples=100)
@given(pieces, st.data())
def test_a_span_off_by_anything_is_refused(parts: list[tuple[int, tuple[int, int]]], data: st.DataObject) -> None:
    spans, types = placed(parts, QWEN3_VL)
    i = data.draw(st.integers(0, len(spans) - 1))
    good = spans[i]
    t, h, w = good.grid
    bad: dict[str, Any] = data.draw(
        st.sampled_from(
            [
                {"offset": good.offset + 1},
                {"offset": good.offset - 1},
                {"offset": -1},
                {"length": good.length + 1},
                {"length": 0},
                {"grid": (t, h, w + 2)},
                {"grid": (0, h, w)},
                {"merge": 1},
                {"hash": good.hash[:-1]},
                {"hash": good.hash[:-1] + "G"},
            ]
        )
    )
    wrong = [*spans[:i], msgspec.structs.replace(good, **bad), *spans[i + 1 :]]
    dropped, doubled = [*spans[:i], *spans[i + 1 :]], [*spans[: i + 1], good, *spans[i + 1 :]]
    for images in (wrong, dropped, doubled):
        with pytest.raises(InvalidInput, match="images"):
            Sample(token_ids=np.ones(len(types), np.uint32), mm_token_type_ids=types, images=images)


def test_a_sample_takes_the_types_of_its_images_from_their_spans() -> None:
    made = Sample(token_ids=range(8), images=[SPAN])
    assert made["mm_token_type_ids"].tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    assert list(made.columns) == [name for name in TOKEN_COLUMNS if name in made.columns]


@pytest.mark.parametrize("make", [Sample, Turn], ids=["sample", "turn"])
@pytest.mark.parametrize(
    ("types", "images", "message"),
    [
        ([0, 0, 1, 1, 1, 1, 0, 0], [], "0 images cover 0 tokens, but mm_token_type_ids has 4 image tokens"),
        ([0, 0, 1, 1, 1, 1, 0, 1], [SPAN], "1 images cover 4 tokens, but mm_token_type_ids has 5 image tokens"),
        ([0, 0, 2, 2, 0, 0, 0, 0], [], r"mm_token_type_ids\[2\]: 2, a video token"),
    ],
)
def test_image_tokens_without_images_and_video_tokens_are_refused(
    make: Any, types: list[int], images: list[ImageSpan], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        make(token_ids=range(8), mm_token_type_ids=types, images=images)


def test_a_frame_with_images_without_types_or_with_video_tokens_is_refused() -> None:
    good = Samples.of([Sample(id="a", token_ids=range(8), images=[SPAN])])
    without = {name: column for name, column in good.columns.items() if name != "mm_token_type_ids"}
    bare = Samples(columns=without, text=good.text, policy_versions=good.policy_versions, images=good.images)
    with pytest.raises(CorruptFrame, match="sample 'a': 1 images without mm_token_type_ids"):
        decode(encode(bare))
    video = Ragged(np.array([0, 0, 2, 2, 0, 0, 0, 0], np.uint8), good.offsets)
    columns = {**good.columns, "mm_token_type_ids": video}
    moving = Samples(columns=columns, text=good.text, policy_versions=good.policy_versions)
    with pytest.raises(CorruptFrame, match="a video token"):
        decode(encode(moving))
