"""The settings of packing, checked once: what is cut, what a micro-batch may hold, what may share one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from penstock.arrays import MODALITIES, TEXT, Column, Own, declared
from penstock.config import check
from penstock.errors import ConfigError
from penstock.packing.bins import Caps
from penstock.packing.cost import Cost

UNLIMITED = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Modalities:
    """Which modalities may share a micro-batch; by default none.

    A text micro-batch on one rank beside an image micro-batch on another hangs sharded training: one rank calls the
    vision tower's collectives and the other does not. So a micro-batch index has one modality on all ranks. Name
    modalities in `together` only if the model runs its vision tower on every micro-batch, images or not.
    """

    together: Annotated[
        tuple[str, ...],
        Meta(description="modalities that may share a micro-batch: text and image, or none of them"),
    ] = ()

    def __post_init__(self) -> None:
        check(self, "modalities")
        if self.together and sorted(self.together) != sorted(MODALITIES):
            raise ConfigError(f"modalities.together: {self.together}; name {' and '.join(MODALITIES)}, or none of them")

    def class_of(self, modality: int) -> int:
        """Return the class of rows of a modality: the first of those that share micro-batches with it."""
        return TEXT if self.together else modality


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedImages:
    """Declarations about the model that allow samples with images to share a micro-batch.

    A model that infers sample boundaries from positions, or attends over the full row, trains one sample on its
    neighbour's image without any error. So a sample with images is alone in its micro-batch unless everything that
    could mix samples is declared safe. Every missing declaration is a separate reason.

    >>> PackedImages(explicit_boundaries=True, varlen_attention=True).refusals
    []
    >>> PackedImages(explicit_boundaries=True).refusals
    ['varlen_attention is not declared: attention over the whole row would mix samples']
    """

    explicit_boundaries: Annotated[
        bool, Meta(description="the model takes sequence_lengths and restarts its rotary positions at each of them")
    ] = False
    varlen_attention: Annotated[bool, Meta(description="attention is computed per segment")] = False
    context_parallel: Annotated[
        int, Meta(ge=1, description="ranks that share one row; above 1 images would be split between them")
    ] = 1

    def __post_init__(self) -> None:
        check(self, "packed_images")

    @property
    def refusals(self) -> list[str]:
        """Reasons why samples with images may not share a micro-batch; empty when they may."""
        reasons = {
            "explicit_boundaries is not declared: positions would run on across samples": not self.explicit_boundaries,
            "varlen_attention is not declared: attention over the whole row would mix samples": (
                not self.varlen_attention
            ),
            f"context_parallel is {self.context_parallel}: an image cannot be split between ranks": (
                self.context_parallel != 1
            ),
        }
        return [reason for reason, holds in reasons.items() if holds]

    def require(self, what: str) -> None:
        """Raise ConfigError with every reason why samples with images may not share a micro-batch, for a setting."""
        if self.refusals:
            raise ConfigError(
                f"{what}: {'; '.join(self.refusals)}; leave it out, or declare in packed_images what holds"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How a step is packed. See `pack` for the meaning of each setting."""

    ranks: Annotated[int, Meta(ge=1, le=65536, description="data ranks that take part in every step")]
    seq_len: Annotated[
        int, Meta(ge=1, description="tokens of a sample at most; `over_length` says what happens to longer ones")
    ]
    micro_batch_max_tokens: Annotated[
        int | None, Meta(ge=1, description="tokens of a micro-batch, padding included; none: seq_len")
    ] = None
    pad_to_multiple_of: Annotated[
        int, Meta(ge=1, le=1 << 24, description="micro-batches are padded to a multiple of this many tokens")
    ] = 1
    max_samples: Annotated[int | None, Meta(ge=1, description="samples per micro-batch at most; none: any")] = None
    max_patches: Annotated[int | None, Meta(ge=1, description="image patches per micro-batch at most; none: any")] = (
        None
    )
    cost: Annotated[
        Cost,
        Meta(
            description="what a micro-batch costs, by which ranks are balanced, in any unit: overhead + per_token * "
            "tokens + per_token_squared * sum(length ** 2) + per_patch * patches"
        ),
    ] = field(default_factory=Cost)
    over_cap: Annotated[
        Literal["soft", "strict"],
        Meta(description="a sample beyond a cap: soft, alone in its micro-batch and counted; strict, an error"),
    ] = "soft"
    modalities: Annotated[Modalities, Meta(description="which modalities may share a micro-batch")] = field(
        default_factory=Modalities
    )
    packed_images: Annotated[
        PackedImages,
        Meta(description="what the trainer declares; without it a sample with images is alone in its micro-batch"),
    ] = field(default_factory=PackedImages)
    rows_by: Annotated[
        Literal["modality", "tenant"],
        Meta(description="what all ranks share at a micro-batch index: the modality, or the tenant as well"),
    ] = "modality"
    pad_id: Annotated[int, Meta(ge=0, le=2**32 - 1, description="token id of padding")] = 0
    long_rows: Annotated[bool, Meta(description="allow micro_batch_max_tokens above seq_len")] = False
    columns: Annotated[
        tuple[Column, ...],
        Meta(
            description="columns that samples may have beside those that Penstock knows",
            extra={"form": "a column, as { name, dtype, per, fill, pad, trailing, ragged }"},
        ),
    ] = ()
    trees: Annotated[
        bool, Meta(description="compute what samples of a group share once: micro-batches have a forest")
    ] = False

    def __post_init__(self) -> None:
        check(self)
        declared(self.columns)
        if "image" in self.modalities.together:
            self.packed_images.require("modalities.together with images")
        if self.cap > self.seq_len and not self.long_rows:
            raise ConfigError(
                f"micro_batch_max_tokens: {self.cap} with seq_len {self.seq_len}; lower it to {self.seq_len} or less, "
                "or pass long_rows=True if micro-batches longer than a sample are meant"
            )
        if self.cap < self.pad_to_multiple_of:
            raise ConfigError(
                f"micro_batch_max_tokens: {self.cap} with pad_to_multiple_of {self.pad_to_multiple_of}; "
                "no padded micro-batch fits; raise the one or lower the other"
            )

    @property
    def own(self) -> Own:
        """The declared columns by name."""
        return declared(self.columns)

    @property
    def cap(self) -> int:
        """The cap as configured, or its default."""
        return self.seq_len if self.micro_batch_max_tokens is None else self.micro_batch_max_tokens

    @property
    def caps(self) -> Caps:
        """Limits on the samples of a micro-batch that keep the padded micro-batch within the cap."""
        return Caps(
            tokens=self.cap // self.pad_to_multiple_of * self.pad_to_multiple_of,
            samples=self.max_samples or UNLIMITED,
            patches=self.max_patches or UNLIMITED,
        )

    def padded(self, tokens: int) -> int:
        """Return the length of a micro-batch of this many tokens, with padding."""
        multiple = self.pad_to_multiple_of
        return max(-(-tokens // multiple), 1) * multiple
