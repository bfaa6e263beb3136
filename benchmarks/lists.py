"""Columns of many numbers per token against plain arrays and lists: sampling masks and the k best ids of a teacher.

What a column costs is the difference between a frame with it and one without it.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks import data
from benchmarks.report import Row, best, smaller
from penstock.arrays import Ragged, Sample, Samples, offsets_of
from penstock.arrays.columns import Array
from penstock.arrays.ragged import arrays_in
from penstock.frames import decode, encode

KEPT_IDS = 8
"""Per sampled token, on average."""
K = 64
_SHARE_OF_MEMCPY = 0.25


def rows(rng: np.random.Generator, progress: Callable[[str], None], repeats: int) -> list[Row]:
    progress("making sampling masks")
    plain = [data.sample(rng, data.text(rng, 500), 4_000, f"p{i}/0") for i in range(128)]
    kept = [sample.replace(sampling_mask=kept_sets(rng, sample)) for sample in plain]
    found = _measure(f"sampling mask, {KEPT_IDS} ids a token", plain, kept, ("sampling_mask",), 2.6, 2.2, repeats)
    progress("making the k best ids of a teacher")
    short = plain[:16]
    taught = [sample.replace(**teacher(rng, sample)) for sample in short]
    names = ("teacher_topk_ids", "teacher_topk_logprobs")
    return found + _measure(f"teacher, {K} ids a token", short, taught, names, 6.5, None, repeats)


def kept_sets(rng: np.random.Generator, sample: Sample) -> Ragged:
    """For each sampled token a set of ids, ascending, with its own among them; geometric sizes, uniform ids."""
    counts = np.where(sample.loss_mask, rng.geometric(1 / KEPT_IDS, sample.num_tokens), 0)
    starts = offsets_of(counts)[:-1][counts > 0]
    ids = rng.integers(0, data.VOCABULARY, int(counts.sum()), np.uint64)
    ids[starts] = sample.token_ids[counts > 0]
    keys = np.unique(np.repeat(np.arange(len(counts), dtype=np.uint64), counts) << np.uint64(32) | ids)
    lengths = np.bincount((keys >> np.uint64(32)).astype(np.int64), minlength=len(counts))
    return Ragged(keys.astype(np.uint32), offsets_of(lengths))


def teacher(rng: np.random.Generator, sample: Sample) -> dict[str, Array]:
    """Ids and log-probabilities for the sampled tokens, zeros elsewhere."""
    on: NDArray[np.bool_] = sample.loss_mask[:, None]
    shape = (sample.num_tokens, K)
    ids = rng.integers(0, data.VOCABULARY, shape, np.uint32)
    logprobs = -np.sort(rng.exponential(3, shape).astype(np.float32), axis=1)
    return {"teacher_topk_ids": ids * on, "teacher_topk_logprobs": np.where(on, logprobs, np.float32(0))}


def _measure(
    name: str,
    without: list[Sample],
    given: list[Sample],
    columns: tuple[str, ...],
    fast: float,
    small: float | None,
    repeats: int,
) -> list[Row]:
    base, batch = Samples.of(without), Samples.of(given)
    parts = [array for column in columns for array in arrays_in(batch[column].values)]
    trained = int(batch.loss_tokens.sum())
    count = len(parts[0]) if len(columns) == 1 else trained * K
    unit = "B/id" if len(columns) == 1 else "B/pair"
    raw = sum(array.nbytes for array in parts) / count
    listed = sum(len(msgspec.msgpack.encode(sample[column].tolist())) for sample in given for column in columns) / count
    sizes = {
        profile: (len(encode(batch, profile)) - len(encode(base, profile))) / count for profile in ("fast", "small")
    }
    assert all(decode(encode(batch, profile)) == batch for profile in ("fast", "small"))
    return [
        smaller(f"{name}, fast", sizes["fast"], raw, "plain arrays", unit=unit, at_most=fast),
        smaller(f"{name}, fast", sizes["fast"], listed, "msgpack lists", unit=unit),
        smaller(f"{name}, small", sizes["small"], raw, "plain arrays", unit=unit, at_most=small),
        *_speed(name, base, batch, parts, repeats),
    ]


def _speed(name: str, base: Samples, batch: Samples, parts: list[Array], repeats: int) -> list[Row]:
    frames = encode(base), encode(batch)
    joined = np.concatenate([array.reshape(-1).view(np.uint8) for array in parts])
    encode_base, encode_all, decode_base, decode_all, copied = best(
        lambda: encode(base),
        lambda: encode(batch),
        lambda: decode(frames[0]),
        lambda: decode(frames[1]),
        joined.tobytes,  # into fresh memory, as encoding and decoding must
        repeats=repeats,
    )
    return [
        _against_memcpy(f"{name}, {what} fast", seconds, joined.nbytes, copied)
        for what, seconds in (("encode", encode_all - encode_base), ("decode", decode_all - decode_base))
    ]


def _against_memcpy(name: str, seconds: float, num_bytes: int, copied_s: float) -> Row:
    return Row(
        name=name,
        ours=num_bytes / seconds / 1e9,
        rival=num_bytes / copied_s / 1e9,
        rival_name="memcpy of the arrays",
        ratio=copied_s / seconds,
        unit="GB/s",
        target=_SHARE_OF_MEMCPY * num_bytes / copied_s / 1e9,
        bound="min",
        note=f"of the plain arrays; the target is {_SHARE_OF_MEMCPY:g} of memcpy",
    )
