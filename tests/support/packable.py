"""Hypothesis strategies for planners: batches of every kind, samples that share prefixes, settings that fit them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.arrays import ImageSpan, Sample
from penstock.packing import Cost, PackedImages, Packing
from penstock.testing.strategies import OWN_COLUMNS, values_of


@st.composite
def packable(draw: st.DrawFn, most: int = 24, *, advantages: bool | None = None) -> list[Sample]:
    """Samples of several tenants, modes and modalities, short and long, with and without optional columns.

    Advantages are in all samples or in none, because packing requires that; None draws which.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    runs = draw(st.integers(1, 3))
    longest = draw(st.sampled_from([1, 3, 20, 60]))
    has_images, has_routing, has_modes = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    optional = draw(st.sets(st.sampled_from(["rewards", "temperatures", "ce_weights", "teacher", "sampling_mask"])))
    own = [column for column in OWN_COLUMNS if draw(st.booleans())] if draw(st.booleans()) else []
    has_topk = draw(st.booleans())
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
        if has_topk and rng.random() < 0.5:
            columns["teacher_topk_ids"] = rng.integers(0, 1000, (length, 2))
            columns["teacher_topk_logprobs"] = -rng.random((length, 2))
        columns["columns"] = {column: values_of(rng, column, length) for column in own if rng.random() < 0.5}
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
    """Sets of one to four ids, for most tokens."""
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
def packings(draw: st.DrawFn, lengths: tuple[int, ...] = (8, 30, 64)) -> Packing:
    """Settings: few and many ranks, tight and roomy caps, with and without the other limits."""
    seq_len = draw(st.sampled_from(lengths))
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
        rows_by=draw(st.sampled_from(["modality", "tenant"])),
        columns=OWN_COLUMNS,
        pad_id=draw(st.sampled_from([0, 7])),
        long_rows=True,
    )


@st.composite
def branching(draw: st.DrawFn, most_groups: int = 4, most: int = 6) -> list[Sample]:
    """Groups whose samples branch from each other at any depth, with columns that agree and columns that differ.

    The order of samples is sometimes shuffled, so that a planner cannot rely on it.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    routed, imaged, moded = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    optional = draw(st.sets(st.sampled_from(["rewards", "temperatures", "ce_weights", "teacher", "sampling_mask"])))
    out: list[Sample] = []
    for g in range(int(rng.integers(1, most_groups + 1))):
        spans = _images(rng, 24) if imaged and rng.random() < 0.5 else {}
        group: list[Sample] = []
        for _ in range(int(rng.integers(1, most + 1))):
            kept = group[int(rng.integers(len(group)))] if group and rng.random() < 0.9 else None
            at = int(kept.num_tokens * min(rng.random() * 1.4, 1.0)) if kept is not None else 0
            length = max(at + int(rng.integers(0, 110)) * int(rng.random() < 0.8), 24 if spans else 1)
            group.append(_branch(rng, kept, at, length, spans, routed=routed, names=sorted(optional)))
        for i, sample in enumerate(group):
            mode = ["rl", "sft"][int(moded and rng.random() < 0.5)]
            out.append(sample.replace(id=f"{g}/{i}", group=f"g{g}", mode=mode))
    order = rng.permutation(len(out)).tolist() if draw(st.booleans()) else range(len(out))
    return [out[i] for i in order]


def _branch(
    rng: np.random.Generator,
    kept: Sample | None,
    at: int,
    length: int,
    spans: dict[str, Any],
    *,
    routed: bool,
    names: list[str],
) -> Sample:
    """A sample that repeats the first `at` tokens of another, sometimes with other experts or another image."""
    ids = rng.integers(1, 5, length)
    experts = rng.integers(0, 9, (length, 2, 2), np.uint8)
    if kept is not None:
        ids[:at] = kept["token_ids"][:at]
        if routed:
            experts[:at] = kept["routed_experts"][:at]
            if at and rng.random() < 0.3:
                experts[int(rng.integers(at))] += 1
    columns: dict[str, Any] = {"logprobs": -rng.random(length), "advantages": float(rng.normal())}
    for name in names:
        if name == "sampling_mask":
            columns.update(_kept(rng, ids))
        else:
            columns.update(_optional(name, rng, length))
    if routed:
        columns["routed_experts"] = experts
    if spans:
        images = spans["images"] if rng.random() < 0.8 else _images(rng, 24).get("images", spans["images"])
        types = np.zeros(length, np.uint8)
        for span in images:
            types[span.offset : span.end] = 1
        columns |= {"images": images, "mm_token_type_ids": types}
    return Sample(token_ids=ids, loss_mask=(rng.random(length) < 0.6) & (np.arange(length) > 0), **columns)


def tree_packings() -> st.SearchStrategy[Packing]:
    """Settings for samples that branch: samples with images may share a micro-batch, and trees are on."""
    together = PackedImages(explicit_boundaries=True, varlen_attention=True)
    return packings((64, 150, 400)).map(lambda made: replace(made, trees=True, packed_images=together))
