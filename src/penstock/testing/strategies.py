"""Hypothesis strategies for samples: everything that is allowed, and most of what is unlikely.

They draw one-token samples, prefixes shared between samples, NaNs of any payload, negative zeros, ids up to
2**32 - 1, columns that are absent, given once or given per token, routed experts and images. Use them to test
what you build on Penstock:

    @given(batches())
    def test_my_exporter_keeps_every_token(samples): ...

Needs the `hypothesis` package.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.arrays import MODES, TOKEN_COLUMNS, Column, ImageSpan, Sample
from penstock.arrays.columns import Array

_LARGEST_IDS = (0, 1, 255, 256, 65_535, 65_536, 2**18 - 1, 2**18, 2**32 - 1)
_NANS = (0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FC0BEEF, 0xFFFFFFFF)
_PLAIN_FLOATS = ("temperatures", "advantages", "rewards", "rl_weights", "ce_weights", "ref_kl_weights")
_LOGPROBS = ("logprobs", "teacher_logprobs")


def texts(*, min_size: int = 0) -> st.SearchStrategy[str]:
    """Any string that may name something: no control characters, no lone surrogates."""
    return st.text(st.characters(blacklist_categories=("Cc", "Cs")), min_size=min_size, max_size=12)


def lengths(most: int = 80) -> st.SearchStrategy[int]:
    """Token counts, short ones first; 1 often, and around 32, where prefixes begin to be shared."""
    return st.one_of(st.just(1), st.integers(1, 5), st.integers(30, 36), st.integers(1, most))


@st.composite
def token_ids(draw: st.DrawFn, count: int) -> NDArray[np.uint32]:
    """[count] ids of a vocabulary of any size, sometimes with long runs."""
    top = draw(st.sampled_from(_LARGEST_IDS))
    ids = _filler(draw).integers(0, top, count, np.uint32, endpoint=True)
    ids[draw(st.integers(0, count - 1))] = top
    if draw(st.booleans()):
        ids[draw(st.integers(0, count - 1)) :] = top
    return ids


@st.composite
def loss_masks(draw: st.DrawFn, count: int) -> NDArray[np.bool_]:
    """[count] nothing, everything after a prompt, or scattered; never the first token."""
    kind = draw(st.sampled_from(["none", "completion", "scattered"]))
    mask = np.zeros(count, np.bool_)
    if kind == "completion":
        mask[draw(st.integers(0, count)) :] = True
    elif kind == "scattered":
        mask[:] = _filler(draw).random(count) < 0.5
    mask[0] = False
    return mask


@st.composite
def floats(draw: st.DrawFn, column: Column, count: int, mask: NDArray[np.bool_] | None = None) -> Array:
    """[count] values that the column allows, unlikely bits included; NaNs where `mask` is False if it may."""
    smallest, largest = _range(column)
    number = st.floats(smallest, largest, width=32, allow_nan=False, exclude_min=column.above == 0.0)
    values = np.array(draw(st.lists(number, min_size=1, max_size=4)), np.float32)
    out = values[_filler(draw).integers(0, len(values), count)]
    if draw(st.booleans()):
        out[:] = out[0]
    open_places = np.ones(count, np.bool_) if column.nan == "yes" else ~mask if mask is not None else None
    if column.nan != "no" and open_places is not None and draw(st.booleans()):
        # Written as bits: a float that passes through Python loses the signalling bit of its NaN.
        strange = np.array(draw(st.sampled_from([*_NANS, 0x80000000, 0])), np.uint32)
        out.view(np.uint32)[open_places] = strange
    return out


def _range(column: Column) -> tuple[float, float]:
    top = float(np.finfo(np.float32).max)
    smallest = 0.0 if column.above == 0.0 else -top
    largest = 0.0 if math.isfinite(column.at_most) else top
    return smallest, largest


@st.composite
def routed_experts(draw: st.DrawFn, count: int, shape: tuple[int, int]) -> Array:
    """[count, layers, top_k] uint8 or uint16."""
    dtype: type[Any] = draw(st.sampled_from([np.uint8, np.uint16]))
    top = draw(st.sampled_from([0, 7, 127, np.iinfo(dtype).max]))
    return _filler(draw).integers(0, top, (count, *shape), dtype, endpoint=True)


@st.composite
def image_spans(draw: st.DrawFn, count: int) -> tuple[list[ImageSpan], NDArray[np.uint8]]:
    """Images that fit into `count` tokens, apart and in order, and the token types that go with them."""
    spans: list[ImageSpan] = []
    types = np.zeros(count, np.uint8)
    at = draw(st.integers(0, 3))
    while True:
        high, wide, merge = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
        if at + high * wide > count:
            return spans, types
        digest = f"{draw(st.integers(0, 2**256 - 1)):064x}"
        grid = (1, high * merge, wide * merge)
        spans.append(ImageSpan(hash=digest, grid=grid, offset=at, length=high * wide, merge=merge))
        types[at : at + high * wide] = 1
        at += high * wide + draw(st.integers(0, 8))


@st.composite
def samples(draw: st.DrawFn, prefix: NDArray[np.uint32] | None = None, name: str | None = None) -> Sample:
    """One valid sample; its tokens begin with `prefix` where one is given."""
    start = np.zeros(0, np.uint32) if prefix is None else prefix
    ids = np.concatenate([start, draw(token_ids(draw(lengths())))])
    mask = draw(loss_masks(len(ids)))
    columns: dict[str, Any] = {}
    for column_name in (*_PLAIN_FLOATS, *_LOGPROBS):
        if draw(st.booleans()):
            columns[column_name] = _draw_floats(draw, TOKEN_COLUMNS[column_name], mask)
    if draw(st.integers(0, 3)) == 0:
        columns["routed_experts"] = draw(routed_experts(len(ids), (2, 3)))
    if draw(st.integers(0, 3)) == 0:
        columns["images"], columns["mm_token_type_ids"] = draw(image_spans(len(ids)))
    if draw(st.integers(0, 3)) == 0:
        columns["weight_versions"] = _filler(draw).integers(0, 2**31 - 1, len(ids), np.int32, endpoint=True)
    return Sample(
        id=draw(texts(min_size=1)) if name is None else name,
        group=draw(texts()),
        env=draw(st.sampled_from(["", "math", "Zürich 数学"])),
        run=draw(st.sampled_from(["", "run-1"])),
        mode=draw(st.sampled_from(MODES)),
        policy_version=draw(st.sampled_from([0, 3, 2**40, 2**63 - 1])),
        token_ids=ids,
        loss_mask=mask,
        **columns,
    )


def _draw_floats(draw: st.DrawFn, column: Column, mask: NDArray[np.bool_]) -> Any:
    if column.per == "either" and draw(st.booleans()):
        return draw(floats(column, 1))[0]
    values = draw(floats(column, len(mask), mask))
    if column.name in _LOGPROBS and draw(st.booleans()):
        values[~mask] = 0.0  # as samplers record them
    return values


@st.composite
def batches(draw: st.DrawFn, most: int = 5) -> list[Sample]:
    """From no sample to `most`, with distinct ids; some begin as an earlier one does."""
    made: list[Sample] = []
    for i in range(draw(st.integers(0, most))):
        prefix = None
        begins_alike: bool = draw(st.booleans())
        if made and begins_alike:
            earlier = draw(st.sampled_from(made)).token_ids
            prefix = earlier[: draw(st.integers(0, len(earlier)))]
        made.append(draw(samples(prefix=prefix, name=f"{i}{draw(texts())}")))
    return made


def _filler(draw: st.DrawFn) -> np.random.Generator:
    """Bulk values from a drawn seed: drawing every one of them would be slow and shrink badly."""
    return np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
