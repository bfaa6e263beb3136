"""What planning knows of each sample: lengths, counts and keys, but no tokens.

Truncation is decided here, because every count depends on it. A sample longer than `seq_len` keeps its first `seq_len`
tokens, but never part of an image: an image that no longer fits is dropped, with all tokens from its first placeholder
on. A sample that would keep nothing has `kept` 0 and cannot be packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.arrays.columns import ALL_OR_NONE, TERM_OF_MODE, WEIGHTS
from penstock.arrays.images import ImageSpan
from penstock.arrays.own_columns import Own
from penstock.arrays.samples import Samples, trained_tokens
from penstock.arrays.shared_prefixes import SharedPrefixes

MODALITIES = ("text", "image")
TEXT, IMAGE = range(2)

MODE_WEIGHTS = {"rl": (1.0, 0.0, 0.0), "opd": (0.0, 0.0, 1.0), "sft": (0.0, 1.0, 0.0)}
"""Default weights by mode, used where a sample has none. They let modes share a micro-batch."""
_WEIGHS = {mode: tuple(int(weight != 0) for weight in weights) for mode, weights in MODE_WEIGHTS.items()}
"""Which of these are not zero."""

Shape: TypeAlias = tuple[str, tuple[int, ...]]
"""dtype, and the dimensions after the token axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleMetadata:
    """One entry per sample."""

    lengths: NDArray[np.int64]
    """[n] tokens as recorded."""
    kept: NDArray[np.int64]
    """[n] tokens after truncation; 0 where the sample begins with an image that does not fit."""
    loss_tokens: NDArray[np.int64]
    """[n] trained tokens as recorded."""
    kept_loss_tokens: NDArray[np.int64]
    """[n] trained tokens after truncation."""
    term_tokens: NDArray[np.int64]
    """[n, 3] trained tokens after truncation with a nonzero weight in the rl, ce and ref_kl terms."""
    patches: NDArray[np.int64]
    """[n] patches of the kept images."""
    modality: NDArray[np.uint8]
    """[n] index into MODALITIES, after truncation."""
    stub: NDArray[np.int64]
    """[n] tokens of the shortest prefix that still has the sample's modality: 0 for text."""
    stub_patches: NDArray[np.int64]
    """[n] patches of that prefix."""
    has: dict[str, NDArray[np.bool_]]
    """[n] by column present in any sample: whether this sample has it."""
    shapes: dict[str, Shape]
    """By column with trailing dimensions: the shape for a dummy, where no sample is at hand."""
    ids: tuple[str, ...]
    group: tuple[str, ...]
    run: tuple[str, ...]
    mode: tuple[str, ...]
    own: Own = field(default_factory=dict)
    """Declarations of columns that are not in the table."""
    shared: SharedPrefixes | None = None
    """Prefixes that samples share, in tokens as recorded; None if they were not computed."""
    oldest_version: int = 0
    """Trained tokens of earlier policy versions are not trained, and not counted as kept."""
    stale_loss_tokens: NDArray[np.int64] | None = None
    """[n] trained tokens left out because of that."""

    def __len__(self) -> int:
        return len(self.lengths)

    @staticmethod
    def of(samples: Samples, seq_len: int, *, drop: bool = False) -> SampleMetadata:
        """Compute the metadata of samples truncated at `seq_len`. With `drop`, longer samples keep nothing."""
        lengths = samples.lengths
        if not len(lengths) or lengths.item(lengths.argmax()) <= seq_len:  # nothing is cut, the usual case
            kept, trained = lengths, samples.loss_tokens
        else:
            kept = np.where(lengths > seq_len, 0, lengths) if drop else kept_lengths(samples, seq_len)
            trained = trained_tokens(samples.columns["loss_mask"].values, samples.offsets, kept)
        patches, modality, stub, stub_patches = _look(samples, kept)
        return SampleMetadata(
            lengths=lengths,
            kept=kept,
            loss_tokens=samples.loss_tokens,
            kept_loss_tokens=trained,
            term_tokens=_term_tokens(samples, kept, trained),
            patches=patches,
            modality=modality,
            stub=stub,
            stub_patches=stub_patches,
            has=_has(samples),
            shapes=shapes_of(samples),
            own=samples.own,
            ids=samples.ids,
            group=samples.text["group"],
            run=samples.text["run"],
            mode=samples.text["mode"],
        )

    @staticmethod
    def of_lengths(lengths: NDArray[np.int64]) -> SampleMetadata:
        """Return the metadata of text samples of these lengths, without columns; all but the first token trained."""
        count = len(lengths)
        zeros = np.zeros(count, np.int64)
        return SampleMetadata(
            lengths=lengths,
            kept=lengths,
            loss_tokens=lengths - 1,
            kept_loss_tokens=lengths - 1,
            term_tokens=np.stack([lengths - 1, zeros, zeros], axis=1),
            patches=zeros,
            modality=zeros.astype(np.uint8),
            stub=zeros,
            stub_patches=zeros,
            has={},
            shapes={},
            ids=tuple(map(str, range(count))),
            group=("",) * count,
            run=("",) * count,
            mode=("rl",) * count,
        )

    def lacking(self, name: str) -> NDArray[np.bool_]:
        """Return [n], trained samples whose mode or weights need this column of `ALL_OR_NONE`, and that lack it.

        If any sample of the step has the column, in any mode, these would be filled with 0.0.
        """
        modes = ALL_OR_NONE[name]
        asked = self.kept_loss_tokens > 0
        if not set(self.mode).issubset(modes):
            needs = np.fromiter((mode in modes for mode in self.mode), np.bool_, len(self))
            needs |= self.term_tokens[:, [TERM_OF_MODE[mode] for mode in modes]].any(axis=1)
            asked &= needs
        return asked & ~self.has[name] if name in self.has else asked


def _has(samples: Samples) -> dict[str, NDArray[np.bool_]]:
    offsets, full = samples.offsets, samples.lengths > 0
    return {name: full if column.offsets is offsets else column.lengths > 0 for name, column in samples.columns.items()}


def shapes_of(samples: Samples) -> dict[str, Shape]:
    """Return dtype and trailing dimensions of the columns that have some."""
    trailing = {name: column for name, column in samples.columns.items() if samples.table[name].trailing}
    return {name: (column.dtype.str, column.trailing) for name, column in trailing.items()}


def kept_lengths(samples: Samples, seq_len: int) -> NDArray[np.int64]:
    """Return [n], how many leading tokens each sample keeps; 0 where it begins with an image longer than `seq_len`."""
    lengths = samples.lengths
    kept = np.minimum(lengths, seq_len)
    for i in np.flatnonzero(lengths > seq_len).tolist():
        kept[i] = cut(int(lengths[i]), seq_len, () if samples.images is None else samples.images[i])
    return kept


def cut(length: int, seq_len: int, spans: Sequence[ImageSpan]) -> int:
    """Return how many leading tokens a sample keeps: at most `seq_len`, never part of an image.

    >>> span = ImageSpan(hash="0" * 64, grid=(1, 4, 4), offset=2, length=4)
    >>> cut(9, 7, [span]), cut(9, 6, [span]), cut(9, 5, [span])
    (7, 6, 2)
    """
    if length <= seq_len:
        return length
    for span in spans:
        if span.offset < seq_len < span.end:
            return span.offset
    return seq_len


def _term_tokens(samples: Samples, kept: NDArray[np.int64], trained: NDArray[np.int64]) -> NDArray[np.int64]:
    modes = samples.text["mode"]
    if len(set(modes)) == 1:
        out = np.zeros((len(modes), len(WEIGHTS)), np.int64)
        for term, weight in enumerate(_WEIGHS[modes[0]]):
            if weight:
                out[:, term] = trained
    else:
        out = np.array([_WEIGHS[mode] for mode in modes], np.int64).reshape(-1, len(WEIGHTS)) * trained[:, None]
    mask = samples.columns["loss_mask"]
    for term, name in enumerate(WEIGHTS):
        column = samples.columns.get(name)
        if column is not None:
            for i in np.flatnonzero(column.lengths).tolist():
                n = int(kept[i])
                out[i, term] = np.count_nonzero(mask[i][:n] & (column[i][:n] != 0))
    return out


def _look(
    samples: Samples, kept: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """Return patches, modality, stub length and stub patches of each sample, as kept."""
    patches, stub, stub_patches = np.zeros((3, len(kept)), np.int64)
    modality = np.zeros(len(kept), np.uint8)
    for i, recorded in enumerate(samples.images or ()):
        spans = [span for span in recorded if span.end <= kept[i]]
        if spans:
            modality[i] = IMAGE
            patches[i] = sum(span.num_patches for span in spans)
            # The shortest prefix with an image ends with the first image. Dummies of this modality are cut to it.
            stub[i], stub_patches[i] = spans[0].end, spans[0].num_patches
    return patches, modality, stub, stub_patches
