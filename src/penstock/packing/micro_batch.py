"""A micro-batch: the columns of one forward pass, and explicitly where its samples lie.

    token_ids         a0 a1 a2  b0  c0 c1  0 0       three samples and two tokens of padding
    position_ids       0  1  2   0   0  1  0 1
    sequence_lengths   3         1   2     2         explicit: a one-token sample keeps its boundary
    sample_count       3                             the last segment is padding, not part of c

Where samples share tokens and trees are on, a micro-batch has a `forest` with the model's inputs: each shared token
once, and the padding. The columns are then those of the samples, end to end, without padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.arrays import (
    NO_COLUMNS,
    PER_NODE,
    TEXT_COLUMNS,
    TOKEN_COLUMNS,
    Cells,
    ImageSpan,
    Ragged,
    Sample,
    arrays_in,
    known,
    offsets_of,
    read_own,
    table_with,
)
from penstock.errors import UnknownKey
from penstock.notebook import html_table
from penstock.packing.forest import Forest


@dataclass(frozen=True, slots=True)
class Segment:
    """One sample's place in a micro-batch."""

    id: str
    group: str
    prompt: str
    """The prompt's name; empty where not given."""
    env: str
    mode: str
    rollout: str
    """Metrics, outcome and roles of its rollout as JSON; may be empty."""
    policy_version: int | None
    """None = not known."""
    offset: int
    """Where it begins in the micro-batch."""
    length: int
    """How many tokens were taken, from the sample's first on."""

    @property
    def tokens(self) -> slice:
        """Its tokens in a column of the micro-batch: `batch["logprobs"][segment.tokens]`."""
        return slice(self.offset, self.offset + self.length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The fields of `Segment` as columns, one entry per sample. Padding and dummies are not included."""

    ids: tuple[str, ...]
    groups: tuple[str, ...]
    prompts: tuple[str, ...]
    envs: tuple[str, ...]
    modes: tuple[str, ...]
    rollouts: tuple[str, ...]
    policy_versions: NDArray[np.int64]
    """-1 = not known."""
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[Segment]:
        """One `Segment` per sample, in the order of their tokens."""
        texts = (self.ids, self.groups, self.prompts, self.envs, self.modes, self.rollouts)
        versions = map(known, self.policy_versions.tolist())
        numbers = (n.tolist() for n in (self.offsets, self.lengths))
        return map(Segment, *texts, versions, *numbers)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """What one rank computes at one micro-batch index."""

    columns: dict[str, Cells]
    """[T, ...] by name, in table order, position_ids last; a `Ragged` where tokens have lists. All have T tokens."""
    sequence_lengths: NDArray[np.int32]
    """[segments] the only boundaries. Padding is its own segment, the last one."""
    segments: Segments
    images: tuple[ImageSpan, ...]
    """Images in token order, their spans in the micro-batch's token space."""
    modality: str
    """text or image: the same on every rank at this index, unless modalities were declared to mix."""
    run: str
    """The tenant of its samples; one per micro-batch."""
    is_dummy: bool
    """Whether it only keeps the ranks in step: no sample, no loss."""
    forest: Forest | None = None
    """How its samples share tokens; None where they share none, or where trees are off. With a forest, routed_experts
    are only there, and `batch["routed_experts"]` gathers them: repeated for every sample they would be large."""

    def __getitem__(self, name: str) -> Cells:
        if self.forest is not None and name not in self.columns and name in self.forest.columns:
            return self.forest.columns[name][self.forest.index]
        try:
            return self.columns[name]
        except KeyError:
            raise UnknownKey(f"micro-batch has no column {name!r}; it has {', '.join(self.columns)}") from None

    def __contains__(self, name: object) -> bool:
        return name in self.columns or (self.forest is not None and name in self.forest.columns)

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    @property
    def inputs(self) -> dict[str, Cells]:
        """The model's inputs by name: from the forest, each place once, or else from the columns."""
        if self.forest is not None:
            return self.forest.columns
        return {name: self.columns[name] for name in (*PER_NODE, "position_ids") if name in self.columns}

    @property
    def computed_tokens(self) -> int:
        """Tokens of a forward pass: shared ones once, padding included."""
        return self.num_tokens if self.forest is None else self.forest.num_tokens

    @property
    def num_tokens(self) -> int:
        """T: tokens of samples and, without a forest, padding."""
        return len(self.columns["token_ids"])

    @property
    def sample_count(self) -> int:
        return len(self.segments)

    @property
    def sample_tokens(self) -> int:
        """Tokens of samples: the first ones of the micro-batch."""
        return int(self.segments.lengths.sum())

    def samples(self) -> Iterator[Sample]:
        """Yield the samples as they are trained: cut to `seq_len`, every column with one value per token.

        Their arrays are views of the micro-batch's.

        >>> from penstock.packing import pack
        >>> step = pack([Sample(id="a", token_ids=[4, 5, 6], advantages=0.5)], ranks=1, seq_len=2)
        >>> [(s.id, s.token_ids.tolist(), s["advantages"].tolist()) for s in step.ranks[0][0].samples()]
        [('a', [4, 5], [0.5, 0.5])]
        """
        shared = () if self.forest is None else (name for name in self.forest.columns if name not in self.columns)
        rows = {name: self[name] for name in (*self.columns, *shared) if name != "position_ids"}
        _, own = read_own({n: cells for n, cells in rows.items() if n not in TOKEN_COLUMNS}, NO_COLUMNS, "micro-batch")
        names = [name for name in table_with(own) if name in rows]
        for segment in self.segments:
            text = {name: getattr(segment, name) for name in TEXT_COLUMNS if name != "run"} | {"run": self.run}
            at = segment.tokens
            spans = (i.shifted(-at.start) for i in self.images if at.start <= i.offset < at.stop)
            columns = {name: rows[name][at] for name in names}
            yield Sample.trusted(columns, text, segment.policy_version, tuple(spans), own)

    def sample_at(self, token: int) -> str:
        """Return the id of the sample that a token of the row belongs to; empty for padding and dummies."""
        inside = (self.segments.offsets <= token) & (token < self.segments.offsets + self.segments.lengths)
        return self.segments.ids[int(inside.argmax())] if inside.any() else ""

    @property
    def padding(self) -> int:
        """Tokens of no sample: the last ones of the micro-batch, or all of a dummy."""
        return self.num_tokens - self.sample_tokens

    @property
    def loss_tokens(self) -> int:
        return int(np.count_nonzero(self.columns["loss_mask"]))

    @property
    def cu_seqlens(self) -> NDArray[np.int32]:
        """[segments + 1] where segments start, for variable-length attention."""
        return offsets_of(self.sequence_lengths).astype(np.int32)

    @property
    def digest(self) -> str:
        """xxh3-128 of all columns, boundaries and sample ids: equal digests mean equal micro-batches."""
        state = xxhash.xxh3_128()
        arrays: Mapping[str, Cells] = {
            **self.columns,
            "sequence_lengths": self.sequence_lengths,
            # Earlier versions recorded here where each sample was cut. Zeros keep digests the same.
            "source_offsets": np.zeros(len(self.segments), np.int64),
        }
        if self.forest is not None:
            arrays = {**arrays, **self.forest.digested}
        for name, cells in arrays.items():
            for array in arrays_in(cells):
                state.update(f"{name}:{array.dtype.str}:{array.shape};".encode())
                state.update(np.ascontiguousarray(array).data)
        images = [(image.hash, image.offset) for image in self.images]
        state.update(repr((self.segments.ids, self.run, self.modality, self.is_dummy, images)).encode())
        return state.hexdigest()

    def __repr__(self) -> str:
        what = "dummy" if self.is_dummy else f"{self.sample_count} samples"
        return f"MicroBatch({what}, {self.num_tokens} tokens, {self.loss_tokens} trained, {self.modality})"

    def _repr_html_(self) -> str:
        rows = [(name, arrays_in(cells)[0].dtype, _shape_of(cells)) for name, cells in self.columns.items()]
        return html_table(self, rows, ("column", "dtype", "shape"))


def _shape_of(cells: Cells) -> str:
    return f"{len(cells)} lists" if isinstance(cells, Ragged) else str(list(cells.shape))
