"""What the producers hold when the clock starts: groups of samples as plain arrays, and the sums that must arrive.

A step is 32 groups of 16 samples. The samples of a group begin with the same prompt, as GRPO's do, and so do the
experts that a router chose for it. Ids lean to the low end of the vocabulary, as those of text do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

GROUPS = 32
SIZE = 16
"""Samples per group."""
TOKENS = 4096
"""Per sample, at most."""
PROMPT = 1024
ROUTER = (48, 8)
"""Layers and experts per token."""
VOCABULARY = 151_936


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One prompt's samples: name of a column -> one array per sample."""

    id: str
    columns: dict[str, list[Array]]
    block: dict[str, Array] | None
    """The same values as one array per column, where all samples have the same length."""

    @property
    def samples(self) -> list[dict[str, Array]]:
        return [dict(zip(self.columns, row, strict=True)) for row in zip(*self.columns.values(), strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """How much there is of what."""

    name: str
    is_ragged: bool = False
    has_experts: bool = False
    groups: int = GROUPS
    tokens: int = TOKENS


CASES = {
    "fixed": Case(name="fixed"),
    "ragged": Case(name="ragged", is_ragged=True),
    "router": Case(name="router", has_experts=True),
    "router-small": Case(name="router-small", has_experts=True, groups=8),
    "small": Case(name="small", groups=64, tokens=512),
    "tiny-text": Case(name="tiny-text", is_ragged=True, groups=2, tokens=32),
    "tiny": Case(name="tiny", is_ragged=True, has_experts=True, groups=2, tokens=32),
}


def make_groups(case: Case, numbers: Sequence[int], name: str) -> list[Group]:
    """The groups with these numbers; their values depend on the number alone, their ids begin with `name`."""
    return [_group(case, number, f"{name}-{number}") for number in numbers]


def _group(case: Case, number: int, group: str) -> Group:
    rng = np.random.default_rng([number, case.tokens])
    lengths, prompt = _lengths(case, rng)
    blocks = _blocks(case, rng, prompt)
    rows = {
        column: [row[:length] for row, length in zip(block, lengths, strict=True)] for column, block in blocks.items()
    }
    return Group(id=group, columns=rows, block=None if case.is_ragged else blocks)


def _lengths(case: Case, rng: np.random.Generator) -> tuple[list[int], int]:
    """Tokens of each sample, and how many of them are the prompt."""
    if not case.is_ragged:
        return [case.tokens] * SIZE, min(PROMPT, case.tokens // 4)
    prompt = int(rng.integers(case.tokens // 16, case.tokens // 4))
    drawn = rng.lognormal(np.log(case.tokens * 0.35), 0.6, SIZE)
    return np.clip(drawn, prompt + 2, case.tokens).astype(int).tolist(), prompt


def _blocks(case: Case, rng: np.random.Generator, prompt: int) -> dict[str, Array]:
    shape = (SIZE, case.tokens)
    ids = (rng.random(shape, np.float32) ** 3 * VOCABULARY).astype(np.uint32)
    ids[:, :prompt] = ids[0, :prompt]
    mask = np.zeros(shape, np.bool_)
    mask[:, prompt:] = True
    logprobs = -rng.standard_exponential(shape, np.float32)
    logprobs[:, :prompt] = 0.0
    blocks: dict[str, Array] = {"token_ids": ids, "loss_mask": mask, "logprobs": logprobs}
    if case.has_experts:
        experts = np.frombuffer(rng.bytes(SIZE * case.tokens * ROUTER[0] * ROUTER[1]), np.uint8)
        experts = experts.reshape(*shape, *ROUTER).copy()
        experts[:, :prompt] = experts[0, :prompt]
        blocks["routed_experts"] = experts
    return blocks


def read(column: str, values: Array) -> int:
    """Read every byte of a column; the sum of its values, which does not depend on their order."""
    if column == "routed_experts":
        return int(np.ascontiguousarray(values).reshape(-1).view(np.uint64).sum(dtype=np.uint64))
    if column == "logprobs":
        return int(values.sum(dtype=np.float64) < 0)  # its exact value depends on the order of adding
    return int(values.sum(dtype=np.int64))


def read_all(columns: dict[str, Array]) -> dict[str, int]:
    return {name: read(name, values) for name, values in columns.items() if name in CHECKED or name == "logprobs"}


CHECKED = ("token_ids", "loss_mask", "routed_experts")
"""Columns whose sums must be the same at the producers and at the ranks."""


def add(sums: Sequence[dict[str, int]]) -> dict[str, int]:
    """The sums of several ranks or producers; as numpy's, without a carry out of 64 bits."""
    names = [name for name in CHECKED if any(name in one for one in sums)]
    return {name: sum(one.get(name, 0) for one in sums) % (1 << 64) for name in names}


def sums_of(groups: Sequence[Group]) -> dict[str, int]:
    """What the ranks' sums must add up to."""
    return add([read_all(sample) for group in groups for sample in group.samples])
