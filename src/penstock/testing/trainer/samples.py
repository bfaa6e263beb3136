"""The samples and steps with which `penstock.testing.trainer` probes a trainer.

Samples have one, two and three trained spans, with context before, between and after them. Some end with a trained
token and some with context. Advantages have both signs, are zero, differ within a sample, are very large. Ratios lie
on both sides of usual clips. Values of columns at untrained tokens are large and must not matter.

    pattern    ...###....##...####     # is a trained token, . is context
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import Sample
from penstock.packing import PackedStep, pack

LONGEST = 64
STAGES = {
    "alone": "one sample in a step",
    "padded": "one sample and padding",
    "row": "several samples in one row",
    "micro-batches": "several micro-batches",
    "ranks": "several ranks",
}
"""In the order in which they are explained: a bug in a single sample shows in all stages."""

_NEAR = (0.93, 1.07, 0.97, 1.12, 0.86)
"""Ratios that no loss clips."""
_FAR = (0.05, 0.4, 0.75, 0.9, 1.1, 1.25, 2.5, 8.0)
_MIXED = (0.5, -1.2, 0.9, 0.0, 1.7, -0.4, 2.1, -0.9, 0.3)
_JUNK = 7.0
"""Advantage at untrained tokens of samples whose advantages differ by token."""

Logprobs = Callable[[NDArray[np.int64], NDArray[np.float64]], NDArray[np.float64]]
"""token ids, temperatures -> log-probabilities of a sequence under the trainer's model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A sample to make."""

    pattern: str
    advantages: float | Sequence[float] = 1.0
    """One for the sample, or a cycle of values for its trained tokens."""
    ratios: Sequence[float] = _NEAR
    """Cycle of ratios of the model's probability to the sampler's, for the trained tokens."""
    temperatures: Sequence[float] = ()
    """Cycle, for all tokens."""
    special: int | None = None
    """A special id to put in: inside a span, at its end, and again later."""


SHAPES = {
    "plain": Shape(pattern="..##.."),
    "down": Shape(pattern="..###", advantages=-0.8),
    "turns": Shape(pattern="...###....##...####", advantages=_MIXED),
    "tools": Shape(pattern="..##.###...", advantages=0.6),
    "single": Shape(pattern="...#", advantages=-1.3),
    "short": Shape(pattern=".#", advantages=0.7),
    "zero": Shape(pattern="..##.##", advantages=0.0),
    "clipped up": Shape(pattern="..####.####.", advantages=1.0, ratios=_FAR),
    "clipped down": Shape(pattern="..####.####", advantages=-1.0, ratios=_FAR),
    "warm": Shape(pattern="..##..###.", advantages=-0.7, temperatures=(0.6, 1.7, 1.0, 1.3)),
    "cool": Shape(pattern=".##..#", advantages=0.9, temperatures=(0.8,)),
    "long": Shape(pattern="." * 20 + "#" * 12 + "." * 8 + "#" * 18 + "..", advantages=1.1),
    "big": Shape(pattern="..##.#", advantages=(3.0, -6.0, 14.0)),
    "loud": Shape(pattern="..#.##.", advantages=(4000.0, -6000.0, 5000.0)),
    "untrained": Shape(pattern=".....", advantages=2.0),
    "lone": Shape(pattern=".", advantages=2.0),
}
GROUPS = {"down": "plain", "tools": "turns", "zero": "single"}
"""Samples of one group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One step to train."""

    stage: str
    what: str
    samples: tuple[Sample, ...]
    step: PackedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What `check` was called with."""

    vocabulary: int
    per: Literal["token", "sample"]
    tolerance: float
    columns: Collection[str]
    special_ids: tuple[int, ...]
    ranks: Collection[int]


class Samples:
    """Makes the samples of `SHAPES` for a vocabulary, with sampler log-probabilities that give the wanted ratios."""

    def __init__(self, logprobs: Logprobs, options: Options) -> None:
        self._logprobs, self._vocabulary, self._columns = logprobs, options.vocabulary, options.columns
        self._ranks = options.ranks
        self.special = tuple(dict.fromkeys((0, 1, 2, options.vocabulary - 1, *options.special_ids)))
        shapes = dict(SHAPES)
        for token in self.special:
            shapes[f"id {token}"] = Shape(pattern="..#####..###", advantages=-1.1, special=token)
        self.shapes = shapes
        self.made: dict[str, Sample] = {name: self.make(name, shape) for name, shape in shapes.items()}

    def make(self, name: str, shape: Shape) -> Sample:
        rng = np.random.default_rng([len(name), *name.encode()])
        mask = np.array([letter == "#" for letter in shape.pattern])
        ids, count = self._ids(shape, len(mask), rng), len(mask)
        temperatures = np.ones(count)
        if "temperatures" in self._columns and shape.temperatures:
            temperatures = np.array([t for t, _ in zip(itertools.cycle(shape.temperatures), mask, strict=False)])
        ratios = np.ones(count)
        ratios[mask] = [r for r, _ in zip(itertools.cycle(shape.ratios), range(int(mask.sum())), strict=False)]
        sampled = np.minimum(self._logprobs(ids, temperatures) - np.log(ratios), -0.01)
        columns: dict[str, Any] = {"advantages": _advantages(shape, mask)}
        if "temperatures" in self._columns and shape.temperatures:
            columns["temperatures"] = temperatures
        if "teacher_logprobs" in self._columns:
            columns["teacher_logprobs"] = np.minimum(sampled + rng.uniform(-0.5, 0.5, count), -0.01)
        for weights in sorted({"rl_weights", "ce_weights", "ref_kl_weights"} & set(self._columns)):
            columns[weights] = rng.choice([0.5, 1.0, 1.5], count)
        return Sample(
            id=name,
            group=GROUPS.get(name, name),
            token_ids=ids,
            loss_mask=mask,
            logprobs=np.where(mask, sampled, rng.uniform(-4, -1, count) if "." in shape.pattern[3:] else 0.0),
            policy_version=int(rng.integers(1, 6)),
            **columns,
        )

    def _ids(self, shape: Shape, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        plain = np.setdiff1d(np.arange(self._vocabulary), self.special)
        ids = rng.choice(plain, count, replace=count > len(plain))
        if shape.special is not None:  # ..#ss#s..#ss
            ids[[3, 4, 6, 10, 11]] = shape.special
        return ids.astype(np.int64)

    def probe(self, stage: str, what: str, names: Sequence[str], **packing: Any) -> Probe:
        samples: list[Sample] = []
        for name in names:
            made = self.made[name]
            again = sum(sample.id.startswith(name) for sample in samples)
            samples.append(made.replace(id=f"{name} again {again}") if again else made)
        return Probe(stage=stage, what=what, samples=tuple(samples), step=self.step(samples, **packing))

    def step(self, samples: Sequence[Sample], **packing: Any) -> PackedStep:
        settings = {"seq_len": LONGEST, "micro_batch_max_tokens": 2 * LONGEST, "long_rows": True, "ranks": 1, **packing}
        return pack(samples, **settings)

    def probes(self) -> list[Probe]:
        alone = [name for name, shape in self.shapes.items() if "#" in shape.pattern]
        return [
            *(self.probe("alone", f"the sample {name!r} alone", [name]) for name in alone),
            *(self.probe("padded", what, names, **packing) for what, names, packing in _PADDED),
            *(self.probe("row", what, names, **packing) for what, names, packing in _ROWS),
            *(self.probe("micro-batches", what, names, **packing) for what, names, packing in _MICRO_BATCHES),
            *(
                self.probe("ranks", what, names, **packing)
                for what, names, packing in _RANKS
                if packing["ranks"] in self._ranks
            ),
        ]


_Steps = tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...]
_ALL = (
    "plain", "down", "turns", "tools", "single", "short", "zero", "clipped up", "clipped down", "warm", "cool", "long",
    "untrained", "id 2",
)  # fmt: skip
_MANY = ("plain", "down", "turns", "tools", "single", "long", "warm", "zero")

_PADDED: _Steps = (
    ("a sample that is padded to 32 tokens", ("plain",), {"pad_to_multiple_of": 32}),
    ("turns that are padded to 32 tokens", ("turns",), {"pad_to_multiple_of": 32}),
)
_ROWS: _Steps = (
    ("two samples of one group in a row", ("plain", "down"), {}),
    ("a long sample before a short one", ("long", "short"), {}),
    ("three samples in a row", ("turns", "down", "tools"), {}),
    ("four samples in a padded row", ("single", "warm", "short", "cool"), {"pad_to_multiple_of": 32}),
    ("samples with and without advantages in a row", ("zero", "down", "untrained", "plain"), {}),
    ("a sample of one token between others", ("plain", "lone", "down", "lone"), {}),
    ("clipped samples in a row", ("clipped up", "clipped down", "big"), {}),
    ("the same sample three times", ("tools", "tools", "tools"), {}),
    ("a row of eight samples", ("id 0", "turns", "tools", "plain", "warm", "down", "short", "single"), {}),
    ("a row of 123 tokens", ("long", "turns", "tools", "warm", "zero", "plain", "cool", "single"), {}),
)
_MICRO_BATCHES: _Steps = (
    ("one sample in each of three micro-batches", ("plain", "turns", "down"), {"max_samples": 1}),
    ("two samples in each of four micro-batches", _MANY, {"max_samples": 2}),
    ("padded micro-batches", ("long", "single", "turns", "down"), {"max_samples": 2, "pad_to_multiple_of": 16}),
    ("a micro-batch without advantages", ("zero", "plain"), {"max_samples": 1}),
    ("a micro-batch without trained tokens", ("untrained", "tools"), {"max_samples": 1}),
    ("a sample longer than micro_batch_max_tokens", ("long", "down"), {"micro_batch_max_tokens": 16}),
)
_RANKS: _Steps = (
    ("one sample on each of two ranks", ("plain", "turns"), {"ranks": 2, "max_samples": 1}),
    ("two ranks with two micro-batches each", _MANY[:6], {"ranks": 2, "max_samples": 2, "pad_to_multiple_of": 8}),
    ("two ranks with a row each", ("long", "down", "plain", "tools"), {"ranks": 2}),
    ("three ranks", ("down", "single", "tools", "turns"), {"ranks": 3, "max_samples": 1}),
    ("fourteen samples on two ranks", _ALL, {"ranks": 2, "pad_to_multiple_of": 8}),
    ("a rank with a dummy micro-batch only", ("turns",), {"ranks": 2}),
    ("four ranks, two with dummies", ("plain", "warm"), {"ranks": 4, "max_samples": 1}),
)


def _advantages(shape: Shape, mask: NDArray[np.bool_]) -> float | NDArray[np.float64]:
    if isinstance(shape.advantages, int | float):
        return float(shape.advantages)
    values = np.full(len(mask), _JUNK)
    values[mask] = [a for a, _ in zip(itertools.cycle(shape.advantages), range(int(mask.sum())), strict=False)]
    return values


def other_id(sample: Sample, at: int) -> Sample:
    """Return the sample with another id at one place, one that it has elsewhere."""
    ids = sample.token_ids.astype(np.int64)
    others = [token for token in ids.tolist() if token != ids[at]]
    ids[at] = others[len(others) // 2]
    return sample.replace(token_ids=ids, id=f"{sample.id} with another token {at}")
