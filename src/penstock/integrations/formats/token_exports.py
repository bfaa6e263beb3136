"""Token exports, read as the samples that were trained: what `TokenExporter` wrote, as JSON lines or Parquet.

What went in becomes a sample again; what the trainer and the loss made of it (`trainer_logprobs`, `entropy`, ...) has
no place in one, and is counted as left. A column that has one number on all tokens is given once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from penstock.arrays import TOKEN_COLUMNS, Cells, ImageSpan, Ragged, Sample
from penstock.errors import InvalidInput
from penstock.integrations.environments.lost import Lost
from penstock.integrations.formats.file_or_stream import Place
from penstock.view import OF_SAMPLE, TABLE, Record, Skipped, read_file

_OF_BATCH = {column.name: column.attribute for column in TABLE if column.source == "batch"}
_DERIVED = ("position_ids",)


def read_export(place: Place, lost: Lost) -> Iterator[Sample]:
    """The samples of one rank's file of one step; a line that is no record ends the conversion."""
    skipped = Skipped()
    for number, record in enumerate(read_file(place.path, skipped)):
        _check(skipped)
        try:
            yield _sample(record, lost)
        except (InvalidInput, TypeError, msgspec.ValidationError) as error:
            raise InvalidInput(f"{place.name} record {number}: {error}") from None
    _check(skipped)


def _check(skipped: Skipped) -> None:
    if skipped.lines:
        raise InvalidInput(f"{skipped.reasons[0]}; not a record of a token export, remove the line or export again")


def _sample(record: Record, lost: Lost) -> Sample:
    own = record.own
    taken = {**_OF_BATCH, **{name: name for name in own}}
    lost.unread.update(name for name in record.columns if name not in taken)
    columns = {
        taken[name]: _once(taken[name], cells)
        for name, cells in record.columns.items()
        if name in taken and name not in _DERIVED
    }
    facts = {column.name: record.fields.get(name) for name, column in OF_SAMPLE.items()}
    given: dict[str, Any] = {name: value for name, value in facts.items() if value not in (None, "")}
    images = [_span(image) for image in record.fields.get("images") or ()]
    return Sample(
        **given, images=images, columns={name: columns.pop(name) for name in own if name in columns}, **columns
    )


def _span(image: dict[str, Any]) -> ImageSpan:
    if "grid" not in image:
        raise InvalidInput("an image without grid and merge; exported by an earlier version, which left them out")
    return msgspec.convert([image.get(name) for name in ImageSpan.__struct_fields__], ImageSpan)


def _once(name: str, cells: Cells) -> Cells:
    """One number for a column that may be given so and has it on every token."""
    column = TOKEN_COLUMNS.get(name)
    if column is None or column.per != "either" or isinstance(cells, Ragged) or len(cells) == 0:
        return cells
    bits = cells.view(np.uint32)
    return cells[0].reshape(()) if bool((bits == bits[0]).all()) else cells
