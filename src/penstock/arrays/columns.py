"""The table of columns: what a sample carries, in which dtype, and which value stands for a missing one.

Validation, encoding, packing, padding, export and the viewer all loop over this table, so adding a column is one line
here. The names are those that trainers and inference servers use. Columns that only one run has are declared where a
plane is opened, and described in its frames (`own_columns`).

A column is given per token, per sample, or "either": one number for the sample, or one per token. Each token has one
value, an array of fixed shape (`trailing`), or a list of any length (`ragged`). `fill` replaces an absent column when
samples with and without it share a micro-batch. `pad` is the value in the padding at the end of a micro-batch, where
nothing may reach the loss.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError

NO_VERSION = -1
"""Marks an unknown policy version in arrays and frames. Not 0, which is the first version."""

Array: TypeAlias = NDArray[Any]
Cells: TypeAlias = Any
"""The values of a column along the tokens: an array, or a `Ragged` where every token has its own list."""
Per: TypeAlias = Literal["token", "either", "sample"]
Scalar: TypeAlias = bool | int | float | str
Description: TypeAlias = tuple[str, str, int, bool, bool | int | float, bool | int | float]
"""dtype, per, number of trailing dimensions, ragged, fill, pad."""
MODES = ("rl", "opd", "sft")
WEIGHTS = ("rl_weights", "ce_weights", "ref_kl_weights")
"""Columns that weight the terms of the loss, in the order of the terms."""


class _Named(msgspec.Struct, frozen=True):
    name: str


class Column(_Named, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One column: its dtype, whether it is given per token or per sample, and its fill and padding values.

    Declare columns of your own when you open a plane or call `pack`:

    >>> weights = Column("turn_weights", dtype="float32", per="token", fill=1.0)
    >>> weights.dtype, weights.pad
    ('<f4', 1.0)
    """

    dtype: str = "float32"
    """A numpy name: a number of fixed size, or bool ("str" for the text columns of the table)."""
    per: Per = "token"
    """token; sample: one number per sample, repeated along its tokens; either: one or the other."""
    fill: Scalar = 0
    """Value of an absent column, per token."""
    pad: Scalar | None = None
    """Value in padding; defaults to `fill`."""
    trailing: int = 0
    """Number of dimensions after the token axis, at most two. All samples of a step have the same shape."""
    ragged: bool = False
    """Whether every token has its own list. Missing values and padding are empty lists."""
    meaning: str = ""
    wider: tuple[str, ...] = ()
    """Other accepted storage dtypes, narrowest first."""
    nan: Literal["no", "untrained", "yes", "any"] = "any"
    """Where NaN is allowed: nowhere, on untrained tokens, or anywhere. "any" also accepts infinities."""
    above: float = -math.inf
    """Values must be greater than this (where they are checked at all)."""
    at_most: float = math.inf
    """Values must not exceed this (where they are checked at all)."""
    per_node: bool = False
    """Whether the value depends only on the token and those before it, so samples that share the token share the value.
    Other columns are per edge: each sample has its own value, even for a token that is computed once. Only set in the
    table."""

    def __post_init__(self) -> None:
        put = msgspec.structs.force_setattr
        if self.per not in get_args(Per):
            raise ConfigError(
                f"column {self.name!r:.60}: per {self.per!r:.20}; must be one of {', '.join(get_args(Per))}"
            )
        put(self, "dtype", _dtype_name(self.name, self.dtype))
        if self.pad is None:
            put(self, "pad", self.fill)
        if not 0 <= self.trailing <= 2 or (self.trailing and (self.ragged or self.per != "token")):
            raise ConfigError(
                f"column {self.name!r}: trailing {self.trailing} per {self.per}{', ragged' if self.ragged else ''}; "
                "up to two trailing dimensions, of a column that is given per token and is not ragged"
            )
        if self.ragged and self.per != "token":
            raise ConfigError(f"column {self.name!r}: ragged per {self.per}; lists are given per token")
        for what in ("fill", "pad"):
            put(self, what, self._scalar(what))

    def _scalar(self, what: str) -> Scalar:
        """Return fill or padding converted to the column's dtype."""
        value = getattr(self, what)
        if self.is_text:
            return str(value)
        scalar = None if isinstance(value, str) else _exact(value, self.numpy)
        if scalar is None:
            raise ConfigError(f"column {self.name!r}: {what} {value!r:.60}; must be a number of {self.numpy.name}")
        return scalar

    @property
    def numpy(self) -> np.dtype[Any]:
        return np.dtype(self.dtype)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Accepted storage dtypes, narrowest first."""
        return (self.dtype, *self.wider)

    @property
    def is_text(self) -> bool:
        return self.dtype == "str"

    def described(self) -> Description:
        """Return what another process needs to store the column; `Column.of` is the inverse."""
        assert not isinstance(self.fill, str) and self.pad is not None and not isinstance(self.pad, str)
        return (self.dtype, self.per, self.trailing, self.ragged, self.fill, self.pad)

    def is_like(self, other: Column) -> bool:
        """Return whether two columns have the same description. NaN equals NaN."""
        return self is other or repr(self.described()) == repr(other.described())

    @staticmethod
    def of(name: str, description: Description) -> Column:
        """Build a column from `described()`. Raises ConfigError if the description is invalid."""
        dtype, per, trailing, ragged, fill, pad = description
        return Column(name, dtype=dtype, per=per, trailing=trailing, ragged=ragged, fill=fill, pad=pad)  # type: ignore[arg-type]


def _exact(value: object, dtype: np.dtype[Any]) -> Scalar | None:
    """Convert a value to the dtype, or return None if the dtype cannot hold exactly this value."""
    try:
        with np.errstate(over="ignore"):
            exact = np.asarray(value).astype(dtype) if dtype.kind == "f" else np.array(value, dtype)
    except (ValueError, TypeError, OverflowError):
        return None
    if exact.ndim:
        return None
    scalar: Scalar = exact.item()
    # Floats may round (0.1 is stored as float32), but must not overflow. Integers and bools must be exact.
    changed = math.isinf(scalar) if isinstance(scalar, float) else scalar != value
    return None if changed else scalar


def _dtype_name(name: str, dtype: str) -> str:
    """Return the dtype as frames write it: little-endian, of fixed size."""
    if dtype == "str" and name in _TEXTS:
        return dtype
    try:
        found = np.dtype(dtype).newbyteorder("<")
    except (TypeError, ValueError, SyntaxError):  # SyntaxError: numpy parses some names as Python
        found = np.dtype(object)
    if found.kind not in "buif" or found.itemsize not in (1, 2, 4, 8) or found.subdtype is not None:
        raise ConfigError(f"column {name!r}: dtype {dtype!r:.60}; must be bool, or a number of 8 to 64 bits")
    return found.str


def _token(name: str, dtype: str, fill: float, pad: float, meaning: str, **more: Any) -> Column:
    return Column(name, dtype=dtype, fill=fill, pad=pad, meaning=meaning, **{"nan": "no", **more})


def _either(name: str, fill: float, meaning: str, **more: Any) -> Column:
    return Column(name, dtype="<f4", per="either", fill=fill, meaning=meaning, **{"nan": "no", **more})


def _sample(name: str, dtype: str, fill: int | str, meaning: str) -> Column:
    return Column(name, dtype=dtype, per="sample", fill=fill, meaning=meaning)


_TEXTS = ("id", "group", "prompt", "env", "run", "mode", "rollout")

# A log-softmax in float32 can round to a hair above zero; anything beyond that is not a log-probability.
_LOGPROBS: dict[str, Any] = {"nan": "untrained", "at_most": 1e-3}

TABLE: tuple[Column, ...] = (
    _token("token_ids", "<u4", 0, 0, "the sequence; padding takes the pad id", per_node=True),
    _token("loss_mask", "|b1", False, False, "True where the token is trained; never on a sample's first token"),
    _token("logprobs", "<f4", 0.0, 0.0, "of the sampler; 0.0 where not sampled", **_LOGPROBS),
    _either("temperatures", 1.0, "of the sampler", above=0.0),
    _either("advantages", 0.0, "weight of the policy gradient"),
    _either("rewards", math.nan, "NaN = none", nan="yes"),
    _token("teacher_logprobs", "<f4", 0.0, 0.0, "of a teacher or reference model", **_LOGPROBS),
    _token("rl_weights", "<f4", 1.0, 0.0, "weight of the policy-gradient term"),
    _token("ce_weights", "<f4", 0.0, 0.0, "weight of the cross-entropy term"),
    _token("ref_kl_weights", "<f4", 0.0, 0.0, "weight of the KL term against the reference"),
    _token(
        "routed_experts", "|u1", 0, 0, "experts chosen per [layer, top_k]", wider=("<u2",), trailing=2, per_node=True
    ),
    _token("mm_token_type_ids", "|u1", 0, 0, "0 text, 1 image", per_node=True),
    _token(
        "weight_versions",
        "<i4",
        NO_VERSION,
        NO_VERSION,
        "policy version that sampled the token, where it changed mid-rollout; -1 = not known",
        above=NO_VERSION - 1,
    ),
    _token(
        "sampling_mask",
        "<u4",
        0,
        0,
        "the ids that the sampler kept (top-p, top-k, min-p), ascending; empty = all of them",
        ragged=True,
    ),
    _token("teacher_topk_ids", "<u4", 0, 0, "the k ids that a teacher finds most likely, per token", trailing=1),
    _token(
        "teacher_topk_logprobs",
        "<f4",
        0.0,
        0.0,
        "their log-probabilities under the teacher; 0.0 where not sampled",
        trailing=1,
        **_LOGPROBS,
    ),
    _sample("id", "str", "", "unique; later columns attach by it"),
    _sample("group", "str", "", "the group's own id, unique: the unit of replay"),
    _sample("prompt", "str", "", "the prompt's name; comes back as often as the prompt is sampled"),
    _sample("env", "str", "", "the environment that scored it"),
    _sample("run", "str", "", "the tenant (an experiment or adapter) it belongs to"),
    _sample("mode", "str", "rl", "rl, opd or sft"),
    _sample("rollout", "str", "", "what is known of its rollout, as JSON: metrics, info, how it ended, seconds, roles"),
    _sample(
        "policy_version", "<i8", NO_VERSION, "oldest policy version that sampled any of its tokens; -1 = not known"
    ),
)

COLUMNS: dict[str, Column] = {column.name: column for column in TABLE}
TOKEN_COLUMNS: dict[str, Column] = {c.name: c for c in TABLE if c.per != "sample"}
PER_NODE = tuple(name for name, column in TOKEN_COLUMNS.items() if column.per_node)
"""What a model computes from: samples that share these over their first tokens share the work."""
TEXT_COLUMNS: dict[str, Column] = {c.name: c for c in TABLE if c.is_text}

# Filling these with 0.0 would mean "probability 1" or "nothing to learn". Training would go wrong without an error.
ALL_OR_NONE = {
    "logprobs": ("rl", "opd"),
    "advantages": ("rl",),
    "teacher_logprobs": ("opd",),
    "teacher_topk_logprobs": ("opd",),
}
"""Columns that either all trained samples of these modes in a step have, or none of them. A sample of another mode that
has a weight in the term of one of these modes counts as well."""
TERM_OF_MODE = {"rl": 0, "sft": 1, "opd": 2}
"""The place in `WEIGHTS` of each mode's own term."""


TOPK = ("teacher_topk_ids", "teacher_topk_logprobs")
"""Columns that go together: a sample has both, in one shape, or neither."""

APART = "routed_experts"
"""Samples with and without this column never share a micro-batch, because no value means "route freely"."""


def allows_all(column: Column, dtype: np.dtype[Any]) -> bool:
    """Return whether every value of this dtype is valid in the column."""
    return (column.nan == "any" or dtype.kind != "f") and column.above == -math.inf and column.at_most == math.inf


_SHORT = 1 << 14


def first_bad(column: Column, values: Array) -> tuple[int, str] | None:
    """Find the first invalid value. Returns its index and the reason, or None when all values are valid.

    For a column with `nan="untrained"`, pass the values on trained tokens only.
    """
    if len(values) == 0 or allows_all(column, values.dtype):
        return None
    # The extremes decide the common case at memory speed: NaN makes both NaN, and NaN fails any comparison. For a short
    # array their positions are found in a fifth of the time of the reductions, for a long one in half as much again.
    if values.size <= _SHORT:
        low, high = values.item(values.argmin()), values.item(values.argmax())
    else:  # the ufuncs themselves: `values.min()` takes longer
        low, high = np.minimum.reduce(values, axis=None), np.maximum.reduce(values, axis=None)
    if low > column.above and high <= column.at_most and high != math.inf:
        return None
    good = (values > column.above) & (values <= column.at_most) & (values != math.inf)
    if column.nan == "any":
        good = ((values > column.above) | (column.above == -math.inf)) & (values <= column.at_most)
    if column.nan in ("yes", "any") and values.dtype.kind == "f":
        good |= np.isnan(values)
    # Reached by columns that allow NaN, where the minimum above was NaN.
    if good.all():
        return None
    # argmin of a bool array is its first False, in the flat array. Rows may have trailing dimensions: with rows of
    # 4 values, flat index 9 is row 2.
    index = int(np.argmin(good))
    return index // (good.size // len(good)), _reason(column, float(values.reshape(-1)[index]))


def _reason(column: Column, value: float) -> str:
    if math.isnan(value):
        return "is NaN; this column allows none" + (" on trained tokens" if column.nan == "untrained" else "")
    if math.isinf(value):
        return f"is {value}; only finite numbers can be trained on"
    if value <= column.above:
        return f"is {value:g}; must be greater than {column.above:g}"
    return f"is {value:g}; must be at most {column.at_most:g}"
