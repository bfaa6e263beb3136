"""The manifest of a step: its groups and its plan, as the log stores them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.arrays import bounded_sum
from penstock.errors import CorruptFile
from penstock.log import GroupRow


class Manifest(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a step is made of. With the frames it is enough to make the same bytes again."""

    groups: tuple[int, ...]
    """The ops of its groups, in the order they were drawn."""
    rank_plans: tuple[bytes, ...] = ()
    """Each rank's part of the plan; emptied once the step can no longer be asked for."""
    needs: tuple[bytes, ...] = ()
    """Per rank, the numbers of its samples within the step, as int32."""
    digests: tuple[str, ...] = ()
    """Per rank, the digest of its plan and samples."""
    policy_version: int
    """The published version when the step was drawn."""
    samples: int
    tokens: int
    loss_tokens: int = 0
    staleness: tuple[int, int, int] = (0, 0, 0)
    """Smallest, summed and largest staleness of the groups that have a version."""
    num_versions: int = 0
    """How many groups have a version."""
    one_by_one: bool = False
    """Whether groups were drawn one at a time until a target of samples or tokens was met."""

    @staticmethod
    def of(rows: Sequence[GroupRow], policy_version: int) -> Manifest:
        """Make the manifest of a step that is drawn and not planned yet."""
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
