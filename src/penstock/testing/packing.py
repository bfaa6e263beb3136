"""Hypothesis strategies for packing: batches of every kind, and settings that fit them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

try:
    from hypothesis import strategies as st
except ImportError as error:
    from penstock.extras import missing

    raise missing("penstock.testing.packing", error) from None

from penstock.arrays import ImageSpan, Sample
from penstock.pack import Cost, Packing


@st.composite
def packable(draw: st.DrawFn, most: int = 24, *, advantages: bool | None = None) -> list[Sample]:
    """Samples of several runs, modes and modalities, short and long, with and without optional columns.

    Advantages are in all of them or in none, since packing asks for that; by default drawn.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    runs = draw(st.integers(1, 3))
    longest = draw(st.sampled_from([1, 3, 20, 60]))
    has_images, has_routing, has_modes = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    optional = draw(st.sets(st.sampled_from(["rewards", "temperatures", "ce_weights", "teacher", "sampling_mask"])))
    has_advantages = draw(st.booleans()) if advantages is None else advantages
    out = []
    for i in range(draw(st.integers(0, most))):
        length = int(rng.integers(1, longest + 1))
        ids = rng.integers(1, 1000, length)
        columns: dict[str, Any] = {"logprobs": -rng.random(length)}
        if has_advantages:
            columns.update(_optional("advantages", rng, length))
        for name in sorted(optional):
            if rng.random() < 0.5:
                columns.update(_optional(name, rng, length) if name != "sampling_mask" else _kept(rng, ids))
        if has_routing and rng.random() < 0.4:
            columns["routed_experts"] = rng.integers(0, 9, (length, 2, 2), np.uint8)
        if has_images and rng.random() < 0.4:
            columns.update(_images(rng, length))
        out.append(
            Sample(
                id=f"s{i}",
                token_ids=ids,
                loss_mask=(rng.random(length) < 0.6) & (np.arange(length) > 0),
                group=["", "g0", "g1"][int(rng.integers(3))],
                run=f"run{rng.integers(runs)}",
                mode=["rl", "sft"][int(has_modes and rng.random() < 0.5)],
                **columns,
            )
        )
    return out


def _optional(name: str, rng: np.random.Generator, length: int) -> dict[str, Any]:
    if name == "teacher":
        return {"teacher_logprobs": -rng.random(length)}
    if name == "ce_weights":
        return {name: (rng.random(length) < 0.5).astype(np.float32)}
    per_token = rng.random() < 0.5
    return {name: rng.random(length) + 0.5 if per_token else float(rng.random() + 0.5)}


def _kept(rng: np.random.Generator, ids: NDArray[np.int64]) -> dict[str, Any]:
    """A set for most tokens, of one id to four."""
    sets = [[] if rng.random() < 0.3 else sorted({one, *rng.integers(0, 1000, 3).tolist()}) for one in ids.tolist()]
    return {"sampling_mask": sets}


def _images(rng: np.random.Generator, length: int) -> dict[str, Any]:
    """One or two images of four placeholders each, where they fit, and their token types."""
    spans: list[ImageSpan] = []
    at = int(rng.integers(0, 4))
    types = np.zeros(length, np.uint8)
    while at + 4 <= length and len(spans) < 2:
        digest = f"{int(rng.integers(2**60)):064x}"
        spans.append(ImageSpan(hash=digest, grid=(1, 4, 4), offset=at, length=4))
        types[at : at + 4] = 1
        at += 4 + int(rng.integers(0, 10))
    return {"images": spans, "mm_token_type_ids": types} if spans else {}


@st.composite
def packings(draw: st.DrawFn) -> Packing:
    """Settings: few and many ranks, tight and roomy caps, with and without the other limits."""
    seq_len = draw(st.sampled_from([8, 30, 64]))
    multiple = draw(st.sampled_from([1, 4, 8]))
    return Packing(
        ranks=draw(st.sampled_from([1, 2, 3, 8])),
        seq_len=seq_len,
        micro_batch_max_tokens=draw(st.sampled_from([None, 8, 24, 2 * seq_len])),
        pad_to_multiple_of=multiple,
        max_samples=draw(st.sampled_from([None, 1, 3])),
        max_patches=draw(st.sampled_from([None, 16, 40])),
        cost=Cost(
            overhead=draw(st.sampled_from([0.0, 50.0])),
            per_token=draw(st.sampled_from([1.0, 100.0])),
            per_patch=draw(st.sampled_from([0.0, 5.0])),
        ),
        rows_by=draw(st.sampled_from(["modality", "run"])),
        pad_id=draw(st.sampled_from([0, 7])),
        long_rows=True,
    )
