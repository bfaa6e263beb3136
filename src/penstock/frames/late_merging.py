"""Late columns that do not fit into metadata, such as teacher log-probabilities: they go into the group's frame.

Values travel as a frame of their own, whose samples have an id, a group and the late column. Whoever writes to storage
decodes the group's frame, gives its samples the values and writes a new frame, which takes the place of the old one:

    frame           samples a b c, without teacher_logprobs
    values          a: 5 numbers, c: 7 numbers
    new frame       samples a b c, a and c with teacher_logprobs: the same bytes as if they had been put with them

So a group has one frame at all times, and ranks, copies and checks know nothing of late columns. The price is that the
bytes of such a group are written twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.arrays import COLUMNS, NO_COLUMNS, TOPK, Own, Sample, Samples, Values, column_digests, sample_digests
from penstock.errors import CorruptFrame, InvalidInput
from penstock.frames.head import ANY_SIZE, Limits
from penstock.frames.late_columns import LATE_COLUMNS, LATE_IN_FRAME, NO_DIGEST
from penstock.frames.layout import Buffer
from penstock.frames.metadata import GroupMetadata
from penstock.frames.reading import decode
from penstock.frames.writing import FramePieces, encode, encode_group

_REQUIRED = ("token_ids", "loss_mask")


def is_late(column: str, own: Own = NO_COLUMNS) -> bool:
    """Return whether a column may be attached after the put. `own` are the run's own columns."""
    return column in LATE_COLUMNS or column in LATE_IN_FRAME or column in own


def check_late(column: str, *, is_own: bool) -> None:
    """Raise InvalidInput for a column that must be there when a group is put."""
    if column not in (*LATE_COLUMNS, *LATE_IN_FRAME) and not is_own:
        raise InvalidInput(
            f"attach {column!r:.60}: only {', '.join((*LATE_COLUMNS, *LATE_IN_FRAME))}, and columns of the run's own, "
            "may come after the put"
        )


def encode_values(column: str, values: Mapping[str, Mapping[str, Values | Mapping[str, Values]]]) -> bytes:
    """Return a frame with values by group and sample.

    >>> frame = encode_values("teacher_logprobs", {"g": {"g/0": [0.0, -0.5]}})
    >>> decode(frame)[0]["teacher_logprobs"].tolist()
    [0.0, -0.5]
    """
    check_late(column, is_own=column not in COLUMNS)
    return encode([_carrier(column, group, name, one) for group, own in values.items() for name, one in own.items()])


def _carrier(column: str, group: str, name: str, value: Any) -> Sample:
    """Return a sample that has only the values of one sample. Its tokens are zeros, which take no room."""
    given = dict(value) if isinstance(value, Mapping) else {column: value}
    allowed = TOPK if column in TOPK else (column,)
    if column not in given or not given.keys() <= {*allowed}:
        raise InvalidInput(
            f"attach {column}: sample {name!r:.80}: columns {', '.join(map(str, given))!r:.120}; give "
            f"{' and '.join(allowed)}"
        )
    if empty := [key for key, one in given.items() if one is None]:
        raise InvalidInput(
            f"attach {column}: sample {name!r:.80}: {min(empty)} is None; give its values, or the sample in `errors`"
        )
    tokens = np.zeros(max(_length(given[column]), 1), np.uint32)
    known = {key: one for key, one in given.items() if key in COLUMNS}
    try:
        return Sample(
            id=name,
            group=group,
            token_ids=tokens,
            columns={key: one for key, one in given.items() if key not in COLUMNS},
            **known,
        )
    except InvalidInput as error:
        raise InvalidInput(f"attach {column}: {error}") from None


def _length(value: Any) -> int:
    try:
        return len(value)
    except TypeError:  # one number for the sample
        return 1


class LateValuesFrame:
    """The values in a frame that `encode_values` made, checked against limits.

    >>> found = LateValuesFrame(encode_values("teacher_logprobs", {"g": {"g/0": [0.0, -0.5]}}), "teacher_logprobs")
    >>> list(found.by_group), list(found.digests["g"])
    (['g'], ['g/0'])
    """

    def __init__(self, frame: Buffer, column: str, *, own: Own = NO_COLUMNS, limits: Limits = ANY_SIZE) -> None:
        self.column, self.own = column, own
        samples = decode(frame, limits=limits).conformed(own)
        self._names = [name for name in samples.columns if name not in _REQUIRED]
        allowed = TOPK if column in TOPK else (column,)
        if not {column} <= {*self._names} <= {*allowed}:
            raise InvalidInput(f"attach {column}: a frame with the columns {', '.join(self._names)!r:.120}")
        self.by_group: dict[str, dict[str, Sample]] = {}
        """Group -> sample -> a sample that has only the values."""
        self.digests: dict[str, dict[str, bytes]] = {}
        """Group -> sample -> digest of the values."""
        for sample, digest in zip(samples, _digests(samples, self._names), strict=True):
            if sample.id in self.by_group.setdefault(sample.group, {}):
                raise InvalidInput(f"attach {column}: sample {sample.id!r:.80}: given twice")
            self.by_group[sample.group][sample.id] = sample
            self.digests.setdefault(sample.group, {})[sample.id] = digest

    def merged(self, group: str, samples: Samples) -> FramePieces:
        """Encode a group's samples with the values that they get. Raises InvalidInput for values that do not fit."""
        given = self.by_group[group]
        return encode_group([self._with(one, given[one.id]) if one.id in given else one for one in samples])

    def _with(self, sample: Sample, given: Sample) -> Sample:
        where = f"attach {self.column}: group {sample.group!r:.80} sample {sample.id!r:.80}"
        cells = {name: values for name in self._names if (values := given.get(name)) is not None}
        column = self.own.get(self.column) or COLUMNS[self.column]
        if column.per == "token" and given.num_tokens != sample.num_tokens:
            raise InvalidInput(
                f"{where}: {given.num_tokens:,} values, and the sample has {sample.num_tokens:,} tokens; give one per "
                "token of `sample.token_ids`, prompt included"
            )
        own = {self.own[name]: values for name, values in cells.items() if name in self.own}
        try:
            return sample.replace(columns=own, **{name: v for name, v in cells.items() if name not in self.own})
        except InvalidInput as error:
            raise InvalidInput(f"{where}: {error}") from None


def _digests(samples: Samples, names: list[str]) -> list[bytes]:
    parts = [column_digests(samples, name) for name in names]
    return [xxhash.xxh3_128_digest(b"".join(row)) for row in zip(*parts, strict=True)]


def new_values(before: GroupMetadata, after: GroupMetadata, samples: Samples) -> dict[str, dict[int, bytes]]:
    """Return the digests of the values that a group's newer frame has and the one before had not, by column and
    sample. `after` and `samples` are of the newer frame."""
    found = {}
    for column in [name for name in samples.columns if name not in LATE_COLUMNS and is_late(name, samples.own)]:
        names = [name for name in samples.columns if name in (TOPK if column in TOPK else (column,))]
        digests, rows = _digests(samples, names), np.flatnonzero(_has(after, column) & ~_has(before, column))
        found[column] = {row: digests[row] for row in rows.tolist()}
    return {column: digests for column, digests in found.items() if digests}


def with_digests(before: GroupMetadata, found: Mapping[str, Mapping[int, bytes]]) -> dict[str, bytes]:
    """Return `LateColumns.digests` of a group, with further ones by column and sample."""
    size, digests = len(NO_DIGEST), dict(before.late.digests)
    for column, given in found.items():
        known = digests.get(column, NO_DIGEST * before.num_samples)
        each = [given.get(row, known[row * size : (row + 1) * size]) for row in range(before.num_samples)]
        digests[column] = b"".join(each)
    return digests


def _has(metadata: GroupMetadata, column: str) -> NDArray[np.bool_]:
    """Return [samples], those that have a column."""
    if column not in metadata.columns:
        return np.zeros(metadata.num_samples, np.bool_)
    return np.frombuffer(metadata.has, np.bool_).reshape(metadata.num_samples, -1)[:, metadata.columns.index(column)]


def read_group(frame: Buffer, digests: tuple[bytes, ...], group: str) -> Samples:
    """Decode a group's frame. Raises CorruptFrame unless it holds the samples with these digests."""
    samples = decode(frame, limits=ANY_SIZE)
    if tuple(sample_digests(samples)) != digests:
        raise CorruptFrame(f"group {group!r}: the stored samples are not those of the group's metadata")
    return samples
