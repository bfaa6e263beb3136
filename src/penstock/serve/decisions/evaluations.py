"""Evaluation groups: recorded and kept like the others, and never drawn; beyond a limit the oldest are given back.

They are accepted under a decision's number like any group, and stay in one state for good. No step uses them, so what
is kept of them follows from the log alone: a restart reads it there, and gives back again what a crash prevented.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from penstock.arrays import Samples
from penstock.errors import CorruptFile
from penstock.log import GroupRow

MAX_ENVS = 64
"""Environments that metrics name: they must stay small whatever is put."""


class EvalFacts(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What metrics show of one evaluation group; kept in place of the facts that planning needs of the others."""

    env: str = ""
    rewards: float = 0.0
    """Sum over samples that have a reward."""
    num_rewards: int = 0
    sampled: int = 0
    """Tokens that the model sampled."""

    @staticmethod
    def of(samples: Samples) -> EvalFacts:
        column = samples.columns.get("rewards")
        rows = [] if column is None else [column[i] for i in range(len(samples)) if len(column[i])]
        # One number stands for the sample; of one per token, the sum.
        rewards = [float(row[0]) if (row == row[0]).all() else float(row.sum(dtype=np.float64)) for row in rows]
        return EvalFacts(
            env=samples.text["env"][0],
            rewards=sum(rewards),
            num_rewards=len(rewards),
            sampled=int(samples.loss_tokens.sum()),
        )

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def from_bytes(data: bytes) -> EvalFacts:
        try:
            return _READ.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CorruptFile(f"facts of an evaluation group: {error}; restore the folder from a copy") from None


# Made at import: msgspec crashes when two threads are the first to decode a type.
_READ = msgspec.msgpack.Decoder(EvalFacts)


@dataclass(slots=True)
class _Sums:
    """Over kept groups of one environment and policy version."""

    groups: int = 0
    samples: int = 0
    rewards: float = 0.0
    num_rewards: int = 0
    sampled: int = 0

    def add(self, row: GroupRow, facts: EvalFacts, sign: int) -> None:
        self.groups += sign
        self.samples += sign * row.samples
        self.rewards += sign * facts.rewards
        self.num_rewards += sign * facts.num_rewards
        self.sampled += sign * facts.sampled


class Evaluations:
    """The evaluation groups of a run, and those of them whose frames are kept, oldest first."""

    def __init__(self, found: Iterable[tuple[GroupRow, EvalFacts | None]] = ()) -> None:
        """`found` are all of them, as the log has them."""
        self._kept: dict[int, tuple[GroupRow, EvalFacts]] = {}
        """By op."""
        self._sums: dict[tuple[str, int], _Sums] = {}
        """By environment and policy version, -1 where that is not known."""
        self.num_groups = self.num_samples = self.num_tokens = 0
        self.num_bytes = 0
        """Of the frames that are kept."""
        self.given_back = 0
        """Groups whose frames were given back."""
        for row, facts in found:
            self.add(row, facts)

    @property
    def kept(self) -> list[str]:
        """The groups whose frames are kept, oldest first."""
        return [row.id for row, _ in self._kept.values()]

    @property
    def ops(self) -> list[int]:
        """The same, by op."""
        return list(self._kept)

    def add(self, row: GroupRow, facts: EvalFacts | None) -> None:
        """A group was accepted; one without a location, or facts, was given back since."""
        self.num_groups += 1
        self.num_samples += row.samples
        self.num_tokens += row.tokens
        if facts is None or not row.location:
            self.given_back += 1
            return
        self._kept[row.op] = (row, facts)
        self._count(row, facts, 1)

    def give_back(self, most_bytes: int) -> Iterator[GroupRow]:
        """The oldest, until no more than so many bytes are kept."""
        while self.num_bytes > most_bytes:
            row, facts = self._kept.pop(next(iter(self._kept)))
            self._count(row, facts, -1)
            self.given_back += 1
            yield row

    def _count(self, row: GroupRow, facts: EvalFacts, sign: int) -> None:
        self.num_bytes += sign * row.size
        key = (facts.env, -1 if row.policy_version is None else row.policy_version)
        sums = self._sums.setdefault(key, _Sums())
        sums.add(row, facts, sign)
        if not sums.groups:
            del self._sums[key]

    def metrics(self) -> dict[str, float]:
        """Numbers under `eval/`; rewards and lengths by environment, of the newest version that was evaluated in it."""
        if not self.num_groups:
            return {}
        found: dict[str, float] = {
            "eval/groups": self.num_groups,
            "eval/samples": self.num_samples,
            "eval/tokens": self.num_tokens,
            "eval/kept_bytes": self.num_bytes,
            "eval/given_back_groups": self.given_back,
        }
        newest = {env: version for env, version in sorted(self._sums)}  # noqa: C416 - of each the last, the highest
        for env, version in list(newest.items())[:MAX_ENVS]:
            sums, name = self._sums[env, version], env.replace("/", "_") or "all"
            if sums.num_rewards:
                found[f"eval/reward/{name}"] = sums.rewards / sums.num_rewards
            found[f"eval/sampled_tokens/{name}"] = sums.sampled / sums.samples
            if version >= 0:
                found[f"eval/policy_version/{name}"] = version
        return found
