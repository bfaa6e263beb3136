"""Seeded samples that share tokens as reinforcement learning makes them: what planners of trees are compared on.

grpo      groups of 16 answers to one prompt: 2,000 + 2,000 tokens, or 15,000 + 2,000
agentic   groups of 8 rollouts of one task: 60 turns each, with branches of sub-agents and rewritten turns
apart     long chains of thought that share nothing
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.lengths import draw
from penstock.arrays.sample_metadata import SampleMetadata
from penstock.arrays.shared_prefixes import SharedPrefixes


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    metadata: SampleMetadata
    ranks: int
    cap: int


def _metadata(lengths: list[int], parents: list[int], shared: list[int], groups: list[int]) -> SampleMetadata:
    found = SharedPrefixes.of(parents, shared)
    made = SampleMetadata.of_lengths(np.array(lengths, np.int64))
    return replace(made, shared=found, group=tuple(f"g{g}" for g in groups))


def grpo(count: int, prompt: int, completion: int) -> SampleMetadata:
    """Groups of 16 of one prompt; prompts and answers vary around these lengths."""
    rng = np.random.default_rng([count, prompt, completion])
    prompts = _around(rng, prompt, 0.2, -(-count // 16))
    typical = np.repeat(_around(rng, completion, 0.3, len(prompts)), 16)[:count]
    lengths = np.repeat(prompts, 16)[:count] + np.maximum(1, typical * np.exp(rng.normal(0, 0.4, count))).astype(int)
    number = np.arange(count)
    first = number % 16 == 0
    return _metadata(
        lengths.tolist(),
        np.where(first, -1, number - number % 16).tolist(),
        np.where(first, 0, prompts[number // 16]).tolist(),
        (number // 16).tolist(),
    )


def agentic(count: int) -> SampleMetadata:
    """Rollouts of 60 turns that share their task; branches leave them after some turn."""
    rng = np.random.default_rng([count, 60])
    lengths: list[int] = []
    parents: list[int] = []
    shared: list[int] = []
    groups: list[int] = []
    group = 0
    while len(lengths) < count:
        root, task = len(lengths), int(_around(rng, 2_000, 0.3, 1)[0])
        for rollout in range(8):
            turns = task + np.cumsum(_around(rng, 450, 0.6, int(rng.integers(40, 61))))
            main = len(lengths)
            lengths.append(int(turns[-1]))
            parents.append(-1 if rollout == 0 else root)
            shared.append(0 if rollout == 0 else task)
            for turn in sorted(rng.integers(0, len(turns) - 1, int(rng.integers(2, 8))).tolist()):
                lengths.append(int(turns[turn]) + int(_around(rng, 1_500, 0.6, 1)[0]))
                parents.append(main)
                shared.append(int(turns[turn]))
            groups += [group] * (len(lengths) - len(groups))
        group += 1
    return _metadata(lengths[:count], parents[:count], shared[:count], groups[:count])


def apart(count: int) -> SampleMetadata:
    lengths = draw("cot", count)
    return replace(SampleMetadata.of_lengths(lengths), shared=SharedPrefixes.none(count))


def _around(rng: np.random.Generator, middle: int, spread: float, count: int) -> NDArray[np.int64]:
    drawn: NDArray[np.int64] = np.maximum(middle * np.exp(rng.normal(0, spread, count)), 1).astype(np.int64)
    return drawn


KINDS: dict[str, tuple[Callable[[int], SampleMetadata], int]] = {
    "grpo 16 x (2k + 2k)": (lambda count: grpo(count, 2_000, 2_000), 65_536),
    "grpo 16 x (15k + 2k)": (lambda count: grpo(count, 15_000, 2_000), 65_536),
    "agentic, 60 turns": (agentic, 65_536),
    "nothing shared": (apart, 32_768),
}
"""By name what makes the samples, and the cap."""


def cases(counts: tuple[int, ...], ranks: tuple[int, ...]) -> list[Case]:
    """Every kind with every number of samples on every number of ranks."""
    return [
        Case(name=f"{name}, {count:,} samples, {r} ranks, cap {cap:,}", metadata=make(count), ranks=r, cap=cap)
        for name, (make, cap) in KINDS.items()
        for count in counts
        for r in ranks
    ]
