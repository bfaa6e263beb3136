"""The keyword arguments of `pack`. Made by scripts/make_settings.py."""

from collections.abc import Sequence
from typing import Literal, Required, TypedDict

from penstock.arrays.columns import Column
from penstock.packing.cost import Cost
from penstock.packing.settings import Modalities, PackedImages

class PackingKeywords(TypedDict, total=False):
    """The keyword arguments of `pack`. Made by scripts/make_settings.py."""

    ranks: Required[int]
    """Data ranks that take part in every step."""
    seq_len: Required[int]
    """Tokens of a sample at most; `over_length` says what happens to longer ones."""
    micro_batch_max_tokens: int | None
    """Tokens of a micro-batch, padding included; none: seq_len."""
    pad_to_multiple_of: int
    """Micro-batches are padded to a multiple of this many tokens."""
    max_samples: int | None
    """Samples per micro-batch at most; none: any."""
    max_patches: int | None
    """Image patches per micro-batch at most; none: any."""
    cost: Cost
    """What a micro-batch costs, by which ranks are balanced, in any unit: overhead + per_token * tokens +
    per_token_squared * sum(length ** 2) + per_patch * patches."""
    over_cap: Literal["soft", "strict"]
    """A sample beyond a cap: soft, alone in its micro-batch and counted; strict, an error."""
    modalities: Modalities
    """Which modalities may share a micro-batch."""
    packed_images: PackedImages
    """What the trainer declares; without it a sample with images is alone in its micro-batch."""
    rows_by: Literal["modality", "tenant"]
    """What all ranks share at a micro-batch index: the modality, or the tenant as well."""
    pad_id: int
    """Token id of padding."""
    long_rows: bool
    """Allow micro_batch_max_tokens above seq_len."""
    columns: Sequence[Column]
    """Columns that samples may have beside those that Penstock knows."""
    trees: bool
    """Compute what samples of a group share once: micro-batches have a forest."""
