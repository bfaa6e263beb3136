"""Evaluation groups: recorded and stored like other groups, but never drawn. Beyond a limit the oldest are freed.

They are accepted under a decision's number like any group and stay in one state. No step uses them, so the log alone
says which frames are kept: a restart reads that and frees again what a crash prevented.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from penstock.frames import EvalMetadata
from penstock.log import GroupRow

MAX_ENVS = 64
"""Environments that metrics name. Bounded, because producers choose the names."""


@dataclass(slots=True)
class _Sums:
    """Sums over kept groups of one environment and policy version."""

    groups: int = 0
    samples: int = 0
    rewards: float = 0.0
    num_rewards: int = 0
    sampled: int = 0

    def add(self, row: GroupRow, metadata: EvalMetadata, sign: int) -> None:
        self.groups += sign
        self.samples += sign * row.samples
        self.rewards += sign * metadata.rewards
        self.num_rewards += sign * metadata.num_rewards
        self.sampled += sign * metadata.sampled


class Evaluations:
    """The evaluation groups of a run. Knows which frames are kept, oldest first."""

    def __init__(self, found: Iterable[tuple[GroupRow, EvalMetadata | None]] = ()) -> None:
        """`found` are all evaluation groups of the log."""
        self._kept: dict[int, tuple[GroupRow, EvalMetadata]] = {}
        """By op."""
        self._sums: dict[tuple[str, int], _Sums] = {}
        """By environment and policy version; -1 where the version is unknown."""
        self.num_groups = self.num_samples = self.num_tokens = 0
        self.num_bytes = 0
        """Bytes of kept frames."""
        self.freeing = 0
        """Groups whose frames were freed."""
        for row, metadata in found:
            self.add(row, metadata)

    @property
    def kept(self) -> list[str]:
        """The groups whose frames are kept, oldest first."""
        return [row.id for row, _ in self._kept.values()]

    @property
    def ops(self) -> list[int]:
        """The ops of groups whose frames are kept, oldest first."""
        return list(self._kept)

    def add(self, row: GroupRow, metadata: EvalMetadata | None) -> None:
        """Add an accepted group. One without location or metadata was freed since."""
        self.num_groups += 1
        self.num_samples += row.samples
        self.num_tokens += row.tokens
        if metadata is None or not row.location:
            self.freeing += 1
            return
        self._kept[row.op] = (row, metadata)
        self._count(row, metadata, 1)

    def free_oldest(self, most_bytes: int) -> Iterator[GroupRow]:
        """Forget the oldest groups until at most `most_bytes` are kept. Yields the forgotten ones."""
        while self.num_bytes > most_bytes:
            row, metadata = self._kept.pop(next(iter(self._kept)))
            self._count(row, metadata, -1)
            self.freeing += 1
            yield row

    def _count(self, row: GroupRow, metadata: EvalMetadata, sign: int) -> None:
        self.num_bytes += sign * row.size
        key = (metadata.env, -1 if row.policy_version is None else row.policy_version)
        sums = self._sums.setdefault(key, _Sums())
        sums.add(row, metadata, sign)
        if not sums.groups:
            del self._sums[key]

    def metrics(self) -> dict[str, float]:
        """Return metrics under `eval/`: rewards and lengths by environment, of its newest evaluated version."""
        if not self.num_groups:
            return {}
        found: dict[str, float] = {
            "eval/groups": self.num_groups,
            "eval/samples": self.num_samples,
            "eval/tokens": self.num_tokens,
            "eval/kept_bytes": self.num_bytes,
            "eval/freeing_groups": self.freeing,
        }
        newest = {env: version for env, version in sorted(self._sums)}  # noqa: C416 - the last one of each environment wins: the highest version
        for env, version in list(newest.items())[:MAX_ENVS]:
            sums, name = self._sums[env, version], env.replace("/", "_") or "all"
            if sums.num_rewards:
                found[f"eval/reward/{name}"] = sums.rewards / sums.num_rewards
            found[f"eval/sampled_tokens/{name}"] = sums.sampled / sums.samples
            if version >= 0:
                found[f"eval/policy_version/{name}"] = version
        return found
