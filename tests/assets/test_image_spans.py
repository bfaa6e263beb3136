"""Spans built from stored images always pass the sample's own check; a span that is off by anything never does."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.arrays import ImageSpan, Sample
from penstock.assets import QWEN2_5_VL, QWEN3_VL, ImageRef, Layout, span
from penstock.errors import InvalidInput

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
