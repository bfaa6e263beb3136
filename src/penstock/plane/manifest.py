"""The manifest of a step: its groups and its plan, as the log stores them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.arrays import bounded_sum
from penstock.errors import CorruptFile
from penstock.frames import GroupMetadata
from penstock.log import GroupRow


class GroupSummaries(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Numbers about a step's groups that remain when their frames are gone, about 20 bytes for each group.

    Arrays have one number per group, as little-endian bytes.
    """

    envs: tuple[str, ...] = ()
    env: bytes = b""
    """uint16: the environment of the group's first sample, as an index into `envs`."""
    reward: bytes = b""
    """float32: mean over the samples that have a reward; NaN if none has."""
    length: bytes = b""
    """float32: mean tokens of a sample."""
    seconds: bytes = b""
    """float32: mean seconds of a rollout; NaN if unknown."""
    truncated: bytes = b""
    """float32: share of rollouts that ended by a limit."""

    @staticmethod
    def of(groups: Sequence[GroupMetadata]) -> GroupSummaries:
        names = [metadata.env[0] for metadata in groups]
        # A step with more environments than an index can name gets the rest without a name.
        envs = tuple(dict.fromkeys(names))[:_MAX_ENVS]
        index = {name: i for i, name in enumerate(envs)}
        return GroupSummaries(
            envs=envs,
            env=np.array([index.get(name, _MAX_ENVS) for name in names], "<u2").tobytes(),
            reward=_floats([_mean(np.frombuffer(metadata.rewards, "<f4")) for metadata in groups]),
            length=_floats([metadata.num_tokens / metadata.num_samples for metadata in groups]),
            seconds=_floats([_mean(np.array([s for s in metadata.seconds if s >= 0])) for metadata in groups]),
            truncated=_floats([float(np.frombuffer(m.truncated, np.bool_).sum()) / m.num_samples for m in groups]),
        )

    def names(self) -> list[str]:
        """Return the environment of each group."""
        return [self.envs[i] if i < len(self.envs) else "" for i in np.frombuffer(self.env, "<u2").tolist()]

    def numbers(self, name: str) -> list[float | None]:
        """Return one of the arrays, None where it is NaN."""
        return [None if one != one else one for one in np.frombuffer(getattr(self, name), "<f4").tolist()]


_MAX_ENVS = 0xFFFF


def _floats(values: Sequence[float]) -> bytes:
    with np.errstate(over="ignore"):
        found = np.array(values, "<f4")
    found[np.isinf(found)] = np.nan  # seconds may be as large as float64 allows: not known, rather than infinite
    return found.tobytes()


def _mean(values: NDArray[np.floating]) -> float:
    finite = values[np.isfinite(values)]
    with np.errstate(over="ignore"):
        return float(finite.mean(dtype=np.float64)) if len(finite) else float("nan")


class Manifest(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The contents of a step. Together with the frames it is enough to make the same bytes again."""

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
    summaries: GroupSummaries = GroupSummaries()
    """Of its groups, for the viewer; kept when the plan is forgotten. Empty in steps of earlier versions."""
    oldest_version: int = 0
    """Tokens that an earlier policy version sampled are left out of the loss (`max_token_staleness`)."""
    masked: tuple[int, int] = (0, 0)
    """Number of these tokens, and of the samples that have some."""
    names_clash: bool = False
    """Whether a sample's id also names another group of the step, or one of its samples (`priorities.names_clash`)."""
    packing: str = ""
    """The packing settings of the plan, as TOML; emptied with the plan. Empty in steps of earlier versions."""

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
    except (msgspec.DecodeError, TypeError, UnicodeDecodeError) as error:
        raise CorruptFile(f"step manifest: {error}; the log was altered, or written by a later version") from None
