"""An index of a step's records: one small row per sample, and where its line lies.

Built by reading the step once; the rows are what the viewer lists, filters and sorts, the lines are served as they
are when a sample is opened.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import UnknownKey
from penstock.view.jsonl import MalformedLine, encode_line, parse_line
from penstock.view.masking_rules import disagreement
from penstock.view.reader import Skipped, StepFolder, numbered_lines, open_records
from penstock.view.record import OF_SAMPLE, Record
from penstock.view.tally import Tally, reward_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a record is."""

    path: Path
    offset: int
    """Byte offset of its line; the row number in a Parquet file."""
    num_bytes: int
    """Length of its line; 0 in a Parquet file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepIndex:
    """A step's samples."""

    rows: list[dict[str, Any]]
    places: list[Place]
    summary: dict[str, Any]
    skipped: Skipped

    @staticmethod
    def of(step: StepFolder) -> StepIndex:
        rows: list[dict[str, Any]] = []
        places: list[Place] = []
        tally, skipped = Tally(), Skipped()
        for path in step.files().values():
            for place, record in _placed(path, skipped):
                tally.add(record)
                rows.append({"index": len(rows), **describe(record)})
                places.append(place)
        return StepIndex(rows=rows, places=places, summary=tally.as_dict(), skipped=skipped)

    def line(self, index: int) -> bytes:
        """A record as one line of strict JSON."""
        if not 0 <= index < len(self.places):
            raise UnknownKey(f"sample {index}: the step has {len(self.places)}, counted from 0")
        place = self.places[index]
        if place.num_bytes == 0:
            from penstock.view.parquet import read_parquet

            rows = enumerate(read_parquet(place.path))
            return next(encode_line(record) for row, record in rows if row == place.offset)
        with open_records(place.path) as file:
            file.seek(place.offset)
            return file.read(place.num_bytes)


def _placed(path: Path, skipped: Skipped) -> Any:
    if path.suffix == ".parquet":
        from penstock.view.parquet import read_parquet

        for row, record in enumerate(read_parquet(path)):
            yield Place(path=path, offset=row, num_bytes=0), record
        return
    for number, offset, line in numbered_lines(path, skipped):
        try:
            record = parse_line(line)
        except MalformedLine as error:
            skipped.add(f"{path.name}:{number}", error)
            continue
        yield Place(path=path, offset=offset, num_bytes=len(line)), record


def describe(record: Record) -> dict[str, Any]:
    """What the list shows of a sample, and what it is filtered and sorted by."""
    columns, facts, mask = record.columns, record.facts, record.columns["loss_mask"]
    masked = columns.get("is_masked")
    return {
        **{name: facts.get(name) for name in (*OF_SAMPLE, "rank", "micro_step", "staleness")},
        "tokens": record.num_tokens,
        "loss_tokens": int(np.count_nonzero(mask)),
        "reward": reward_of(record),
        "advantage": _mean(columns.get("advantages"), mask),
        "masked": None if masked is None else int(np.count_nonzero(masked)),
        "max_kl": _most(columns.get("mismatch_kl"), mask),
        "mean_kl": _mean(columns.get("mismatch_kl"), mask),
        "max_entropy": _most(columns.get("entropy"), mask),
        "mean_entropy": _mean(columns.get("entropy"), mask),
        "disagreement": disagreement(record),
        "images": len(facts.get("images") or ()),
    }


def _finite(values: Any, mask: Any) -> Any:
    chosen = np.zeros(0) if values is None else values[mask]
    return chosen[np.isfinite(chosen)]


def _most(values: Any, mask: Any) -> float | None:
    finite = _finite(values, mask)
    return float(finite.max()) if len(finite) else None


def _mean(values: Any, mask: Any) -> float | None:
    finite = _finite(values, mask)
    return float(finite.mean(dtype=np.float64)) if len(finite) else None
