"""Read Penstock's own files as samples, for `penstock convert`: frames, runs and token exports. Writes frames.

a run's folder      every group that the plane still has, in order of arrival, as it was put: waiting, trained,
                    dropped, quarantined and evaluation groups; also while the plane is running
a token export      the samples that were trained, from JSON lines or Parquet written by `TokenExporter`
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np

from penstock.arrays import TOKEN_COLUMNS, Cells, ImageSpan, Ragged, Sample
from penstock.capture import read_span
from penstock.errors import InvalidInput, PenstockError
from penstock.frames import encode, read_frames, write_frames
from penstock.integrations.formats.shared import Lost, Place
from penstock.log import State, as_corrupt, plane_of
from penstock.runs import kept_groups, stored_group
from penstock.view import OF_SAMPLE, TABLE, Record, Skipped, read_file

_OF_BATCH = {column.name: column.attribute for column in TABLE if column.source == "batch"}
_DERIVED = ("position_ids",)
_UNTRAINED = (State.DROPPED, State.QUARANTINED, State.EVALUATION)
_LEFT_OUT = "left out of its group: too long, filtered or scored as error"


# ------------------------------------------------------------------ frames


def read_frame_file(place: Place, lost: Lost) -> Iterator[Sample]:  # noqa: ARG001 - nothing is lost
    """Yield the samples of a file of frames."""
    with place.reading() as file:
        for frame in read_frames(file, name=place.name):
            yield from frame


def write_frame_file(samples: Iterable[Sample], place: Place, lost: Lost) -> None:  # noqa: ARG001 - nothing is lost
    """Write one frame per group."""
    with place.writing() as file:
        if not write_frames(file, samples):
            file.write(encode([]))  # an empty file is no frame: `decode` rejects it


# ------------------------------------------------------------------ runs


def read_run_groups(place: Place, lost: Lost) -> Iterator[Sample]:
    """Yield the samples of every group that the run still has. Counts groups freed during the read, and samples that no
    step takes."""
    folder = plane_of(place.path)
    if folder is None:
        raise InvalidInput(f"{place.name}: not a run; give the folder that a plane was opened on")
    for row in kept_groups(folder):
        try:
            with as_corrupt(folder):
                samples, kept = stored_group(folder, row.id, row.location)
        except PenstockError as error:
            # Either the frame is damaged, or a running plane has freed it since it was listed. Ask the log again.
            if any(row.id == now.id for now in kept_groups(folder)):
                raise InvalidInput(f"{place.name} group {row.id!r}: {error}") from None
            lost.unread["group that was freed during the read"] += 1
            continue
        if row.state in _UNTRAINED:
            why = f"dropped: {row.reason}" if row.state is State.DROPPED else row.state.name.lower()
            lost.untrained[why] += len(samples)
        elif left_out := list(kept).count(0):
            lost.untrained[_LEFT_OUT] += left_out
        yield from samples


# ------------------------------------------------------------------ token exports


def read_export(place: Place, lost: Lost) -> Iterator[Sample]:
    """Yield the samples of one rank's file of one step. A line that is not a record ends the conversion.

    The trainer's own columns (`trainer_logprobs`, `entropy`, ...) have no place in a sample and are counted.
    """
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
        raise InvalidInput(f"{skipped.reasons[0]}; not a record of a token export; remove the line or export again")


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
        raise InvalidInput("an image without grid and merge, exported by an earlier version; export it again")
    return read_span({name: image[name] for name in ImageSpan.__struct_fields__ if name in image}, "image")


def _once(name: str, cells: Cells) -> Cells:
    """Return one number for a column that allows it and has the same value on every token."""
    column = TOKEN_COLUMNS.get(name)
    if column is None or column.per != "either" or isinstance(cells, Ragged) or len(cells) == 0:
        return cells
    bits = cells.view(np.uint32)  # compares bits, so that NaN equals itself
    return cells[0].reshape(()) if bool((bits == bits[0]).all()) else cells
