"""What a step is made of, as the log keeps it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.arrays.counts import bounded_sum
from penstock.errors import CorruptFile
from penstock.log import GroupRow


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
    one_by_one: bool = False
    """Whether groups were drawn one at a time, until a target of samples or tokens was met."""

    @staticmethod
    def of(rows: Sequence[GroupRow], policy_version: int) -> Manifest:
        """Of a step that is drawn and not planned yet."""
        stale = [policy_version - row.policy_version for row in rows if row.policy_version is not None]
        return Manifest(
            groups=tuple(row.op for row in rows),
            policy_version=policy_version,
            samples=sum(row.samples for row in rows),
            tokens=sum(row.tokens for row in rows),
            staleness=(min(stale), bounded_sum(sum(stale)), max(stale)) if stale else (0, 0, 0),
            num_versions=len(stale),
        )


# Made at import: msgspec crashes when two threads are the first to decode a type.
_READ = msgspec.msgpack.Decoder(Manifest)


def read_manifest(data: bytes) -> Manifest:
    try:
        return _READ.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptFile(f"step manifest: {error}; the log was altered, or written by a later version") from None
