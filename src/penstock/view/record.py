"""The record of one trained sequence: facts about it, and one array per column along its tokens.

One table names every column, where it comes from (the micro-batch or the loss) and what kind of number it holds; the
writers, the reader and the viewer loop over it. Columns marked required are in every record, filled with null where
they do not apply; the others are there when the batch or the loss has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from penstock.arrays.columns import Array
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
    kind: Literal["int", "bool", "float"]
    required: bool = True


def _of(source: Literal["batch", "terms"], kind: Literal["int", "bool", "float"], *names: str) -> list[ExportColumn]:
    pairs = (name.partition("=")[::2] for name in names)
    return [
        ExportColumn(name=a.rstrip("?"), source=source, attribute=b or a.rstrip("?"), kind=kind, required=a[-1] != "?")
        for a, b in pairs
    ]


TABLE: tuple[ExportColumn, ...] = (
    *_of("batch", "int", "token_ids", "position_ids"),
    *_of("batch", "bool", "loss_mask"),
    *_of("batch", "float", "advantages", "rewards", "inference_logprobs=logprobs"),
    *_of("terms", "float", "trainer_logprobs", "entropy", "mismatch_kl", "log_importance_ratio=log_ratio"),
    *_of("terms", "float", "importance_ratio=ratio", "prob_delta"),
    *_of("terms", "bool", "is_masked=masked", "is_masked_high=masked_high", "is_masked_low=masked_low"),
    *_of("terms", "float", "loss?"),
    *_of("batch", "float", "teacher_logprobs?", "temperatures?"),
    *_of("batch", "float", "rl_weights?", "ce_weights?", "ref_kl_weights?"),
    *_of("batch", "int", "weight_versions?"),
)
COLUMNS = {column.name: column for column in TABLE}
FACTS: dict[str, Any] = {
    "schema_version": int,
    "step": int,
    "export_step": int,
    "rank": int,
    "micro_step": int,
    "micro_sequence_idx": int,
    "export_sequence_idx": int,
    "run_id": str,
    "env_name": str,
    "training_mode": str,
    "sample_id": str,
    "group_id": str,
    "policy_version": int,
    "staleness": int,
    "rule": dict[str, float | str],
    "images": list[dict[str, Any]],
}
"""Fields of a record that are not arrays, and their types; any may be null."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Record:
    """One sequence as it was trained."""

    facts: dict[str, Any]
    """The fields of FACTS; None where unknown."""
    columns: dict[str, Array]
    """[T] by name. Floats are float32 with NaN for null; a column that is null on every token is absent."""

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
    """[T] by export name: all of the table that batch and terms have."""
    rules: Mapping[str, Mapping[str, float | str]]

    @staticmethod
    def of(batch: MicroBatch, terms: Terms) -> Snapshot:
        """Copy what will be exported; the only part of exporting that costs the training thread time."""
        columns: dict[str, Array] = {}
        for column in TABLE:
            if column.source == "batch":
                value = batch.columns.get(column.attribute)
                found = None if value is None else np.array(value)
            else:
                found = _to_host(getattr(terms, column.attribute), column.kind)
            if found is None:
                continue
            if found.shape != (batch.num_tokens,):
                raise InvalidInput(
                    f"{column.attribute}: {found.size} values for {batch.num_tokens} tokens; "
                    "give one per token of the micro-batch, padding included"
                )
            columns[column.name] = found
        return Snapshot(batch=batch, columns=columns, rules=terms.rules)

    def records(self, facts: Mapping[str, Any], policy_version: int | None) -> Iterator[Record]:
        """One record per sequence that has a trained token; padding and dummies have none."""
        segments = self.batch.segments
        for i, (start, count) in enumerate(zip(segments.offsets.tolist(), segments.lengths.tolist(), strict=True)):
            own = slice(start, start + count)
            if not self.columns["loss_mask"][own].any():
                continue
            version = known(int(segments.policy_versions[i]))
            mode = segments.modes[i]
            rule = self.rules.get(mode, self.rules.get(""))
            yield Record(
                facts={
                    **facts,
                    "micro_sequence_idx": i,
                    "env_name": segments.envs[i] or None,
                    "training_mode": mode,
                    "sample_id": segments.ids[i] or None,
                    "group_id": segments.groups[i] or None,
                    "policy_version": version,
                    "staleness": None if policy_version is None or version is None else policy_version - version,
                    "rule": None if rule is None else dict(rule),
                    "images": self._images(start, count),
                },
                columns={name: values[own] for name, values in self.columns.items() if _applies(name, mode)},
            )

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


_COMPARED = {c.name for c in TABLE if c.attribute.startswith("masked") or "ratio" in c.attribute} | {
    "mismatch_kl",
    "prob_delta",
}


def _applies(name: str, mode: str) -> bool:
    """Supervised samples have no sampler to compare with, whatever their neighbours in the micro-batch have."""
    return mode != "sft" or name not in _COMPARED


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
    return bool(values.dtype.kind == "f" and len(values) and np.isnan(values[0]) and np.isnan(values).all())


def _to_host(value: Any, kind: str) -> Array | None:
    """A tensor, on any device and of any float type, as an array of its own; arrays pass too."""
    if value is None:
        return None
    if hasattr(value, "detach"):
        value = value.detach().reshape(-1)
        value = (value.bool() if kind == "bool" else value.float()).cpu().numpy()
    return np.array(value, np.bool_ if kind == "bool" else np.float32).reshape(-1)
