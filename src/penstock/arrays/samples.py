"""Many samples as columns: one ragged array per column instead of one object per sample.

This is the form that is encoded, decoded, planned and packed. It is a sequence of `Sample`, whose arrays are views into
the columns. The length of a column's row says how the sample has it: 0 absent, 1 one number, T per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from operator import attrgetter
from typing import overload

import numpy as np
from numpy.typing import NDArray

from penstock.arrays.columns import NO_VERSION, TEXT_COLUMNS, TOKEN_COLUMNS, Array, Cells, Column
from penstock.arrays.counts import known
from penstock.arrays.images import ImageSpan
from penstock.arrays.own_columns import NO_COLUMNS, Own, joined_own, table_with
from penstock.arrays.ragged import LARGE_BYTES, Offsets, Pieced, Ragged, joined, lengths_of, offsets_of
from penstock.arrays.run_lengths import MaskRuns
from penstock.arrays.sample import Sample
from penstock.errors import InvalidInput, UnknownKey


class Samples(Sequence[Sample]):
    """A batch of samples in columns.

    >>> batch = Samples.of([Sample(id="a", token_ids=[1, 2], rewards=1.0), Sample(id="b", token_ids=[3])])
    >>> batch.lengths.tolist(), batch["token_ids"].values.tolist(), batch["rewards"].lengths.tolist()
    ([2, 1], [1, 2, 3], [1, 0])
    """

    def __init__(
        self,
        *,
        columns: dict[str, Ragged],
        text: dict[str, tuple[str, ...]],
        policy_versions: NDArray[np.int64],
        images: tuple[tuple[ImageSpan, ...], ...] | None = None,
        own: Own = NO_COLUMNS,
    ) -> None:
        self.columns = columns
        """Ragged columns by name, in table order; token_ids and loss_mask are always there."""
        self.text = text
        """id, group, prompt, env, run, mode and rollout of each sample."""
        self.policy_versions = policy_versions
        """[n] the oldest policy version of each sample; -1 = not known."""
        self.images = images
        """Image spans of each sample; None when no sample has any."""
        self.own = own
        """Declarations of the columns that are not in the table."""
        self.table = table_with(own)
        """The possible columns along the tokens, in order."""

    @staticmethod
    def of(samples: Iterable[Sample], *, pieced: bool = False) -> Samples:
        """Join samples into columns. A `Samples` is returned unchanged. With `pieced`, large rows of bytes are not
        copied, so the samples' arrays must not change while the result is in use."""
        if isinstance(samples, Samples):
            return samples
        given: object = samples
        if isinstance(given, Sample) or not isinstance(given, Iterable):
            raise InvalidInput(f"samples: a {type(samples).__name__}; give a list of penstock.Sample")
        rows = list(samples)
        try:
            cells = [row.columns for row in rows]
        except AttributeError:
            found: list[object] = [*rows]
            i, wrong = next((i, row) for i, row in enumerate(found) if not isinstance(row, Sample))
            raise InvalidInput(f"samples[{i}]: a {type(wrong).__name__}; give penstock.Sample objects") from None
        lengths = [len(one["token_ids"]) for one in cells]
        offsets = np.array([*accumulate(lengths, initial=0)], np.int64)
        present = cells[0].keys() if cells else set[str]()
        same = all(one.keys() == present for one in cells)  # the usual batch: all samples have the same columns
        if not same:
            present = {name for one in cells for name in one}
        own = joined_own((row.own for row in rows), "samples") if any(row.own for row in rows) else NO_COLUMNS
        table = table_with(own)
        columns: dict[str, Ragged] = {}
        for name, column in table.items():
            if same and name in present and name in _PLAIN:
                columns[name] = Ragged(joined([one[name] for one in cells]), offsets)
            elif name in present or name in _ALWAYS:
                columns[name] = _join(column, [one.get(name) for one in cells], offsets, pieced=pieced)
        versions = [row.policy_version for row in rows]
        text = zip(*map(_TEXT, rows), strict=True) if rows else ((),) * len(TEXT_COLUMNS)
        return Samples(
            columns=columns,
            text=dict(zip(TEXT_COLUMNS, text, strict=True)),
            policy_versions=np.array([NO_VERSION if v is None else v for v in versions], np.int64),
            images=_unless_none(tuple(row.images for row in rows)),
            own=own,
        )

    @property
    def offsets(self) -> Offsets:
        """[n + 1] where each sample's tokens start in the per-token columns that all samples have."""
        return self.columns["token_ids"].offsets

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """[n] tokens of each sample."""
        return lengths_of(self.offsets)

    @cached_property
    def loss_tokens(self) -> NDArray[np.int64]:
        """[n] trained tokens of each sample."""
        return trained_tokens(self.columns["loss_mask"].values, self.offsets, self.lengths)

    def find_loss_tokens(self) -> None:
        """Compute `loss_tokens` from the runs of the mask, for one who needs both: that takes half the time where the
        runs are few."""
        runs, edges = self.trained.on, self.offsets.tolist()
        if "loss_tokens" in self.__dict__ or not runs or len(runs) > 2 * len(self):
            return
        found, i = [0] * len(self), 0
        for a, b in runs:
            while edges[i + 1] <= a:
                i += 1
            while b > edges[i + 1]:  # a run over the end of a sample: in masks that were not checked
                found[i] += edges[i + 1] - a
                i, a = i + 1, edges[i + 1]
            found[i] += b - a
        self.loss_tokens = np.array(found, np.int64)

    @cached_property
    def trained(self) -> MaskRuns:
        """The loss mask of all samples end to end, as runs."""
        return MaskRuns.of(self.columns["loss_mask"].values)

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def ids(self) -> tuple[str, ...]:
        return self.text["id"]

    def __len__(self) -> int:
        return len(self.policy_versions)

    @overload
    def __getitem__(self, index: str) -> Ragged: ...
    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Samples: ...
    def __getitem__(self, index: str | int | slice) -> Ragged | Sample | Samples:
        if isinstance(index, str):
            try:
                return self.columns[index]
            except KeyError:
                raise UnknownKey(f"no sample has column {index!r}; present: {', '.join(self.columns)}") from None
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        # range() resolves negative numbers and raises IndexError, which ends iteration over a Sequence.
        return self._row(range(len(self))[index])

    def _row(self, i: int) -> Sample:
        columns: dict[str, Cells] = {}
        count = int(self.lengths[i])
        for name, column in self.columns.items():
            row = column[i]
            if len(row) == 0:
                continue
            per = self.table[name].per
            scalar = per == "sample" or (per == "either" and len(row) == 1)
            assert scalar or len(row) == count
            columns[name] = row.reshape(()) if scalar else row
        text = {name: values[i] for name, values in self.text.items()}
        images = () if self.images is None else self.images[i]
        own = {name: column for name, column in self.own.items() if name in columns} if self.own else NO_COLUMNS
        return Sample.trusted(columns, text, known(int(self.policy_versions[i])), images, own)

    def take(self, rows: NDArray[np.intp] | Sequence[int]) -> Samples:
        """Return the chosen samples, in that order."""
        rows = np.asarray(rows, np.intp)
        offsets = offsets_of(self.lengths[rows])
        columns = {
            name: column.take(rows, offsets if column.offsets is self.offsets else None)
            for name, column in self.columns.items()
        }
        order = rows.tolist()
        # Drop columns that none of the chosen samples has, so equal samples make equal batches.
        columns = {n: c for n, c in columns.items() if n in _ALWAYS or c.offsets[-1] > 0}
        return Samples(
            columns=columns,
            text={name: tuple(values[i] for i in order) for name, values in self.text.items()},
            policy_versions=self.policy_versions[rows],
            images=None if self.images is None else _unless_none(tuple(self.images[i] for i in order)),
            own={name: column for name, column in self.own.items() if name in columns},
        )

    def conformed(self, declared: Own) -> Samples:
        """Return the samples with their own columns as declared. Raises InvalidInput for an undeclared column."""
        if all(column is declared.get(name) for name, column in self.own.items()):
            return self
        return Samples.of([sample.conformed(declared) for sample in self])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Samples):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Samples({len(self)} samples, {self.num_tokens} tokens, columns={list(self.columns)})"


def trained_tokens(mask: NDArray[np.bool_], offsets: Offsets, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [n], how many of the first `lengths[i]` tokens of each sample are trained."""
    # numpy vectorizes count_nonzero of a bool slice. A reduceat over all samples is ten times slower.
    rows = zip(offsets[:-1].tolist(), lengths.tolist(), strict=True)
    return np.array([np.count_nonzero(mask[a : a + n]) for a, n in rows], np.int64)


_ALWAYS = ("token_ids", "loss_mask")
_PLAIN = frozenset(
    name
    for name, column in TOKEN_COLUMNS.items()
    if column.per == "token" and not column.trailing and not column.ragged
)
"""Columns of the table with one value per token, which a sample has for all of its tokens or not at all."""
_TEXT = attrgetter(*TEXT_COLUMNS)


def _unless_none(images: tuple[tuple[ImageSpan, ...], ...]) -> tuple[tuple[ImageSpan, ...], ...] | None:
    """Normalize: None means that no sample has an image."""
    return images if any(images) else None


def _join(column: Column, values: Sequence[Cells | None], offsets: Offsets, *, pieced: bool) -> Ragged:
    """Join one column of all samples. Shares `offsets` when every sample has the column per token."""
    name = column.name
    given = [v for v in values if v is not None]
    if not given:
        return Ragged(np.zeros(0, column.numpy), offsets)
    if column.ragged:
        nothing = Ragged.empty(0, column.numpy)
        return Ragged.of([nothing if v is None else v for v in values], offsets if len(given) == len(values) else None)
    # Without trailing dimensions every shape[1:] is (), and a column per token is never one number.
    shapes = {v.shape[1:] for v in given} if column.trailing else {()}
    if len(shapes) > 1:
        raise InvalidInput(f"{name}: samples of one batch have trailing shapes {sorted(shapes)}; give them one shape")
    full = len(given) == len(values) and (column.per == "token" or all(v.ndim == 1 for v in given))
    if full:
        parts = given
    else:
        empty = np.zeros((0, *next(iter(shapes))), given[0].dtype)
        parts = [empty if v is None else v if v.ndim else v.reshape(1) for v in values]
    if pieced and full and column.trailing and _stays(parts):
        return Pieced([[part] for part in parts], offsets)
    return Ragged.of(parts, offsets if full else None)


def _stays(parts: Sequence[Array]) -> bool:
    """Return whether rows are written without coding, and are large enough for that to pay."""
    return (
        len({part.dtype for part in parts}) == 1
        and parts[0].itemsize <= 2
        and sum(part.nbytes for part in parts) >= LARGE_BYTES
    )
