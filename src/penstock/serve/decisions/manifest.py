"""What a step is made of, as the log keeps it."""

from __future__ import annotations

import msgspec

from penstock.errors import CorruptFile


class Manifest(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a step is made of; with the log's frames, enough to make the very same bytes again."""

    groups: tuple[int, ...]
    """The groups, by op, in the order they were drawn."""
    rank_plans: tuple[bytes, ...] = ()
    """Each rank's part of the plan; given back when the step can no longer be asked for."""
    needs: tuple[bytes, ...] = ()
    """Per rank the samples it is sent, by number within the step, as int32."""
    digests: tuple[str, ...] = ()
    """Of each rank's plan and samples."""
    policy_version: int
    """The trainer's version when the step was drawn."""
    samples: int
    tokens: int
    loss_tokens: int = 0
    staleness: tuple[int, int, int] = (0, 0, 0)
    """Smallest, summed and largest staleness of its groups that have a version."""
    num_versions: int = 0
    """How many of its groups have a version."""


def read_manifest(data: bytes) -> Manifest:
    try:
        return msgspec.msgpack.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptFile(f"step manifest: {error}; the log was altered, or written by a later version") from None
