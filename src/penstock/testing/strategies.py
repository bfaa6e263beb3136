"""Hypothesis strategies for samples: everything that is allowed, including most of what is unlikely.

They draw one-token samples, prefixes shared between samples, NaNs of any payload, negative zeros, ids up to 2**32 - 1,
columns that are absent, given once or given per token, routed experts and images. Use them to test what you build on
Penstock:

    @given(batches())
    def test_my_exporter_keeps_every_token(samples): ...

Columns and their properties are drawn. The values along the tokens come from a drawn seed, because drawing each of them
would be slow and shrink badly. Needs the `hypothesis` package.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from penstock.arrays import MODES, TOKEN_COLUMNS, Array, Cells, Column, ImageSpan, Ragged, Sample, offsets_of

try:
    from hypothesis import strategies as st
except ImportError as error:
    from penstock.extras import missing

    raise missing("penstock.testing.strategies", error) from None

_LARGEST_IDS = (0, 1, 255, 256, 65_535, 65_536, 2**18 - 1, 2**18, 2**32 - 1)
_STRANGE = (0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FC0BEEF, 0xFFFFFFFF, 0x80000000)
_LOGPROBS = ("logprobs", "teacher_logprobs")
_FLOATS = tuple(name for name, column in TOKEN_COLUMNS.items() if column.numpy.kind == "f" and not column.trailing)
_OTHERS = ("routed_experts", "images", "weight_versions", "sampling_mask", "teacher_topk", "own")
ROLLOUTS: list[str | dict[str, Any]] = ["", "", {"metrics": {"format": 0.5, "數": None}}, {"seconds": 1.5}]
_OPTIONAL = (*_FLOATS, *_FLOATS, *_OTHERS)  # floats twice as often
OWN_COLUMNS = (
    Column("token_halves", dtype="float16", fill=0.5, pad=-1.0),
    Column("token_longs", dtype="int64", fill=-1),
    Column("token_flags", dtype="bool", fill=True, pad=False),
    Column("token_bytes", dtype="int8"),
    Column("sample_doubles", dtype="float64", per="sample", fill=math.nan),
    Column("sample_words", dtype="uint64", per="sample", fill=2**64 - 1),
    Column("either_shorts", dtype="uint16", per="either", fill=7),
    Column("row_singles", dtype="float32", trailing=1),
    Column("row_longs", dtype="uint32", trailing=2, fill=3),
    Column("row_bytes", dtype="uint8", trailing=2),
    Column("list_shorts", dtype="int16", ragged=True),
    Column("list_doubles", dtype="float64", ragged=True),
)
"""Columns of a run's own, one of every shape and of many dtypes. Rows have the shapes [2] and [2, 3]."""


def texts(*, min_size: int = 0) -> st.SearchStrategy[str]:
    """Any string that may name something: no control characters, no lone surrogates."""
    return st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=min_size, max_size=8)


def lengths(most: int = 80) -> st.SearchStrategy[int]:
    """Token counts, short ones first; often 1, and around 32, the length from which prefixes are shared."""
    return st.one_of(st.just(1), st.integers(1, 5), st.integers(30, 36), st.integers(1, most))


def generators() -> st.SearchStrategy[Generator]:
    """Seeded generators to fill arrays from."""
    return st.integers(0, 2**32 - 1).map(np.random.default_rng)


@st.composite
def token_ids(draw: st.DrawFn, count: int) -> NDArray[np.uint32]:
    """[count] ids of a vocabulary of any size, sometimes with a long run."""
    top, rng = draw(st.sampled_from(_LARGEST_IDS)), draw(generators())
    ids = rng.integers(0, top, count, np.uint32, endpoint=True)
    ids[rng.integers(count)] = top
    if draw(st.booleans()):
        ids[rng.integers(count) :] = top
    return ids


@st.composite
def loss_masks(draw: st.DrawFn, count: int) -> NDArray[np.bool_]:
    """[count] nothing, everything after a prompt, or scattered; never the first token."""
    kind, rng = draw(st.sampled_from(["none", "completion", "scattered"])), draw(generators())
    mask = np.zeros(count, np.bool_)
    if kind == "completion":
        mask[rng.integers(count) :] = True
    elif kind == "scattered":
        mask[:] = rng.random(count) < 0.5
    mask[0] = False
    return mask


@st.composite
def floats(draw: st.DrawFn, name: str, mask: NDArray[np.bool_]) -> Array:
    """Values that the column allows for tokens with this mask: [T], or one number if the column may have one.

    Few distinct values, or all the same; negative zeros, and any NaN where the column allows it.
    """
    column, rng = TOKEN_COLUMNS[name], draw(generators())
    form = draw(st.sampled_from(["once", "constant", "mixed", "mixed", "zero where untrained"]))
    once = form == "once" and column.per == "either"
    pool = _pool(column, draw(_number(column)))
    out = pool[rng.integers(0, len(pool), 1 if once else len(mask))]
    if form == "constant":
        out[:] = pool[-1]
    if form == "zero where untrained" and name in _LOGPROBS:
        out[~mask] = 0.0  # as samplers record them
    elif column.nan != "no":
        # Written as bits: a float that passes through Python loses the signalling bit of its NaN.
        free = np.ones(len(out), np.bool_) if column.nan == "yes" else ~mask
        free &= rng.random(len(out)) < 0.5
        out.view(np.uint32)[free] = rng.choice(np.array(_STRANGE, np.uint32), int(free.sum()))
    return out.reshape(()) if once else out


def _number(column: Column) -> st.SearchStrategy[float]:
    smallest, largest = _range(column)
    return st.floats(smallest, largest, width=32, exclude_min=column.above == 0.0)


def _pool(column: Column, drawn: float) -> NDArray[np.float32]:
    smallest, largest = _range(column)
    tiny = float(np.finfo(np.float32).smallest_subnormal)
    edges = [tiny, 1.0, largest] if column.above == 0.0 else [-0.0, 0.0, -1.5, -tiny, smallest, largest]
    return np.array([*edges, drawn], np.float32)


def _range(column: Column) -> tuple[float, float]:
    # Columns bounded above (log-probabilities) have 0 as their largest value, positive ones 0 as their exclusive least.
    top = float(np.finfo(np.float32).max)
    return (0.0 if column.above == 0.0 else -top), (0.0 if math.isfinite(column.at_most) else top)


@st.composite
def routed_experts(draw: st.DrawFn, count: int, shape: tuple[int, int] = (2, 3)) -> Array:
    """[count, layers, top_k] uint8 or uint16."""
    dtype: type[Any] = draw(st.sampled_from([np.uint8, np.uint16]))
    top = draw(st.sampled_from([0, 7, 127, np.iinfo(dtype).max]))
    return draw(generators()).integers(0, top, (count, *shape), dtype, endpoint=True)


@st.composite
def sampling_masks(draw: st.DrawFn, ids: NDArray[np.uint32], mask: NDArray[np.bool_]) -> Ragged:
    """A set of ids for each token, or for each trained one: empty, its own id alone, or its own among a few dozen."""
    rng, most = draw(generators()), draw(st.sampled_from([0, 1, 4, 40]))
    top = draw(st.sampled_from(_LARGEST_IDS))
    sizes = rng.integers(0, most, len(ids), endpoint=True) * (mask if draw(st.booleans()) else 1)
    return Ragged.of_lists(
        [
            [] if n == 0 else sorted({int(one), *rng.integers(0, top, int(n) - 1, endpoint=True).tolist()})
            for one, n in zip(ids.tolist(), sizes, strict=True)
        ],
        np.uint32,
    )


@st.composite
def teacher_topk(draw: st.DrawFn, mask: NDArray[np.bool_], k: int = 3) -> dict[str, Array]:
    """A teacher's k ids and log-probabilities: rows for all tokens, or zeros for tokens that are not trained."""
    rng, top = draw(generators()), draw(st.sampled_from(_LARGEST_IDS))
    rows = mask[:, None] if draw(st.booleans()) else np.ones((len(mask), 1), np.bool_)
    ids = rng.integers(0, top, (len(mask), k), np.uint32, endpoint=True)
    logprobs = -rng.exponential(1, (len(mask), k)).astype(np.float32)
    return {"teacher_topk_ids": ids * rows, "teacher_topk_logprobs": np.where(rows, logprobs, np.float32(0))}


def values_of(rng: Generator, column: Column, count: int) -> Cells:
    """Make values for a sample of `count` tokens, among them the extremes of the dtype, and NaN."""
    if column.ragged:
        lengths = rng.integers(0, 4, count) * (rng.random(count) < 0.7)
        return Ragged(_numbers(rng, column, (int(lengths.sum()),)), offsets_of(lengths))
    if column.per == "sample" or (column.per == "either" and rng.random() < 0.5):
        return _numbers(rng, column, ())
    values = _numbers(rng, column, (count, *(2, 3)[: column.trailing]))
    if count > 2 and rng.random() < 0.3:
        values[rng.integers(count) :] = values[-1]
    return values


def _numbers(rng: Generator, column: Column, shape: tuple[int, ...]) -> Array:
    dtype = column.numpy
    if dtype.kind == "b":
        return np.asarray(rng.random(shape) < 0.5)
    info: Any = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    pool = [0, 1, 2, info.min, info.max] + ([math.nan, -0.0, 0.25, -math.inf] if dtype.kind == "f" else [])
    return np.asarray(np.array(pool, dtype)[rng.integers(0, len(pool), shape)])


@st.composite
def own_columns(draw: st.DrawFn, count: int) -> dict[Column, Cells]:
    """Some of `OWN_COLUMNS`."""
    rng, chosen = draw(generators()), draw(st.sets(st.sampled_from(OWN_COLUMNS), min_size=1))
    return {column: values_of(rng, column, count) for column in OWN_COLUMNS if column in chosen}


@st.composite
def image_spans(draw: st.DrawFn, count: int) -> tuple[list[ImageSpan], NDArray[np.uint8]]:
    """Images that fit into `count` tokens, in order and without overlap, and the matching token types."""
    rng = draw(generators())
    spans: list[ImageSpan] = []
    types = np.zeros(count, np.uint8)
    at = int(rng.integers(4))
    while True:
        high, wide, merge = rng.integers(1, 4, 3).tolist()
        if at + high * wide > count:
            return spans, types
        grid = (1, high * merge, wide * merge)
        spans.append(ImageSpan(hash=rng.bytes(32).hex(), grid=grid, offset=at, length=high * wide, merge=merge))
        types[at : at + high * wide] = 1
        at += high * wide + int(rng.integers(9))


@st.composite
def samples(draw: st.DrawFn, prefix: NDArray[np.uint32] | None = None, name: str | None = None) -> Sample:
    """One valid sample. Its tokens begin with `prefix` if one is given."""
    start = np.zeros(0, np.uint32) if prefix is None else prefix
    ids = np.concatenate([start, draw(token_ids(draw(lengths())))])
    mask = draw(loss_masks(len(ids)))
    columns: dict[str, Any] = {}
    for present in sorted(draw(st.sets(st.sampled_from(_OPTIONAL), max_size=6))):
        if present == "routed_experts":
            columns[present] = draw(routed_experts(len(ids)))
        elif present == "images":
            columns["images"], columns["mm_token_type_ids"] = draw(image_spans(len(ids)))
        elif present == "sampling_mask":
            columns[present] = draw(sampling_masks(ids, mask))
        elif present == "teacher_topk":
            columns |= draw(teacher_topk(mask))
        elif present == "own":
            columns["columns"] = draw(own_columns(len(ids)))
        elif present == "weight_versions":
            columns[present] = draw(generators()).integers(0, 2**31 - 1, len(ids), np.int32, endpoint=True)
        else:
            columns[present] = draw(floats(present, mask))
    return Sample(
        id=draw(texts(min_size=1)) if name is None else name,
        group=draw(texts()),
        prompt=draw(st.sampled_from(["", "", "17", "數 17"])),
        rollout=draw(st.sampled_from(ROLLOUTS)),
        env=draw(st.sampled_from(["", "math", "Zürich 数学"])),
        run=draw(st.sampled_from(["", "run-1"])),
        mode=draw(st.sampled_from(MODES)),
        policy_version=draw(st.sampled_from([None, 0, 3, 2**40, 2**53])),
        token_ids=ids,
        loss_mask=mask,
        **columns,
    )


@st.composite
def batches(draw: st.DrawFn, most: int = 5) -> list[Sample]:
    """Zero to `most` samples with distinct ids. Some share a prefix with an earlier one."""
    made: list[Sample] = []
    for i in range(draw(st.integers(0, most))):
        prefix = None
        begins_alike: bool = draw(st.booleans())
        if made and begins_alike:
            earlier = draw(st.sampled_from(made)).token_ids
            prefix = earlier[: draw(st.integers(0, len(earlier)))]
        made.append(draw(samples(prefix=prefix, name=f"{i}{draw(texts())}")))
    return made
