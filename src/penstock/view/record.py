"""The record of one trained sequence: fields about it, and one array per column along its tokens. Steps of records.

Inputs are the table of `arrays/columns.py`, results are the attributes of `Terms`. Writers, readers, the comparison of
runs and the viewer loop over both, so a column added there is exported, read back, shown and compared. So are a run's
own columns, which the record describes in its field `columns`. Columns marked required are in every record, null where
they do not apply. The others are present if the batch or the loss has them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import COLUMNS as GIVEN
from penstock.arrays import TOKEN_COLUMNS, Array, Cells, Column, Ragged, check_name

if TYPE_CHECKING:
    from penstock.view.folders import Done

SCHEMA_VERSION = 1
_REASONS_KEPT = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportColumn:
    name: str
    """In the record."""
    source: Literal["batch", "terms"]
    attribute: str
    """The micro-batch's column, or the field of `Terms`."""
    dtypes: tuple[str, ...]
    """Of the arrays, narrowest first."""
    trailing: int = 0
    """Number of dimensions after the token axis."""
    ragged: bool = False
    """Whether each token has its own list."""
    required: bool = True
    null: Literal["never", "unrecorded", "unsampled", "first"] = "never"
    """Which tokens have no value: those without a recorded value, unsampled ones, or the first of a sequence."""

    @property
    def kind(self) -> Literal["int", "bool", "float"]:
        kind = np.dtype(self.dtypes[0]).kind
        return "float" if kind == "f" else "bool" if kind == "b" else "int"

    @property
    def depth(self) -> int:
        """Nesting depth of lists per token."""
        return self.trailing + self.ragged

    def cells(self, values: Any) -> Cells:
        """Convert as `array` does, or to one list per token."""
        if not self.ragged:
            return self.array(values)
        lists = Ragged.of_lists(values, np.dtype(self.dtypes[0]) if self.kind == "float" else None)
        return Ragged(self.array(lists.values), lists.offsets)

    def array(self, values: Any) -> Array:
        """Convert to the narrowest of the column's dtypes that holds the values. ValueError if none does."""
        if self.kind != "int":
            return np.array(values, self.dtypes[0])
        wide = np.asarray(values, np.uint64 if self.dtypes == ("<u8",) else np.int64)
        low, high = (int(wide.min()), int(wide.max())) if wide.size else (0, 0)
        for dtype in self.dtypes:
            if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
                return wide.astype(dtype)
        raise ValueError(f"values from {low} to {high} are beyond {np.dtype(self.dtypes[-1]).name}")


_NAMES = {"logprobs": "inference_logprobs"}
"""Columns of the batch with another name in the record, here to distinguish them from the trainer's."""
_ALWAYS = ("token_ids", "loss_mask", "logprobs", "advantages", "rewards", "position_ids")


def _of_batch() -> Iterator[ExportColumn]:
    positions = Column("position_ids", dtype="<i8", meaning="from 0 up")
    for column in (*TOKEN_COLUMNS.values(), positions):
        yield ExportColumn(
            name=_NAMES.get(column.name, column.name),
            source="batch",
            attribute=column.name,
            dtypes=column.dtypes,
            trailing=column.trailing,
            ragged=column.ragged,
            required=column.name in _ALWAYS,
            null="unrecorded" if column.nan == "untrained" and not column.trailing else "never",
        )


def _of_terms() -> Iterator[ExportColumn]:
    floats: dict[str, tuple[str, Literal["never", "unsampled", "first"]]] = {
        "trainer_logprobs": ("trainer_logprobs", "first"),
        "entropy": ("entropy", "first"),
        "mismatch_kl": ("mismatch_kl", "unsampled"),
        "log_importance_ratio": ("log_ratio", "unsampled"),
        "importance_ratio": ("ratio", "unsampled"),
        "prob_delta": ("prob_delta", "unsampled"),
        "loss": ("loss", "never"),
    }
    for name, (attribute, null) in floats.items():
        yield ExportColumn(
            name=name, source="terms", attribute=attribute, dtypes=("<f4",), null=null, required=name != "loss"
        )
    for attribute in ("masked", "masked_high", "masked_low"):
        yield ExportColumn(name=f"is_{attribute}", source="terms", attribute=attribute, dtypes=("|b1",))


TABLE: tuple[ExportColumn, ...] = (*_of_batch(), *_of_terms())
"""Inputs before results."""
COLUMNS = {column.name: column for column in TABLE}


def own_column(name: str, form: tuple[str, int, bool]) -> ExportColumn:
    """Make a run's own column from its description in a record. ValueError if the description is invalid."""
    dtype, trailing, ragged = form
    column = Column(check_name(name), dtype=dtype, trailing=trailing, ragged=ragged)
    return ExportColumn(
        name=name,
        source="batch",
        attribute=name,
        dtypes=(column.dtype,),
        trailing=column.trailing,
        ragged=column.ragged,
        required=False,
    )


def form_of(cells: Cells) -> tuple[str, int, bool]:
    """Describe a run's own column for the record: dtype, trailing dimensions, and whether it is ragged."""
    return cells.dtype.str, 0 if isinstance(cells, Ragged) else cells.ndim - 1, isinstance(cells, Ragged)


_FIELD_NAMES = {"id": "sample_id", "group": "group_id", "env": "env_name", "run": "run_id", "mode": "training_mode"}
OF_SAMPLE = {_FIELD_NAMES.get(c.name, c.name): c for c in GIVEN.values() if c.per == "sample"}
"""Per-sample columns by their names in the record."""
FIELDS: dict[str, Any] = {
    "schema_version": int,
    "step": int,
    "export_step": int,
    "rank": int,
    "micro_step": int,
    "micro_sequence_idx": int,
    "export_sequence_idx": int,
    **{name: str if column.is_text else int for name, column in OF_SAMPLE.items()},
    "rollout": dict[str, Any],
    "staleness": int,
    "rule": dict[str, float | str | None],
    "images": list[dict[str, Any]],
    "columns": dict[str, tuple[str, int, bool]],
}
"""Fields of a record that are not arrays, and their types. Any may be null."""


def place_fields(step: int, *, export_step: int, rank: int, micro_step: int, index: int = 0) -> dict[str, Any]:
    """Return the fields that say where a record belongs. `index` counts the records of its file."""
    return {
        "schema_version": SCHEMA_VERSION,
        "step": step,
        "export_step": export_step,
        "rank": rank,
        "micro_step": micro_step,
        "micro_sequence_idx": 0,
        "export_sequence_idx": index,
    }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Record:
    """One sequence as it was trained."""

    fields: dict[str, Any]
    """The fields of FIELDS; None where unknown."""
    columns: dict[str, Cells]
    """[T, ...] by name, or a `Ragged` with one list per token. Floats are float32 with NaN for null; a column
    without a value on any token is absent."""

    @property
    def num_tokens(self) -> int:
        return len(self.columns["token_ids"])

    @property
    def own(self) -> dict[str, ExportColumn]:
        """The run's own columns by name, as described by the record."""
        return {name: own_column(name, form) for name, form in (self.fields.get("columns") or {}).items()}

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        """[T]"""
        mask: NDArray[np.bool_] = self.columns["loss_mask"]
        return mask

    @property
    def worst_kl(self) -> float:
        """The largest mismatch KL of a trained token, -inf if there is none."""
        measured = self.columns.get("mismatch_kl")
        if measured is None:
            return -np.inf
        values = measured[self.columns["loss_mask"] & np.isfinite(measured)]
        return float(values.max()) if len(values) else -np.inf

    @property
    def label(self) -> str:
        """A name for messages: the sample's id, or its position if it has none."""
        fields = self.fields
        place = f"rank {fields['rank']} micro-step {fields['micro_step']} sequence {fields['micro_sequence_idx']}"
        return fields.get("sample_id") or place


def finite(value: Any) -> Any:
    """Return the value, or None for NaN and infinity, which JSON cannot represent."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def filled(record: Record) -> dict[str, Cells]:
    """Return the record's columns in table order, with NaN arrays for missing required ones."""
    nothing = np.full(record.num_tokens, np.nan, np.float32)
    return {
        column.name: record.columns.get(column.name, nothing)
        for column in (*TABLE, *record.own.values())
        if column.required or column.name in record.columns
    }


def without_empty(columns: dict[str, Cells]) -> dict[str, Cells]:
    """Drop columns without any value, so that readers of every format return the same records."""
    return {name: values for name, values in columns.items() if not _is_empty(values)}


def _is_empty(values: Cells) -> bool:
    if isinstance(values, Ragged):
        return len(values.values) == 0
    return bool(values.dtype.kind == "f" and values.size and np.isnan(values.flat[0]) and np.isnan(values).all())


@dataclass(slots=True)
class Skipped:
    """Counts records that could not be read, with the first few reasons."""

    lines: int = 0
    reasons: list[str] = field(default_factory=list)
    """The first few reasons, with file and line."""

    def add(self, where: str, why: object) -> None:
        self.lines += 1
        if len(self.reasons) < _REASONS_KEPT:
            self.reasons.append(f"{where}: {why}"[:300])


# ------------------------------------------------------------------ steps


ReadLine: TypeAlias = Callable[[], bytes]
"""Reads a record's line of strict JSON again."""


class Step(ABC):
    """A readable step."""

    __slots__ = ()

    @property
    @abstractmethod
    def number(self) -> int: ...

    @property
    @abstractmethod
    def run(self) -> str: ...

    @property
    @abstractmethod
    def path(self) -> Path: ...

    @property
    @abstractmethod
    def stamp(self) -> int:
        """Changes when the step is written again."""

    @abstractmethod
    def lines(self, skipped: Skipped) -> Iterator[tuple[ReadLine, Record]]:
        """Yield all records, each with a function that reads its line again."""

    def records(self, skipped: Skipped | None = None) -> Iterator[Record]:
        """Yield all records."""
        return (record for _, record in self.lines(skipped or Skipped()))

    def done(self) -> dict[int, Done]:
        """Return the ranks' markers, of the attempt that finished. Empty if no rank wrote the step."""
        return {}

    def files(self) -> dict[int, Path]:
        """Return the ranks' files. Empty if no rank wrote the step."""
        return {}

    def altered(self) -> list[str]:
        """List files that are not what their rank wrote, or are gone. Frames have checksums of their own."""
        return []
