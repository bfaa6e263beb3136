"""The record of one trained sequence: facts about it, and one array per column along its tokens.

What went in is the table of `arrays/columns.py`, what came out is the fields of `Terms`. Writers, readers, the
comparison of runs and the viewer loop over the two together, so a column that is added there is exported, read back,
shown and compared. Columns marked required are in every record, null where they do not apply; the others are there
when the batch or the loss has them.

Null means that nothing was measured. A micro-batch has 0.0 where a token has no log-probability, because arrays need a
number; a record must not, or every mean over it would count "probability 1" for tokens that nobody sampled. `Snapshot`
puts null on them, on what the loss computed from them, and on what the model predicts for a first token: nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.arrays.columns import ALL_OR_NONE, TOKEN_COLUMNS, Array, Column
from penstock.arrays.columns import COLUMNS as GIVEN
from penstock.arrays.versions import known
from penstock.errors import InvalidInput
from penstock.pack import MicroBatch

if TYPE_CHECKING:
    from penstock.train.terms import Terms

SCHEMA_VERSION = 1


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
    """Number of dimensions behind the token axis."""
    required: bool = True
    null: Literal["never", "unrecorded", "unsampled", "first"] = "never"
    """Which tokens have no value: those without a recorded one, those not sampled, or the first of a sequence."""

    @property
    def kind(self) -> Literal["int", "bool", "float"]:
        kind = np.dtype(self.dtypes[0]).kind
        return "float" if kind == "f" else "bool" if kind == "b" else "int"

    def array(self, values: Any) -> Array:
        """The values in the narrowest of the column's dtypes that holds them; ValueError where none does."""
        if self.kind != "int":
            return np.array(values, self.dtypes[0])
        wide = np.asarray(values, np.int64)
        low, high = (int(wide.min()), int(wide.max())) if wide.size else (0, 0)
        for dtype in self.dtypes:
            if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
                return wide.astype(dtype)
        raise ValueError(f"values from {low} to {high} are beyond {np.dtype(self.dtypes[-1]).name}")


_NAMES = {"logprobs": "inference_logprobs"}
"""Columns of the batch that the record calls otherwise; the trainer's log-probabilities stand beside these."""
_ALWAYS = ("token_ids", "loss_mask", "logprobs", "advantages", "rewards", "position_ids")


def _of_batch() -> Iterator[ExportColumn]:
    positions = Column(name="position_ids", dtypes=("<i8",), per="token", fill=0, pad=0, meaning="from 0 up")
    for column in (*TOKEN_COLUMNS.values(), positions):
        yield ExportColumn(
            name=_NAMES.get(column.name, column.name),
            source="batch",
            attribute=column.name,
            dtypes=column.dtypes,
            trailing=column.trailing,
            required=column.name in _ALWAYS,
            null="unrecorded" if column.nan == "untrained" else "never",
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
    for name, (field, null) in floats.items():
        yield ExportColumn(
            name=name, source="terms", attribute=field, dtypes=("<f4",), null=null, required=name != "loss"
        )
    for field in ("masked", "masked_high", "masked_low"):
        yield ExportColumn(name=f"is_{field}", source="terms", attribute=field, dtypes=("|b1",))


TABLE: tuple[ExportColumn, ...] = (*_of_batch(), *_of_terms())
"""What went in before what came out."""
COLUMNS = {column.name: column for column in TABLE}
_COMPARED = {c.name for c in TABLE if c.null == "unsampled" or c.name.startswith("is_masked")}

_FACT_NAMES = {"id": "sample_id", "group": "group_id", "env": "env_name", "run": "run_id", "mode": "training_mode"}
OF_SAMPLE = {_FACT_NAMES.get(c.name, c.name): c for c in GIVEN.values() if c.per == "sample"}
"""The columns per sample, by the record's names for them."""
FACTS: dict[str, Any] = {
    "schema_version": int,
    "step": int,
    "export_step": int,
    "rank": int,
    "micro_step": int,
    "micro_sequence_idx": int,
    "export_sequence_idx": int,
    **{name: str if column.is_text else int for name, column in OF_SAMPLE.items()},
    "staleness": int,
    "rule": dict[str, float | str | None],
    "images": list[dict[str, Any]],
}
"""Fields of a record that are not arrays, and their types; any may be null."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Record:
    """One sequence as it was trained."""

    facts: dict[str, Any]
    """The fields of FACTS; None where unknown."""
    columns: dict[str, Array]
    """[T, ...] by name. Floats are float32 with NaN for null; a column that is null on every token is absent."""

    @property
    def num_tokens(self) -> int:
        return len(self.columns["token_ids"])

    @property
    def worst_kl(self) -> float:
        """The largest mismatch KL of a trained token; -inf where there is none."""
        measured = self.columns.get("mismatch_kl")
        if measured is None:
            return -np.inf
        values = measured[self.columns["loss_mask"] & np.isfinite(measured)]
        return float(values.max()) if len(values) else -np.inf

    @property
    def label(self) -> str:
        """A name for messages: the sample's id, or its place where it has none."""
        facts = self.facts
        place = f"rank {facts['rank']} micro-step {facts['micro_step']} sequence {facts['micro_sequence_idx']}"
        return facts.get("sample_id") or place


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """A micro-batch and what the loss did with it, on the host and nobody else's: safe to write later."""

    batch: MicroBatch
    columns: dict[str, Array]
    """[T, ...] by export name: all of the table that batch and terms have."""
    rules: Mapping[str, Mapping[str, float | str]]

    @staticmethod
    def of(batch: MicroBatch, terms: Terms, *, omit: Collection[str] = ()) -> Snapshot:
        """Copy what will be exported; the only part of exporting that costs the training thread time."""
        columns: dict[str, Array] = {}
        for column in TABLE:
            if column.name in omit:
                continue
            if column.source == "batch":
                value = batch.columns.get(column.attribute)
                found = None if value is None else np.array(value)
            else:
                found = _to_host(getattr(terms, column.attribute), column.kind)
            if found is None:
                continue
            if len(found) != batch.num_tokens:
                raise InvalidInput(
                    f"{column.attribute}: {len(found)} values for {batch.num_tokens} tokens; "
                    "give one per token of the micro-batch, padding included"
                )
            columns[column.name] = found
        return Snapshot(batch=batch, columns=columns, rules=terms.rules)

    def records(self, facts: Mapping[str, Any], policy_version: int | None) -> Iterator[Record]:
        """One record per sequence that has a trained token; padding and dummies have none."""
        segments, columns = self.batch.segments, self._measured()
        for i, (start, count) in enumerate(zip(segments.offsets.tolist(), segments.lengths.tolist(), strict=True)):
            own = slice(start, start + count)
            if not columns["loss_mask"][own].any():
                continue
            named = self._named(i)
            mode, version = named["training_mode"], named["policy_version"]
            rule = self.rules.get(mode, self.rules.get(""))
            found = {name: values[own] for name, values in columns.items() if _applies(name, mode)}
            yield Record(
                facts={
                    **facts,
                    "micro_sequence_idx": i,
                    **named,
                    "staleness": None if policy_version is None or version is None else policy_version - version,
                    "rule": None if rule is None else {name: finite(value) for name, value in rule.items()},
                    "images": self._images(start, count),
                },
                columns=without_empty(found),
            )

    def _measured(self) -> dict[str, Array]:
        """The columns with NaN on tokens for which nothing was measured."""
        out, offsets = dict(self.columns), self.batch.segments.offsets
        absent = {column.name: self._unrecorded(column) for column in TABLE if column.null == "unrecorded"}
        for name, values in self.columns.items():
            null = COLUMNS[name].null
            if null != "never":
                unsampled = absent["inference_logprobs"]
                out[name] = values.copy()
                out[name][{"unrecorded": absent.get(name), "unsampled": unsampled, "first": offsets}[null]] = np.nan
        return out

    def _unrecorded(self, column: ExportColumn) -> NDArray[np.bool_]:
        """[T] tokens without a value in a log-probability column: 0.0 stands there, and nothing says it was measured.

        Trained tokens of a mode that cannot do without the column have it (packing refuses others), so there 0.0 is
        a probability of 1. Anywhere else it is what packing filled in.
        """
        segments, trained = self.batch.segments, self.columns["loss_mask"]
        values = self.columns.get(column.name)
        missing = np.ones(len(trained), np.bool_) if values is None else values == GIVEN[column.attribute].fill
        needing = ALL_OR_NONE.get(column.attribute, ())
        for mode, start, count in zip(segments.modes, segments.offsets, segments.lengths, strict=True):
            if mode in needing:
                missing[start : start + count] &= ~trained[start : start + count]
        return missing

    def _named(self, i: int) -> dict[str, Any]:
        """What the sample of a segment is: its columns per sample, null where empty or not known."""
        out: dict[str, Any] = {}
        for name, column in OF_SAMPLE.items():
            if column.name == "run":
                out[name] = self.batch.run or None
                continue
            values = getattr(self.batch.segments, f"{column.name}s", None)
            value = None if values is None else values[i]
            out[name] = (value or None) if column.is_text or value is None else known(int(value))
        return out

    def _images(self, start: int, count: int) -> list[dict[str, Any]]:
        return [
            {
                "hash": image.hash,
                "offset": image.offset - start,
                "length": image.length,
                "media_type": image.media_type,
                "width": image.width,
                "height": image.height,
            }
            for image in self.batch.images
            if start <= image.offset < start + count
        ]


def _applies(name: str, mode: str) -> bool:
    """Supervised samples have no sampler to compare with, whatever their neighbours in the micro-batch have."""
    return mode != "sft" or name not in _COMPARED


def finite(value: Any) -> Any:
    """The value, or None for a float that is no number: what JSON can say."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def filled(record: Record) -> dict[str, Array]:
    """The record's columns in table order, with NaN arrays for required ones that it lacks."""
    nothing = np.full(record.num_tokens, np.nan, np.float32)
    return {
        column.name: record.columns.get(column.name, nothing)
        for column in TABLE
        if column.required or column.name in record.columns
    }


def without_empty(columns: dict[str, Array]) -> dict[str, Array]:
    """The columns without those that hold no number at all: readers of every format give the same records."""
    return {name: values for name, values in columns.items() if not _is_empty(values)}


def _is_empty(values: Array) -> bool:
    return bool(values.dtype.kind == "f" and values.size and np.isnan(values.flat[0]) and np.isnan(values).all())


def _to_host(value: Any, kind: str) -> Array | None:
    """A tensor, on any device and of any float type, as an array of its own; arrays pass too."""
    if value is None:
        return None
    if hasattr(value, "detach"):
        value = value.detach().reshape(-1)
        value = (value.bool() if kind == "bool" else value.float()).cpu().numpy()
    return np.array(value, np.bool_ if kind == "bool" else np.float32).reshape(-1)
