"""A `.penstock` file: frames end to end, one per group, read one at a time within the reader's limits.

The first 48 bytes of a frame contain its length. So a file needs no index, a pipe can be read like a disk file, and
files are joined with `cat`. Sizes are compared with the limits before memory is allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from penstock.arrays import Ragged, Sample, Samples
from penstock.errors import CorruptFrame
from penstock.frames.codings import Profile
from penstock.frames.head import DEFAULT_LIMITS, Limits
from penstock.frames.layout import PREFIX_SIZE, frame_size
from penstock.frames.reading import decode
from penstock.frames.writing import encode

FRAME_SAMPLES = 1024
"""Most samples in one frame. A larger group continues in the next frame."""
_CHUNK = 1 << 20


def write_frames(file: BinaryIO, samples: Iterable[Sample], *, profile: Profile = "small") -> int:
    """Write samples as they come, one frame per run of samples of one group. Returns the number of frames.

    >>> import io
    >>> file = io.BytesIO()
    >>> write_frames(file, [Sample(group=name, token_ids=[1, 2]) for name in "aab"])
    2
    >>> file.seek(0)
    0
    >>> [[sample.group for sample in frame] for frame in read_frames(file)]
    [['a', 'a'], ['b']]
    """
    count = 0
    for batch in by_group(samples, most=FRAME_SAMPLES):
        file.write(encode(batch, profile))
        count += 1
    return count


def by_group(samples: Iterable[Sample], *, most: int | None = None) -> Iterator[list[Sample]]:
    """Split samples into runs of one group whose columns fit into one frame. `most` bounds a run."""
    batch: list[Sample] = []
    forms: dict[str, Any] = {}
    for sample in samples:
        found = _forms(sample)
        fits = all(forms.get(name, form) == form for name, form in found.items())
        if batch and (sample.group != batch[0].group or len(batch) == most or not fits):
            yield batch
            batch, forms = [], {}
        batch.append(sample)
        forms |= found
    if batch:
        yield batch


def _forms(sample: Sample) -> dict[str, Any]:
    """Return what the samples of one frame must agree on, by column: the trailing shape, and own columns'
    declarations.
    """
    shapes = {
        name: cells.shape[1:]
        for name, cells in sample.columns.items()
        if not isinstance(cells, Ragged) and cells.ndim > 1
    }
    return {name: (shapes.get(name), _described(sample, name)) for name in {*shapes, *sample.own}}


def _described(sample: Sample, name: str) -> str:
    return repr(sample.own[name].described()) if name in sample.own else ""  # as text, because NaN != NaN


def read_frames(file: BinaryIO, *, name: str = "file", limits: Limits = DEFAULT_LIMITS) -> Iterator[Samples]:
    """Read the frames of a file, one at a time. CorruptFrame names the bad frame by its number, from 0."""
    for number, data in enumerate(raw_frames(file, name=name, limits=limits)):
        try:
            yield decode(data, limits=limits)
        except CorruptFrame as error:
            raise CorruptFrame(f"{name} frame {number}: {error}") from None


def raw_frames(file: BinaryIO, *, name: str = "file", limits: Limits = DEFAULT_LIMITS) -> Iterator[bytes]:
    """Read the frames of a file as bytes, each of the length in its prefix. Nothing else is checked."""
    number = 0
    while prefix := _read(file, PREFIX_SIZE):
        try:
            size = frame_size(prefix)
        except CorruptFrame as error:
            raise CorruptFrame(f"{name} frame {number}: {error}") from None
        if size > limits.max_bytes:
            raise CorruptFrame(
                f"{name} frame {number}: says {size} bytes; this reader takes {limits.max_bytes}, pass larger limits"
            )
        data = prefix + _read(file, size - PREFIX_SIZE)
        if len(data) != size:
            raise CorruptFrame(
                f"{name} frame {number}: {len(data)} bytes where its prefix says {size}; the file was cut"
            )
        yield data
        number += 1


def _read(file: BinaryIO, size: int) -> bytes:
    """Read up to `size` bytes, in parts: a false size allocates no memory, and a pipe may return less at a time."""
    parts: list[bytes] = []
    while size > 0 and (part := file.read(min(size, _CHUNK))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
