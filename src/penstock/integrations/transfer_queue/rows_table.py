"""Print what is in the storage of a queue: its first rows, with their tags and the first values of their columns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np

from penstock.errors import CorruptFile
from penstock.integrations.transfer_queue.journal import RUN, Kept, Place, parse_place, read_history
from penstock.integrations.transfer_queue.typed_cells import VALUE, decode_value
from penstock.storage import Gone, KeptStorage, is_object_url, open_storage, read_marker

MAX_ROWS = 20
_MAX_VALUES, _MAX_VALUE_BYTES = 8, 1 << 16
_MAX_TEXT = 100


def is_queue(where: str) -> bool:
    """Check whether an address is the storage of a queue."""
    if not is_object_url(where) and not (Path(where) / "marker").is_file():
        return False
    with closing(open_storage(where, create=False)) as storage:
        try:
            found = read_marker(storage)
        except CorruptFile:
            return False
        return found is not None and found.run == RUN


def queue_lines(where: str) -> Iterator[str]:
    """Yield the lines to print. Shows at most `MAX_ROWS` rows, and cuts each value to one line."""
    with closing(open_storage(where, create=False)) as storage:
        history = read_history(storage)
        rows = [(partition, key, kept) for partition, keys in history.rows.items() for key, kept in keys.items()]
        counts = ", ".join(f"{partition} {len(keys):,}" for partition, keys in history.rows.items() if keys)
        yield f"{storage.url}: {len(rows):,} keys{f' ({counts})' if counts else ''}"
        if history.keyless:
            yield f"{len(history.keyless):,} rows without a key are not shown"
        yield from (f"not readable: {text}" for text in islice(history.damaged, MAX_ROWS))
        for partition, key, kept in rows[:MAX_ROWS]:
            yield _cut(f"\n{partition} {key if key.isprintable() else repr(key)}  {decode_value(kept.tag)!r}", 200)
            yield from _columns(storage, kept)
        if len(rows) > MAX_ROWS:
            yield f"\n{len(rows) - MAX_ROWS:,} more keys are not shown"


def _columns(storage: KeptStorage, kept: Kept) -> Iterator[str]:
    places = {name: parse_place(text) for name, text in kept.columns.items()}
    width = max((len(name) for name in places), default=0)
    for name, place in places.items():
        shape = f"{place.cell.kind}{list(place.cell.shape)}" if place.cell.kind != VALUE else VALUE
        yield _cut(f"  {name if name.isprintable() else repr(name):{width}}  {shape:16}  {_values(storage, place)}")


def _values(storage: KeptStorage, place: Place) -> str:
    """Return the first values of a column as text."""
    cell = place.cell
    if cell.kind == VALUE and cell.size > _MAX_VALUE_BYTES:
        return f"({cell.size:,} bytes)"
    try:
        dtype = np.dtype("uint8" if cell.kind == VALUE else cell.kind)
    except TypeError:  # bfloat16 and others that numpy does not have
        return f"({cell.size:,} bytes)"
    data = np.empty(cell.size if cell.kind == VALUE else min(cell.size, _MAX_VALUES * dtype.itemsize), np.uint8)
    try:
        storage.read_into([(place.location, place.start, data.data)])
    except Gone:  # cleared since the journal was read
        return "(cleared)"
    if cell.kind == VALUE:
        return repr(decode_value(data))
    more = " ..." if cell.size > len(data) else ""
    return " ".join(str(value) for value in data.view(dtype).tolist()) + more


def _cut(text: str, most: int = _MAX_TEXT) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
