"""From encoded groups to the bytes of a step: what each rank is sent, and the digest it must find.

Nothing here remembers anything: the same frames and settings give the same bytes, in any process, at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash

from penstock.arrays import Samples
from penstock.encode import decode, encode
from penstock.errors import InvalidInput, PenstockError
from penstock.pack import Packing, RankPlan, SampleFacts, check_columns, plan
from penstock.pack.sample_facts import kept_lengths
from penstock.send.messages import Buffer
from penstock.send.steps import Staged


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the plane must know of a group to hold it."""

    samples: int
    tokens: int
    policy_version: int
    """Of its oldest sample."""
    run: str = ""
    """The run or adapter it belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltStep:
    """A step that was planned."""

    staged: Staged
    rank_plans: tuple[bytes, ...]
    """Each rank's part of the plan; with the frames, enough to make the same bytes again."""
    samples: int
    tokens: int
    loss_tokens: int


class Builder(Protocol):
    """Makes steps of groups. `StepBuilder` is the one; simulations use a smaller one."""

    def look(self, group: str, frame: Buffer) -> Facts:
        """Check a group that was put; raises InvalidInput or CorruptFrame."""

    def make(self, step: int, frames: Sequence[Buffer]) -> BuiltStep:
        """Plan a step."""

    def again(self, step: int, frames: Sequence[Buffer], rank_plans: Sequence[bytes]) -> Staged:
        """Make the bytes of a step that was planned."""

    def misfits(self, frames: Sequence[Buffer]) -> list[int]:
        """Which of these cannot be in one step with those before them."""


def digest_of(rank_plan: bytes, frame: Buffer) -> str:
    """What plane and rank compare: xxh3-128 over the rank's plan and payload."""
    both = xxhash.xxh3_128(rank_plan)
    both.update(frame)
    return both.hexdigest()


class StepBuilder:
    """Decodes, plans and encodes."""

    def __init__(self, packing: Packing) -> None:
        self._packing = packing

    def look(self, group: str, frame: Buffer) -> Facts:
        samples = decode(frame)
        _check_group(group, samples)
        kept = kept_lengths(samples, self._packing.seq_len)
        if not kept.all():
            name = samples.ids[int(kept.argmin())]
            raise InvalidInput(
                f"group {group!r}: sample {name!r} begins with an image that does not fit seq_len "
                f"{self._packing.seq_len}; raise seq_len or use smaller images"
            )
        version = max(int(samples.policy_versions.min()), 0)
        run = samples.text["run"][0]
        return Facts(samples=len(samples), tokens=samples.num_tokens, policy_version=version, run=run)

    def make(self, step: int, frames: Sequence[Buffer]) -> BuiltStep:
        samples = Samples.concat([decode(frame) for frame in frames])
        made = plan(SampleFacts.of(samples, self._packing.seq_len), self._packing)
        return BuiltStep(
            staged=_stage(step, samples, made.rank_plans),
            rank_plans=tuple(rank_plan.to_bytes() for rank_plan in made.rank_plans),
            samples=len(samples),
            tokens=samples.num_tokens,
            loss_tokens=made.totals.step.loss_tokens,
        )

    def again(self, step: int, frames: Sequence[Buffer], rank_plans: Sequence[bytes]) -> Staged:
        samples = Samples.concat([decode(frame) for frame in frames])
        return _stage(step, samples, [RankPlan.from_bytes(rank_plan) for rank_plan in rank_plans])

    def misfits(self, frames: Sequence[Buffer]) -> list[int]:
        good: list[Samples] = []
        bad: list[int] = []
        for i, frame in enumerate(frames):
            try:
                samples = decode(frame)
                check_columns(SampleFacts.of(Samples.concat([*good, samples]), self._packing.seq_len))
                plan(SampleFacts.of(samples, self._packing.seq_len), self._packing)
            except PenstockError:
                bad.append(i)
            else:
                good.append(samples)
        return bad


def _check_group(group: str, samples: Samples) -> None:
    if not group:
        raise InvalidInput("group '': no id; give each group its own")
    if not len(samples):
        raise InvalidInput(f"group {group!r}: no samples; a group has at least one")
    foreign = next((name for name in samples.text["group"] if name != group), group)
    if foreign != group:
        raise InvalidInput(f"group {group!r}: holds a sample of group {foreign!r}; put groups one by one")
    runs = sorted(set(samples.text["run"]))
    if len(runs) > 1:
        raise InvalidInput(f"group {group!r}: samples of runs {runs[0]!r} and {runs[1]!r}; a group belongs to one run")
    if len(set(samples.ids)) != len(samples):
        raise InvalidInput(f"group {group!r}: two samples have the same id; ids must be unique")


def _stage(step: int, samples: Samples, rank_plans: Sequence[RankPlan]) -> Staged:
    """Each rank's plan and payload: only the samples it needs."""
    plans = [rank_plan.relative().to_bytes() for rank_plan in rank_plans]
    frames = [encode(samples.take(rank_plan.needs)) for rank_plan in rank_plans]
    digests = [digest_of(packed, frame) for packed, frame in zip(plans, frames, strict=True)]
    return Staged(step=step, plans=plans, payloads=[[frame] for frame in frames], digests=digests)
