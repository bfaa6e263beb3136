"""Plain references for what happens before a plane: rollouts become samples, samples bytes, images patches.

They do in lists and loops what `arrays`, `frames`, `convert`, `assets` and `train.vision` do with numpy: slow, and
short enough to check by eye. Every fast path has a property test against the function of its name here. Each follows
the written rule as directly as it can and shares nothing with the fast path: sequences are compared token by token,
every sample has its own copy, advantages are computed term by term.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import Cells, ImageSpan, Ragged, Sample
from penstock.assets import Layout

# ------------------------------------------------------------------ samples and bytes


Item = TypeVar("Item")


def runs(values: Iterable[Item]) -> list[tuple[Item, int]]:
    """Return (value, length) of each run of equal values.

    >>> runs([7, 7, 7, 2])
    [(7, 3), (2, 1)]
    """
    return [(value, len(list(group))) for value, group in groupby(values)]


def pack_uints(values: Sequence[int], low_bits: int, high_bits: int) -> tuple[bytes, bytes]:
    """Return (low plane, high plane): low bits byte by byte, high bits packed from the lowest bit of each byte up.

    >>> pack_uints([0x10203, 0x20405], 16, 2)
    (b'\\x03\\x02\\x05\\x04', b'\\t')
    """
    low = b"".join((value & ((1 << low_bits) - 1)).to_bytes(low_bits // 8, "little") for value in values)
    packed = 0
    for i, value in enumerate(values):
        packed |= (value >> low_bits) << (i * high_bits)
    return low, packed.to_bytes(-(-len(values) * high_bits // 8), "little")


def byte_planes(values: Sequence[int], size: int) -> list[bytes]:
    """Return all lowest bytes, then all second bytes, and so on, of unsigned integers of `size` bytes.

    >>> byte_planes([0x0102, 0x0304], 2)
    [b'\\x02\\x04', b'\\x01\\x03']
    """
    return [bytes((value >> (8 * i)) & 0xFF for value in values) for i in range(size)]


def rotate_sign_down(bits: int) -> int:
    """Rotate 32 bits left by one: the sign goes to the bottom and the exponent fills the top byte.

    >>> hex(rotate_sign_down(0xC0000001))
    '0x80000003'
    """
    return ((bits << 1) | (bits >> 31)) & 0xFFFF_FFFF


def common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the number of first items that two sequences share.

    >>> common_prefix([1, 2, 3], [1, 2, 4, 5])
    2
    """
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def unfold(stored: Sequence[Sequence[Item]], parents: Sequence[int], shared: Sequence[int]) -> list[list[Item]]:
    """Restore rows that were stored without the prefix they share with an earlier row.

    >>> unfold([[1, 2, 3], [9]], parents=[-1, 0], shared=[0, 2])
    [[1, 2, 3], [1, 2, 9]]
    """
    rows: list[list[Item]] = []
    for own, parent, count in zip(stored, parents, shared, strict=True):
        rows.append([*(rows[parent][:count] if count else []), *own])
    return rows


def record(sample: Sample) -> dict[str, Any]:
    """Return a sample as plain data, with floats as their bits, so that `==` compares bit by bit.

    >>> record(Sample(id="a", token_ids=[5, 6], rewards=1.0))["columns"]["rewards"]
    1065353216
    """
    return {
        "text": [sample.id, sample.group, sample.env, sample.run, sample.mode],
        # As in frames: left out where empty.
        **{name: getattr(sample, name) for name in ("prompt", "rollout") if getattr(sample, name)},
        "policy_version": sample.policy_version,
        "images": [
            [i.hash, list(i.grid), i.offset, i.length, i.merge, i.media_type, i.width, i.height, i.num_bytes]
            for i in sample.images
        ],
        "columns": {name: _plain(values) for name, values in sample.columns.items()},
    }


def _plain(values: Cells) -> Any:
    if isinstance(values, Ragged):
        return [_plain(values[t]) for t in range(len(values))]
    if values.dtype.kind != "f":
        return values.tolist()
    return values.view(f"<u{values.dtype.itemsize}").tolist()


# ------------------------------------------------------------------ rollouts to samples


@dataclass
class PlainSample:
    token_ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


def interleave(steps: Sequence[Mapping[str, Any]]) -> list[PlainSample]:
    """Return the samples of cumulative steps, without those that train nothing."""
    return _trainable(interleaved(steps))


def interleaved(steps: Sequence[Mapping[str, Any]]) -> list[PlainSample]:
    """Return all samples of cumulative steps. A step continues the longest sample that is a prefix of its prompt, or
    starts a new one."""
    samples: list[PlainSample] = []
    for step in steps:
        prompt, completion = list(step["prompt_ids"]), list(step["completion_ids"])
        sampled = [bool(m) for m in step.get("completion_mask", [1] * len(completion))]
        best: PlainSample | None = None
        for sample in samples:
            is_prefix = sample.token_ids == prompt[: len(sample.token_ids)]
            if is_prefix and (best is None or len(sample.token_ids) > len(best.token_ids)):
                best = sample
        if best is None:
            best = PlainSample()
            samples.append(best)
        context = prompt[len(best.token_ids) :]
        best.token_ids += context + completion
        best.mask += [False] * len(context) + sampled
        logprobs = [lp if m else 0.0 for lp, m in zip(step["completion_logprobs"], sampled, strict=True)]
        best.logprobs += [0.0] * len(context) + logprobs
    return samples


def branches(
    turns: Sequence[Mapping[str, Any]], parents: Sequence[int], keeps: Sequence[int | None]
) -> list[PlainSample]:
    """Return the samples of a tree of turns: one per leaf. A sampled token is trained by the first path it is on.

    A turn is `{"token_ids", "mask", "logprobs"}` with one value per token.
    """

    def path_to(turn: int, count: int) -> list[tuple[int, int]]:
        if turn < 0:
            return []
        keep = keeps[turn]
        above = len(turns[parents[turn]]["token_ids"]) if keep is None and parents[turn] >= 0 else keep or 0
        return path_to(parents[turn], above) + [(turn, i) for i in range(count)]

    def continues(child: int, turn: int) -> bool:
        return parents[child] == turn and keeps[child] in (None, len(turns[turn]["token_ids"]))

    # A branch is named by the turn that opens it: a root, a turn that keeps only part of its parent, or a second turn
    # that continues the same parent. With parents [-1, 0, 1, 1]: turns 0, 1, 2 are branch 0, turn 3 opens branch 3.
    opener: list[int] = []
    ends: dict[int, int] = {}
    for i, parent in enumerate(parents):
        first = parent >= 0 and continues(i, parent) and not any(continues(j, parent) for j in range(i))
        opener.append(opener[parent] if first else i)
        ends[opener[i]] = i
    samples, seen = [], set()
    for leaf in ends.values():
        sample = PlainSample()
        for place in path_to(leaf, len(turns[leaf]["token_ids"])):
            turn, i = place
            trained = bool(turns[turn]["mask"][i]) and place not in seen
            seen.add(place)
            sample.token_ids.append(turns[turn]["token_ids"][i])
            sample.mask.append(trained)
            sample.logprobs.append(turns[turn]["logprobs"][i] if trained else 0.0)
        samples.append(sample)
    return _trainable(samples)


def _trainable(samples: list[PlainSample]) -> list[PlainSample]:
    """Remove samples that train nothing, unless all are such. A first token is never trained."""
    for sample in samples:
        if sample.mask:
            sample.mask[0] = False
    if any(any(sample.mask) for sample in samples):
        return [sample for sample in samples if any(sample.mask)]
    return samples


def grpo(rewards: Sequence[float]) -> list[float]:
    mean = math.fsum(rewards) / len(rewards)
    return [r - mean for r in rewards] if len(rewards) > 1 else [0.0]


def standardized(rewards: Sequence[float], eps: float) -> list[float]:
    centered = grpo(rewards)
    std = math.sqrt(math.fsum(c * c for c in centered) / len(rewards))
    return [c / (std + eps) for c in centered]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    if len(rewards) == 1:
        return [0.0]
    total = math.fsum(rewards)
    return [r - (total - r) / (len(rewards) - 1) for r in rewards]


def max_rl(rewards: Sequence[float]) -> list[float]:
    mean = math.fsum(rewards) / len(rewards)
    return [(r - mean) / mean if mean > 0 and len(rewards) > 1 else 0.0 for r in rewards]


def efficiency(rewards: Sequence[float], costs: Sequence[float]) -> list[float]:
    """Shape rewards: raise those of correct rollouts that cost less than the average correct one."""
    best = max(rewards)
    correct_costs = [c for r, c in zip(rewards, costs, strict=True) if r >= best]
    typical = math.fsum(correct_costs) / len(correct_costs)
    if best <= 0 or typical <= 0:
        return list(rewards)
    bonuses = [min(max(1 - c / typical, 0.0), 1.0) for c in costs]
    return [r * (1 + b) if r >= best else r for r, b in zip(rewards, bonuses, strict=True)]


def length_penalty(rewards: Sequence[float], weighted: Sequence[tuple[float, Sequence[int]]]) -> list[float]:
    """Shape rewards: lower each by the mean reward times its count's share of the largest count."""
    mean = math.fsum(rewards) / len(rewards)
    return [
        reward - mean * math.fsum(weight * counts[i] / max(max(counts), 1) for weight, counts in weighted)
        for i, reward in enumerate(rewards)
    ]


def gibberish(
    ids: Sequence[int], logprobs: Sequence[float], sampled: Sequence[bool], *, rare_above: int, below: float
) -> int | None:
    """Return the index, among sampled tokens, of the first that is rare and unlikely, or None."""
    number = 0
    for token, logprob, was_sampled in zip(ids, logprobs, sampled, strict=True):
        if was_sampled:
            if token > rare_above and logprob < below:
                return number
            number += 1
    return None


def repetition(logprobs: Sequence[float], sampled: Sequence[bool], *, window: int, above: float) -> int | None:
    """Return the index, among sampled tokens, at which a run of likely tokens reaches length `window`, or None."""
    number = run = 0
    for logprob, was_sampled in zip(logprobs, sampled, strict=True):
        if was_sampled:
            run = run + 1 if logprob > above else 0
            if run >= window:
                return number
            number += 1
    return None


# ------------------------------------------------------------------ images


def reference_patches(rgb: NDArray[np.uint8], layout: Layout) -> NDArray[np.float32]:
    """Resize, scale, normalise and cut one patch at a time."""
    from PIL import Image

    width, height = reference_fit(rgb.shape[1], rgb.shape[0], layout)
    resized = np.asarray(Image.fromarray(rgb).resize((width, height), Image.Resampling.BICUBIC))
    scaled = (resized.astype(np.float64) * (1 / 255)).astype(np.float32)
    normal = (scaled - np.array(layout.mean, np.float32)) / np.array(layout.std, np.float32)
    p, m = layout.patch, layout.merge
    rows = []
    for block_y in range(height // (p * m)):
        for block_x in range(width // (p * m)):
            for y in range(block_y * m, block_y * m + m):
                for x in range(block_x * m, block_x * m + m):
                    patch = normal[y * p : (y + 1) * p, x * p : (x + 1) * p].transpose(2, 0, 1)
                    rows.append(np.stack([patch] * layout.temporal_patch, axis=1).reshape(-1))
    return np.stack(rows)


def reference_fit(width: int, height: int, layout: Layout) -> tuple[int, int]:
    """Return the size in pixels that an image is resized to."""
    factor = layout.patch * layout.merge
    w, h = round(width / factor) * factor, round(height / factor) * factor
    if w * h > layout.max_pixels:
        beta = math.sqrt(height * width / layout.max_pixels)
        w, h = (max(factor, math.floor(side / beta / factor) * factor) for side in (width, height))
    elif w * h < layout.min_pixels:
        beta = math.sqrt(layout.min_pixels / (height * width))
        w, h = (math.ceil(side * beta / factor) * factor for side in (width, height))
    return w, h


def reference_positions(num_tokens: int, spans: Sequence[ImageSpan]) -> list[list[int]]:
    """Return time, height and width position of every token, one token at a time."""
    axes: list[list[int]] = [[], [], []]
    at = {span.offset: span for span in spans}
    token = current = 0
    while token < num_tokens:
        span = at.get(token)
        if span is None:
            for axis in axes:
                axis.append(current)
            token, current = token + 1, current + 1
            continue
        frames, h, w = span.grid[0], span.grid[1] // span.merge, span.grid[2] // span.merge
        for f in range(frames):
            for y in range(h):
                for x in range(w):
                    for axis, step in zip(axes, (f, y, x), strict=True):
                        axis.append(current + step)
        token += span.length
        current += max(span.grid[1], span.grid[2]) // span.merge
    return axes


def reference_delta(before: Sequence[str], after: Sequence[str]) -> Counter[str] | None:
    """Return the multiset of images a step adds, or None if it does not show all earlier ones."""
    held, shown = Counter(before), Counter(after)
    return None if held - shown else shown - held
