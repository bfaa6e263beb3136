"""Frames against the wire formats in use elsewhere: bytes, and time to encode and decode."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks import baselines, data, held, lists, to_tensors
from benchmarks.report import Row, best, faster, smaller
from penstock.arrays import Sample, Samples
from penstock.frames import decode, encode

MEMCPY_GB_S = 5.0
"""The machine speed that the target for encoding is stated at."""


def run(*, full: bool, progress: Callable[[str], None]) -> list[Row]:
    rng = np.random.default_rng(7)
    rows: list[Row] = []
    progress("making a 30,000-token sample and a group of 16")
    rows += _sizes("30k-token sample", data.long_sample(rng), fast=128_000, small=108_000)
    rows += _sizes("group of 16 x (15k shared + 15k)", data.long_group(rng), fast=1_560_000, small=1_120_000)
    progress("making multi-turn rollouts")
    turns = data.turns_as_samples(rng, rollouts=32 if full else 8)
    rows += _sizes("every turn its own sample, per token", turns, fast=1.0, small=0.6, per_token=True)
    progress("making a step of 512 samples")
    samples = data.step_of_groups(rng)
    rows += _speed(samples, progress, repeats=15 if full else 5)
    packed = baselines.encode_byte_arrays(baselines.as_lists(samples))
    rows += to_tensors.rows(encode(samples), packed, progress, repeats=5 if full else 3)
    rows += lists.rows(rng, progress, repeats=15 if full else 5)
    progress("holding long rollouts")
    rows += held.rows()
    return rows


def _sizes(name: str, samples: list[Sample], *, fast: float, small: float, per_token: bool = False) -> list[Row]:
    lists = baselines.as_lists(samples)
    by = sum(s.num_tokens for s in samples) if per_token else 1
    unit = "B/token" if per_token else "B"
    arrays = len(baselines.encode_byte_arrays(lists)) / by
    plain = len(baselines.encode_lists(lists)) / by
    sizes = {profile: len(encode(samples, profile)) / by for profile in ("fast", "small")}
    assert all(decode(encode(samples, profile)) == Samples.of(samples) for profile in ("fast", "small"))
    return [
        smaller(f"{name}, fast", sizes["fast"], arrays, "byte arrays", unit=unit, at_most=fast),
        smaller(f"{name}, small", sizes["small"], arrays, "byte arrays", unit=unit, at_most=small),
        smaller(f"{name}, fast", sizes["fast"], plain, "lists", unit=unit),
    ]


def _speed(samples: list[Sample], progress: Callable[[str], None], repeats: int) -> list[Row]:
    batch = Samples.of(samples)
    lists = baselines.as_lists(samples)
    frames = {"fast": encode(batch), "small": encode(batch, "small")}
    packed, plain = baselines.encode_byte_arrays(lists), baselines.encode_lists(lists)
    canonical = np.concatenate([c.values.view(np.uint8).reshape(-1) for c in batch.columns.values()])
    progress(f"encoding {batch.num_tokens:,} tokens")
    ours, from_list, small, arrays, listed, copied = best(
        lambda: encode(batch),
        lambda: encode(samples),
        lambda: encode(batch, "small"),
        lambda: baselines.encode_byte_arrays(lists),
        lambda: baselines.encode_lists(lists),
        canonical.tobytes,  # into fresh memory, as encoding must
        repeats=repeats,
    )
    progress("decoding")
    back, back_small, back_arrays, back_lists = best(
        lambda: decode(frames["fast"]),
        lambda: decode(frames["small"]),
        lambda: baselines.decode_byte_arrays(packed),
        lambda: baselines.decode_lists(plain),
        repeats=repeats,
    )
    return [
        smaller(
            "step of 512 samples, fast, per token",
            len(frames["fast"]) / batch.num_tokens,
            len(packed) / batch.num_tokens,
            "byte arrays",
            unit="B/token",
            at_most=5.0,
        ),
        _against_memcpy(batch.num_tokens, ours, canonical.nbytes, copied),
        faster("encode fast, from columns", ours, arrays, "byte arrays"),
        faster("encode fast, from columns", ours, listed, "lists"),
        faster("encode fast, from Sample objects", from_list, arrays, "byte arrays"),
        faster("encode small, from columns", small, arrays, "byte arrays"),
        faster("decode fast", back, back_arrays, "byte arrays"),
        faster("decode fast", back, back_lists, "lists"),
        faster("decode small", back_small, back_arrays, "byte arrays"),
    ]


def _against_memcpy(tokens: int, ours_s: float, num_bytes: int, copied_s: float) -> Row:
    """The speed of encoding beside that of copying the same columns into fresh memory."""
    memcpy = num_bytes / copied_s / 1e9
    return Row(
        name="encode fast",
        ours=tokens / ours_s / 1e6,
        rival=tokens / copied_s / 1e6,
        rival_name="memcpy of the columns",
        ratio=copied_s / ours_s,
        unit="Mtok/s",
        target=150 * min(1.0, memcpy / MEMCPY_GB_S),
        bound="min",
        note=f"memcpy does {memcpy:.1f} GB/s here; the target is 150 Mtok/s where it does {MEMCPY_GB_S:g} or more",
    )
