"""The settings of packing, checked once: what is cut, what a micro-batch may hold, what may share one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from penstock.errors import ConfigError
from penstock.pack.bins import Caps
from penstock.pack.cost import Cost
from penstock.pack.sample_facts import MODALITIES

UNLIMITED = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Modalities:
    """Which modalities may share a micro-batch; by default none.

    A text micro-batch on one rank beside an image micro-batch on another hangs sharded training: one rank calls the
    vision tower's collectives and the other does not. So a micro-batch index has one modality on all ranks. Name
    modalities in `together` only if the model runs its vision tower on every micro-batch, images or not.
    """

    together: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        unknown = set(self.together) - set(MODALITIES)
        if unknown or len(set(self.together)) != len(self.together) or len(self.together) == 1:
            raise ConfigError(f"modalities.together: {self.together}; name two or three of {', '.join(MODALITIES)}")

    def class_of(self, modality: int) -> int:
        """The first modality of those that share micro-batches with this one: the name of its class of rows."""
        name = MODALITIES[modality]
        return min(map(MODALITIES.index, self.together)) if name in self.together else modality


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How a step is packed. See `pack` for the meaning of each setting."""

    ranks: int
    seq_len: int
    """Samples are cut to this many tokens."""
    micro_batch_max_tokens: int | None = None
    """Tokens of a micro-batch, padding included; None is `seq_len`."""
    pad_to_multiple_of: int = 1
    max_samples: int | None = None
    """Samples per micro-batch."""
    max_patches: int | None = None
    """Image patches per micro-batch."""
    cost: Cost = field(default_factory=Cost)
    over_cap: Literal["soft", "strict"] = "soft"
    """A sample beyond a cap: alone in its micro-batch and counted, or an error."""
    modalities: Modalities = field(default_factory=Modalities)
    rows_by: Literal["modality", "run"] = "modality"
    """What all ranks share at a micro-batch index: the modality, or the run as well."""
    pad_id: int = 0
    """Token id of padding."""
    long_rows: bool = False
    """Allow `micro_batch_max_tokens` above `seq_len`."""

    def __post_init__(self) -> None:
        for name in ("ranks", "seq_len", "micro_batch_max_tokens", "pad_to_multiple_of", "max_samples", "max_patches"):
            value = getattr(self, name)
            optional = name in ("micro_batch_max_tokens", "max_samples", "max_patches")
            if not (value is None and optional) and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}: {value!r}; must be a whole number from 1 up")
        if not 0 <= self.pad_id < 2**32:
            raise ConfigError(f"pad_id: {self.pad_id!r}; must be a token id, from 0 to {2**32 - 1}")
        if self.over_cap not in ("soft", "strict"):
            raise ConfigError(f"over_cap: {self.over_cap!r}; must be 'soft' or 'strict'")
        if self.rows_by not in ("modality", "run"):
            raise ConfigError(f"rows_by: {self.rows_by!r}; must be 'modality' or 'run'")
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
    def cap(self) -> int:
        """The cap as configured, or its default."""
        return self.seq_len if self.micro_batch_max_tokens is None else self.micro_batch_max_tokens

    @property
    def caps(self) -> Caps:
        """What the samples of a micro-batch may come to, so that the padded micro-batch keeps the cap."""
        return Caps(
            tokens=self.cap // self.pad_to_multiple_of * self.pad_to_multiple_of,
            samples=self.max_samples or UNLIMITED,
            patches=self.max_patches or UNLIMITED,
        )

    def padded(self, tokens: int) -> int:
        """The length of a micro-batch of this many tokens."""
        multiple = self.pad_to_multiple_of
        return max(-(-tokens // multiple), 1) * multiple
