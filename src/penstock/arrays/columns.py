"""The one table of columns: what a sample carries, in which dtype, and what stands where nothing was given.

Validation, encoding, packing, padding, export and the viewer all loop over this table, so adding a column is
one line here. Names are the field's own: what trainers and inference servers call these things.

A column is given per token, per sample, or either way ("either": one number for the whole sample, or one
per token). Along the tokens stands one value, an array of a fixed shape (`trailing`), or a list of any length
(`ragged`). `fill` stands in for an absent column when samples with and without it share a micro-batch;
`pad` stands in the padding segment of a micro-batch, where nothing may reach the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

NO_VERSION = -1
"""Stands in arrays and frames for a policy version that was not given: not 0, which is the first one."""

Array: TypeAlias = NDArray[Any]
Cells: TypeAlias = Any
"""What a column holds along the tokens: an array, or a `Ragged` where every token has a list of its own."""
Per: TypeAlias = Literal["token", "either", "sample"]
MODES = ("rl", "opd", "sft")
WEIGHTS = ("rl_weights", "ce_weights", "ref_kl_weights")
"""The columns that weigh the terms of the loss, in the order of the terms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    name: str
    dtypes: tuple[str, ...]
    """Accepted storage dtypes, narrowest first; ("str",) for text."""
    per: Per
    fill: float | int | bool | str
    """Value of an absent column, per token."""
    pad: float | int | bool | str
    """Value in padding."""
    meaning: str
    trailing: int = 0
    """Number of trailing dimensions after the token axis."""
    ragged: bool = False
    """Whether every token has a list of its own; where nothing was given, and in padding, the lists are empty."""
    nan: Literal["no", "untrained", "yes"] = "no"
    """Where NaN may stand: nowhere, on tokens that are not trained, or anywhere."""
    above: float = -math.inf
    """Values must be greater than this (where they are checked at all)."""
    at_most: float = math.inf
    """Values must not exceed this (where they are checked at all)."""

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.dtypes[0])

    @property
    def is_text(self) -> bool:
        return self.dtypes == ("str",)


def _token(name: str, dtype: str, fill: float, pad: float, meaning: str, **more: Any) -> Column:
    return Column(name=name, dtypes=(dtype,), per="token", fill=fill, pad=pad, meaning=meaning, **more)


def _either(name: str, fill: float, meaning: str, **more: Any) -> Column:
    return Column(name=name, dtypes=("<f4",), per="either", fill=fill, pad=fill, meaning=meaning, **more)


def _sample(name: str, dtype: str, fill: int | str, meaning: str) -> Column:
    return Column(name=name, dtypes=(dtype,), per="sample", fill=fill, pad=fill, meaning=meaning)


# A log-softmax in float32 can round to a hair above zero; anything beyond that is not a log-probability.
LOGPROB_SLACK = 1e-3

TABLE: tuple[Column, ...] = (
    _token("token_ids", "<u4", 0, 0, "the sequence; padding takes the pad id"),
    _token("loss_mask", "|b1", False, False, "True where the token is trained; never on a sample's first token"),
    _token(
        "logprobs",
        "<f4",
        0.0,
        0.0,
        "of the sampler; 0.0 where not sampled",
        nan="untrained",
        at_most=LOGPROB_SLACK,
    ),
    _either("temperatures", 1.0, "of the sampler", above=0.0),
    _either("advantages", 0.0, "weight of the policy gradient"),
    _either("rewards", math.nan, "NaN = none", nan="yes"),
    _token(
        "teacher_logprobs",
        "<f4",
        0.0,
        0.0,
        "of a teacher or reference model",
        nan="untrained",
        at_most=LOGPROB_SLACK,
    ),
    _token("rl_weights", "<f4", 1.0, 0.0, "weight of the policy-gradient term"),
    _token("ce_weights", "<f4", 0.0, 0.0, "weight of the cross-entropy term"),
    _token("ref_kl_weights", "<f4", 0.0, 0.0, "weight of the KL term against the reference"),
    Column(
        name="routed_experts",
        dtypes=("|u1", "<u2"),
        per="token",
        trailing=2,
        fill=0,
        pad=0,
        meaning="experts chosen per [layer, top_k]",
    ),
    _token("mm_token_type_ids", "|u1", 0, 0, "0 text, 1 image"),
    _token(
        "weight_versions",
        "<i4",
        NO_VERSION,
        NO_VERSION,
        "policy version that sampled the token, where it changed mid-rollout; -1 = not known",
        above=NO_VERSION - 1,
    ),
    Column(
        name="sampling_mask",
        dtypes=("<u4",),
        per="token",
        ragged=True,
        fill=0,
        pad=0,
        meaning="the ids that the sampler kept (top-p, top-k, min-p), ascending; empty = all of them",
    ),
    _sample("id", "str", "", "unique; later columns attach by it"),
    _sample("group", "str", "", "the group's own id, unique: the unit of replay"),
    _sample("prompt", "str", "", "the prompt's name; comes back as often as the prompt is sampled"),
    _sample("env", "str", "", "the environment that scored it"),
    _sample("run", "str", "", "the run or adapter it belongs to"),
    _sample("mode", "str", "rl", "rl, opd or sft"),
    _sample(
        "policy_version", "<i8", NO_VERSION, "oldest policy version that sampled any of its tokens; -1 = not known"
    ),
)

COLUMNS: dict[str, Column] = {column.name: column for column in TABLE}
TOKEN_COLUMNS: dict[str, Column] = {c.name: c for c in TABLE if c.per != "sample"}
TEXT_COLUMNS: dict[str, Column] = {c.name: c for c in TABLE if c.is_text}

# Filling these with 0.0 would say "probability 1", or "nothing to learn": wrong, and nobody would notice.
ALL_OR_NONE = {"logprobs": ("rl", "opd"), "advantages": ("rl",), "teacher_logprobs": ("opd",)}
"""Columns that all trained samples of these modes in a step have, or none of them."""


def first_bad(column: Column, values: Array) -> tuple[int, str] | None:
    """The index of the first value the column does not allow, and why; None when all are allowed.

    For a column with `nan="untrained"`, pass the values on trained tokens only.
    """
    bounded = values.dtype.kind == "f" or column.above > -math.inf
    if not bounded or len(values) == 0:
        return None
    # Two reductions decide the common case at memory speed: NaN makes both NaN, and NaN fails any comparison.
    low, high = values.min(), values.max()
    if low > column.above and high <= column.at_most and high != math.inf:
        return None
    good = (values > column.above) & (values <= column.at_most) & (values != math.inf)
    if column.nan == "yes":
        good |= np.isnan(values)
    if good.all():
        return None
    index = int(np.argmin(good))
    return index, _reason(column, float(values[index]))


def _reason(column: Column, value: float) -> str:
    if math.isnan(value):
        return "is NaN; this column allows none" + (" on trained tokens" if column.nan == "untrained" else "")
    if math.isinf(value):
        return f"is {value}; only finite numbers can be trained on"
    if value <= column.above:
        return f"is {value:g}; must be greater than {column.above:g}"
    return f"is {value:g}; must be at most {column.at_most:g}"
