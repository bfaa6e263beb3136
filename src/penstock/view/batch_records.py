"""Convert a micro-batch and its loss terms to records, with null on tokens without a measured value.

A micro-batch has 0.0 where a token has no log-probability, because arrays need a number. In a record that would count
as "probability 1" in every mean, for tokens that were never sampled. So records have null on them and on everything
the loss computed from them. Model predictions are null on the first token of a sequence, where nothing was predicted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.arrays import ALL_OR_NONE, Array, Cells, copied, known
from penstock.arrays import COLUMNS as GIVEN
from penstock.errors import InvalidInput
from penstock.packing import MicroBatch
from penstock.view.record import COLUMNS, OF_SAMPLE, TABLE, ExportColumn, Record, finite, form_of, without_empty

if TYPE_CHECKING:
    from penstock.train import Terms

_OF_BATCH = {column.attribute for column in TABLE if column.source == "batch"}
_COMPARED = {c.name for c in TABLE if c.null == "unsampled" or c.name.startswith("is_masked")}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchCopy:
    """A copy of a micro-batch and its loss terms on the host, safe to write after training has moved on."""

    batch: MicroBatch
    columns: dict[str, Cells]
    """[T, ...] by export name: every column of the table that the batch or the terms have."""
    rules: Mapping[str, Mapping[str, float | str]]

    @staticmethod
    def of(batch: MicroBatch, terms: Terms | None, *, omit: Collection[str] = ()) -> BatchCopy:
        """Copy what will be exported. This is the only part of exporting that costs the training thread time.

        `terms` is None for a batch without a loss.
        """
        columns: dict[str, Cells] = {}
        for column in TABLE:
            if column.name in omit:
                continue
            if column.source == "batch":
                found = copied(batch[column.attribute]) if column.attribute in batch else None
            else:
                found = _to_host(getattr(terms, column.attribute, None), column.kind)
            if found is None:
                continue
            if len(found) != batch.num_tokens:
                raise InvalidInput(
                    f"{column.attribute}: {len(found)} values for {batch.num_tokens} tokens; "
                    "give one per token of the micro-batch, including padding"
                )
            columns[column.name] = found
        trained = _to_host(getattr(terms, "trained", None), "bool")
        if trained is not None and len(trained) == batch.num_tokens:
            columns["loss_mask"] = (
                trained & batch["loss_mask"]
            )  # the loss may have been given a smaller mask than was packed
        own = [name for name in batch.columns if name not in _OF_BATCH and name not in omit]
        columns |= {name: copied(batch.columns[name]) for name in own}
        return BatchCopy(batch=batch, columns=columns, rules={} if terms is None else terms.rules)

    def records(
        self, fields: Mapping[str, Any], policy_version: int | None, *, untrained: bool = False
    ) -> Iterator[Record]:
        """Yield one record per sequence with a trained token, `untrained`: of all. Padding and dummies have none."""
        segments, columns = self.batch.segments, self._measured()
        forms = {name: form_of(values) for name, values in columns.items() if name not in COLUMNS}
        for i, (start, count) in enumerate(zip(segments.offsets.tolist(), segments.lengths.tolist(), strict=True)):
            own = slice(start, start + count)
            if not untrained and not columns["loss_mask"][own].any():
                continue
            named = self._named(i)
            mode, version = named["training_mode"], named["policy_version"]
            rule = self.rules.get(mode, self.rules.get(""))
            found = {name: values[own] for name, values in columns.items() if _applies(name, mode)}
            yield Record(
                fields={
                    **fields,
                    "micro_sequence_idx": i,
                    **named,
                    "staleness": None if policy_version is None or version is None else policy_version - version,
                    "rule": None if rule is None else {name: finite(value) for name, value in rule.items()},
                    "images": self._images(start, count),
                    "columns": forms or None,
                },
                columns=without_empty(found),
            )

    def _measured(self) -> dict[str, Cells]:
        """Return the columns with NaN on tokens without a measured value."""
        out, offsets = dict(self.columns), self.batch.segments.offsets
        absent = {column.name: self._unrecorded(column) for column in TABLE if column.null == "unrecorded"}
        for name, values in self.columns.items():
            null = COLUMNS[name].null if name in COLUMNS else "never"
            if null != "never":
                unsampled = absent["inference_logprobs"]
                out[name] = values.copy()
                out[name][{"unrecorded": absent.get(name), "unsampled": unsampled, "first": offsets}[null]] = np.nan
        return out

    def _unrecorded(self, column: ExportColumn) -> NDArray[np.bool_]:
        """Return [T] flags of tokens without a recorded value in a log-probability column.

        Packing fills missing values with 0.0. Trained tokens of a mode that requires the column always have it (packing
        rejects them otherwise), so there 0.0 is a real probability of 1. Anywhere else it is the filler.
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
        """Return the per-sample columns of a segment, None where empty or unknown."""
        out: dict[str, Any] = {}
        for name, column in OF_SAMPLE.items():
            if column.name == "run":
                out[name] = self.batch.run or None
                continue
            values = getattr(self.batch.segments, f"{column.name}s", None)
            value = None if values is None else values[i]
            if column.name == "rollout":
                out[name] = msgspec.json.decode(value) if value else None
                continue
            out[name] = (value or None) if column.is_text or value is None else known(int(value))
        return out

    def _images(self, start: int, count: int) -> list[dict[str, Any]]:
        """Describe the images of a sequence. Offsets count from its first token."""
        own = [image for image in self.batch.images if start <= image.offset < start + count]
        plain = ("hash", "merge", "length", "media_type", "width", "height", "num_bytes")
        return [
            {name: getattr(image, name) for name in plain} | {"grid": list(image.grid), "offset": image.offset - start}
            for image in own
        ]


def _applies(name: str, mode: str) -> bool:
    """Return whether a mode has this column. Supervised samples have no sampler to compare with."""
    return mode != "sft" or name not in _COMPARED


def _to_host(value: Any, kind: str) -> Array | None:
    """Copy a tensor of any device and float type, or an array, to a new array."""
    if value is None:
        return None
    if hasattr(value, "detach"):
        value = value.detach().reshape(-1)
        value = (value.bool() if kind == "bool" else value.float()).cpu().numpy()
    return np.array(value, np.bool_ if kind == "bool" else np.float32).reshape(-1)
