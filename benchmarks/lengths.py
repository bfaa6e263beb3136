"""Seeded lengths of samples as reinforcement learning produces them: what packers are compared on.

cot       one long chain of thought: lognormal around 3,000 tokens, 200 to 32,000
agentic   70 % short episodes around 2,000 tokens, 30 % around 60,000, up to 131,000
math      short answers: around 900 tokens, 300 to 4,000
grpo      groups of 16 of one prompt, lengths correlated within the group, arriving group by group
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.int64]


def _lognormal(rng: np.random.Generator, n: int, median: float, sigma: float) -> NDArray[np.float64]:
    return np.exp(rng.normal(np.log(median), sigma, n))


def _clip(values: NDArray[np.float64], low: int, high: int) -> Lengths:
    return np.clip(values, low, high).astype(np.int64)


def cot(rng: np.random.Generator, n: int) -> Lengths:
    return _clip(_lognormal(rng, n, 3_000, 1.0), 200, 32_000)


def agentic(rng: np.random.Generator, n: int) -> Lengths:
    is_long = rng.random(n) < 0.3
    return _clip(np.where(is_long, _lognormal(rng, n, 60_000, 0.35), _lognormal(rng, n, 2_000, 0.6)), 200, 131_000)


def math(rng: np.random.Generator, n: int) -> Lengths:
    return _clip(_lognormal(rng, n, 900, 0.6), 300, 4_000)


def grpo(rng: np.random.Generator, n: int) -> Lengths:
    groups = -(-n // 16)
    prompt = np.repeat(_lognormal(rng, groups, 400, 0.7), 16)[:n]
    typical = np.repeat(_lognormal(rng, groups, 3_500, 0.8), 16)[:n]
    return _clip(prompt + typical * _lognormal(rng, n, 1, 0.5), 64, 32_000)


DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int], Lengths]] = {
    "cot": cot,
    "agentic": agentic,
    "math": math,
    "grpo": grpo,
}


def draw(name: str, n: int, seed: int = 0) -> Lengths:
    """`n` lengths of the named distribution; the same for the same seed."""
    return DISTRIBUTIONS[name](np.random.default_rng([seed, n, *name.encode()]), n)
