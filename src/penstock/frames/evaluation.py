"""Metadata of evaluation groups: what metrics show of groups that are never trained."""

from __future__ import annotations

import msgspec
import numpy as np

from penstock.arrays import Samples
from penstock.errors import CorruptFile
from penstock.frames.head import Limits
from penstock.frames.layout import Buffer
from penstock.frames.metadata import GroupMetadata, check_group
from penstock.frames.reading import describe

UNCUT = 2**40
"""A `seq_len` that cuts nothing: no sample is so long."""


class EvalMetadata(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What metrics show of one evaluation group; kept in place of the metadata that planning needs of the others."""

    env: str = ""
    rewards: float = 0.0
    """Sum over samples that have a reward."""
    num_rewards: int = 0
    sampled: int = 0
    """Tokens that the model sampled."""

    @staticmethod
    def of(samples: Samples) -> EvalMetadata:
        column = samples.columns.get("rewards")
        rows = [] if column is None else [column[i] for i in range(len(samples)) if len(column[i])]
        # One number stands for the sample; of one per token, the sum.
        rewards = [float(row[0]) if (row == row[0]).all() else float(row.sum(dtype=np.float64)) for row in rows]
        return EvalMetadata(
            env=samples.text["env"][0],
            rewards=sum(rewards),
            num_rewards=len(rewards),
            sampled=int(samples.loss_tokens.sum()),
        )

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def from_bytes(data: bytes) -> EvalMetadata:
        try:
            return msgspec.msgpack.decode(data, type=EvalMetadata)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CorruptFile(f"metadata of an evaluation group: {error}; restore the folder from a copy") from None


def metadata_for_evaluation(group: str, frame: Buffer, limits: Limits) -> tuple[GroupMetadata, EvalMetadata]:
    """Of a group that is not to be trained: its samples are not cut, and what is shown of it is made too."""
    metadata = check_group(frame, group=group, seq_len=UNCUT, limits=limits)
    _, samples, _ = describe(frame, limits=limits)
    return metadata, EvalMetadata.of(samples)
