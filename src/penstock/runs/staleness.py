"""Simulate what a staleness policy does to a workload: generation and training in virtual time.

Nothing is generated or trained. A worker is busy for as long as its longest sample takes, the trainer for as long as
its step costs. Between them is the real code: prompts are handed out as the limiter allows (`lease_room`), groups wait
in a `Table`, steps are masked and planned as in a plane. With late rewards a group waits for its judge first, and its
worker does not. The same workload and settings give the same numbers.

    drop      groups that are more than `staleness` versions old when they are drawn are dropped
    mask      tokens that are more than `staleness` versions old are left out of the loss
    pace      prompts are handed out only while their groups can still be trained in time (`Paced`)
    window    the same, and groups are trained in order of dispatch (`WindowedFifo`)
    replay    groups are drawn at random, twice each, and the oldest make room
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidInput, WaitTimeout
from penstock.frames import GroupMetadata, join_metadata, mask_stale
from penstock.log import reading
from penstock.packing import Packing, plan
from penstock.replay import Fifo, Paced, Replay, Table, Uniform, WindowedFifo

CAPACITY = 1 << 16
_DECODE_TOKENS_S = 50.0
"""Tokens per second of one sample."""
MAX_SAMPLES = 1 << 24
"""Samples of a workload, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is generated: prompts in order, each with the samples of one group."""

    lengths: list[NDArray[np.int64]]
    """Per prompt [samples] sampled tokens."""
    rewards: list[NDArray[np.float64]]
    """Per prompt [samples]; NaN where a sample has none."""
    freed: int = 0
    """Groups of the recorded run that are missing here, because their metadata is freed."""

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The machines: how fast what is generated and trained."""

    groups_per_step: int = 16
    workers: int = 48
    """Groups generated at the same time."""
    ranks: int = 4
    train_ratio: float = 1.2
    """Speed of the trainer, relative to generation with all workers busy."""
    judge_s: float = 0.0
    """Mean seconds, exponentially distributed, until a finished group has its late rewards. 0: rewards come with it."""


def lognormal_workload(prompts: int, samples: int, *, median: float, sigma: float, seed: int) -> Workload:
    """Make a workload with lognormal lengths. A prompt's difficulty makes its answers longer and its rewards lower."""
    if prompts < 1 or samples < 1 or prompts * samples > MAX_SAMPLES or not (1 <= median <= 1e6 and 0 <= sigma <= 4):
        raise InvalidInput(
            f"workload: {prompts} prompts of {samples} samples, median {median} and sigma {sigma}; give at most "
            f"{MAX_SAMPLES:,} samples, a median from 1 to 1,000,000 and a sigma from 0 to 4"
        )
    rng = np.random.default_rng(seed)
    hard = rng.normal(size=(prompts, 1))
    # Half of the variance is the prompt's, half is the sample's own.
    logs = np.log(median) + sigma * (hard + rng.normal(size=(prompts, samples))) / np.sqrt(2)
    lengths = np.clip(np.exp(logs), 1, 64 * median).astype(np.int64)
    rewards = (rng.random((prompts, samples)) < 1 / (1 + np.exp(hard))).astype(np.float64)
    return Workload(lengths=list(lengths), rewards=list(rewards))


def recorded_workload(folder: Path) -> Workload:
    """Read lengths and rewards of a run's groups, in order of arrival."""
    with reading(folder) as log:
        put = [row.op for row in log.groups() if not row.is_evaluation]
        found = log.metadata_of(put)
    groups = [GroupMetadata.from_bytes(data) for _, data in sorted(found.items())]
    if not groups:
        what = "the metadata of its groups is freed; record a run with retain='all'" if put else "no group was put yet"
        raise InvalidInput(f"{folder}: {what}")
    none = np.full(1, np.nan)
    return Workload(
        lengths=[np.frombuffer(group.loss_tokens, "<i8").clip(1) for group in groups],
        rewards=[
            np.frombuffer(group.rewards, "<f4").astype(np.float64) if group.rewards else none.repeat(group.num_samples)
            for group in groups
        ],
        freed=len(put) - len(groups),
    )


def _replay(policy: str, staleness: int, window: float, groups: int) -> Replay:
    buffer = (staleness + 1) * groups
    makers: dict[str, Callable[[], Replay]] = {
        "drop": lambda: Replay(capacity=CAPACITY, max_staleness=staleness),
        "mask": lambda: Replay(capacity=buffer),
        "pace": lambda: Replay(capacity=CAPACITY, limiter=Paced(staleness)),
        "window": lambda: Replay(
            capacity=CAPACITY, limiter=Paced(staleness), sampler=WindowedFifo(staleness, window, groups)
        ),
        "replay": lambda: Replay(capacity=buffer, sampler=Uniform(), remover=Fifo(), max_times_sampled=2),
    }
    if policy not in makers:
        raise InvalidInput(f"policy {policy!r}: not one of {', '.join(makers)}")
    return makers[policy]()


POLICIES = ("drop", "mask", "pace", "window", "replay")


@dataclass(slots=True)
class _Sums:
    """Sums over samples: how many, their tokens, their rewards."""

    samples: int = 0
    tokens: int = 0
    scored: int = 0
    reward: float = 0.0

    def add(self, tokens: NDArray[np.int64], rewards: NDArray[np.float64]) -> None:
        known = rewards[~np.isnan(rewards)]
        self.samples += len(tokens)
        self.tokens += int(tokens.sum())
        self.scored += len(known)
        self.reward += float(known.sum())

    @property
    def length_mean(self) -> float:
        return self.tokens / max(self.samples, 1)

    @property
    def reward_mean(self) -> float:
        return self.reward / max(self.scored, 1)


@dataclass(slots=True)
class _Simulation:
    """One policy on one workload."""

    workload: Workload
    rates: Rates
    table: Table
    staleness: int
    masks: bool
    packing: Packing
    train_cost_s: float
    """What the trainer computes per second, in the unit of the packer's cost."""
    now: float = 0.0
    version: int = 0
    updates: list[float] = field(default_factory=list)
    """When each version after 0 was published."""
    begun: int = 0
    running: int = 0
    accepted: int = 0
    busy_s: float = 0.0
    trains: bool = False
    waiting: deque[tuple[int, GroupMetadata]] = field(default_factory=deque)
    """Finished groups that wait for room in the table. Their workers wait too."""
    judged: dict[int, GroupMetadata] = field(default_factory=dict)
    """Finished groups that wait for their rewards. Their workers go on, and they count as accepted."""
    judges: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    began: dict[int, float] = field(default_factory=dict)
    events: list[tuple[float, int]] = field(default_factory=list)
    """When, and the prompt that is finished; -1: the step; -2 - prompt: its rewards."""
    generated: _Sums = field(default_factory=_Sums)
    trained: _Sums = field(default_factory=_Sums)
    stale: list[int] = field(default_factory=list)
    used: dict[int, int] = field(default_factory=dict)
    """Prompt -> most of its tokens that a step trained."""

    def run(self, steps: int) -> None:
        self._turn()
        while self.version < steps and self.events:
            self.now, what = heapq.heappop(self.events)
            if what == -1:
                self._trained()
            elif what < 0:
                self._scored(-2 - what)
            else:
                self._finished(what)
            self._turn()

    def _turn(self) -> None:
        """Do everything that can be done now."""
        self._let_in()
        self._hand_out()
        self._train()

    def _hand_out(self) -> None:
        rates = self.rates
        while self.running + len(self.waiting) < rates.workers:
            room = self.table.settings.limiter.lease_room(
                version=self.version,
                groups_per_step=rates.groups_per_step,
                accepted=self.accepted,
                running=self.running + len(self.waiting),
            )
            if room == 0:
                return
            self.running += 1
            self.began[self.begun] = self.now
            self.table.expect(self.begun)
            lengths = self.workload.lengths[self.begun % len(self.workload)]
            heapq.heappush(self.events, (self.now + int(lengths.max()) / _DECODE_TOKENS_S, self.begun))
            self.begun += 1

    def _finished(self, prompt: int) -> None:
        self.running -= 1
        self.waiting.append((prompt, self._metadata(prompt)))
        at = prompt % len(self.workload)
        self.generated.add(self.workload.lengths[at], self.workload.rewards[at])

    def _let_in(self) -> None:
        while self.waiting:
            prompt, group = self.waiting[0]
            if not self.rates.judge_s:
                try:
                    self.accepted += self._insert(prompt, group)
                except WaitTimeout:
                    return
            elif self.table.may_insert(ahead=len(self.judged)):
                self.accepted += 1
                self.judged[prompt] = group
                seconds = float(self.judges.exponential(self.rates.judge_s))
                heapq.heappush(self.events, (self.now + seconds, -2 - prompt))
            else:
                return
            self.waiting.popleft()

    def _scored(self, prompt: int) -> None:
        """Let a group into the table that has its late rewards. It had its room since it was put."""
        if not self._insert(prompt, self.judged.pop(prompt)):
            self.accepted -= 1

    def _insert(self, prompt: int, group: GroupMetadata) -> bool:
        """Returns False if the group is too stale."""
        version = group.policy_version or 0
        handle = self.table.insert(prompt, group, policy_version=version, dispatch=prompt, timeout=0)
        if handle is None:
            self.table.unexpect(prompt)
        return handle is not None

    def _metadata(self, prompt: int) -> GroupMetadata:
        """Return the metadata of a generated group: weights changed while it was sampled."""
        lengths = self.workload.lengths[prompt % len(self.workload)]
        began, speed = self.began.pop(prompt), _DECODE_TOKENS_S
        first = int(np.searchsorted(self.updates, began, side="right"))
        # With updates at 4 s and 6 s, a sample that began at 3 s with 1 token/s has edges 1 and 3: one token of version
        # 0, two of version 1, the rest of version 2.
        edges = np.concatenate([[0], np.ceil((np.array(self.updates[first:]) - began) * speed), [np.inf]])
        counts = np.diff(np.minimum(edges[None, :], lengths[:, None]), axis=1).astype(np.int64)
        versions = [tuple((first + k, n) for k, n in enumerate(row) if n > 0) for row in counts.tolist()]
        return _group(str(prompt), lengths, first, tuple(versions))

    def _train(self) -> None:
        if self.trains:
            return
        try:
            batch = self.table.sample(self.rates.groups_per_step, timeout=0)
        except WaitTimeout:
            return
        groups: list[GroupMetadata] = batch.items.tolist()
        oldest = max(0, self.version - self.staleness) if self.masks else 0
        joined = mask_stale(join_metadata(groups), groups, oldest)
        made = plan(joined, self.packing)
        prompts: list[int] = batch.keys.tolist()
        rewards = np.concatenate([self.workload.rewards[prompt % len(self.workload)] for prompt in prompts])
        some = joined.kept_loss_tokens > 0
        self.trained.add(joined.kept_loss_tokens[some], rewards[some])
        self.stale += batch.staleness.tolist()
        at = 0
        for prompt, group in zip(prompts, groups, strict=True):
            tokens = int(joined.kept_loss_tokens[at : at + group.num_samples].sum())
            self.used[prompt] = max(self.used.get(prompt, 0), tokens)
            at += group.num_samples
        self.trains = True
        seconds = made.accounting.step_cost * self.packing.ranks / self.train_cost_s
        self.busy_s += seconds
        heapq.heappush(self.events, (self.now + seconds, -1))

    def _trained(self) -> None:
        self.trains = False
        self.version += 1
        self.updates.append(self.now)
        self.accepted -= self.table.advance(self.version)

    def report(self) -> dict[str, float]:
        held_keys = self.table.keys()
        may_train = [int(key) for key in held_keys if key not in self.used]
        may_train += [*(prompt for prompt, _ in self.waiting), *self.judged]
        held = sum(int(self.workload.lengths[prompt % len(self.workload)].sum()) for prompt in may_train)
        settled = self.generated.tokens - held
        used = sum(self.used.values())
        return {
            "steps": self.version,
            "seconds": self.now,
            "trained_tokens_s": self.trained.tokens / self.now if self.now else 0.0,
            "idle": 1 - self.busy_s / self.now if self.now else 0.0,
            "staleness_mean": float(np.mean(self.stale)) if self.stale else 0.0,
            "staleness_max": max(self.stale, default=0),
            "discarded": max(0.0, 1 - used / settled) if settled > 0 else 0.0,
            "gen_length": self.generated.length_mean,
            "train_length": self.trained.length_mean,
            "length_bias": self.trained.length_mean / max(self.generated.length_mean, 1e-9) - 1,
            "gen_reward": self.generated.reward_mean,
            "train_reward": self.trained.reward_mean,
            "reward_bias": self.trained.reward_mean - self.generated.reward_mean,
        }


def simulate_staleness(
    policy: str,
    workload: Workload,
    *,
    rates: Rates | None = None,
    staleness: int = 2,
    window: float = 0.3,
    steps: int = 100,
) -> dict[str, Any]:
    """Run one policy until `steps` are trained. Returns its figures by name."""
    rates = rates or Rates()
    longest = max(int(lengths.max()) for lengths in workload.lengths) + 1
    packing = Packing(ranks=rates.ranks, seq_len=longest)
    replay = _replay(policy, staleness, window, rates.groups_per_step)
    cost = sum(float(packing.cost.of_samples(lengths).sum()) for lengths in workload.lengths)
    seconds = sum(int(lengths.max()) for lengths in workload.lengths) / _DECODE_TOKENS_S
    found = _Simulation(
        workload=workload,
        rates=rates,
        table=Table.from_settings(replay),
        staleness=staleness,
        masks=policy == "mask",
        packing=packing,
        train_cost_s=rates.train_ratio * rates.workers * cost / seconds,
    )
    found.run(steps)
    return {"policy": policy, **found.report()}


def _group(name: str, lengths: NDArray[np.int64], version: int, versions: tuple[Any, ...]) -> GroupMetadata:
    """Return the metadata of a group of text samples: one token of prompt, the others sampled."""
    count, total = len(lengths), (lengths + 1).astype("<i8").tobytes()
    sampled, nothing = lengths.astype("<i8").tobytes(), bytes(8 * count)
    terms = np.zeros((count, 3), "<i8")
    terms[:, 0] = lengths
    return GroupMetadata(
        group=name,
        prompt=name,
        run="",
        seq_len=int(lengths.max()) + 1,
        num_tokens=int(lengths.sum()) + count,
        policy_version=version,
        kinds={},
        columns=("token_ids", "loss_mask"),
        ids=tuple(f"{name}/{i}" for i in range(count)),
        modes=("rl",),
        lengths=total,
        kept=total,
        loss_tokens=sampled,
        kept_loss_tokens=sampled,
        patches=nothing,
        stub=nothing,
        stub_patches=nothing,
        term_tokens=terms.tobytes(),
        modality=bytes(count),
        has=b"\1" * (2 * count),
        parents=(),
        shared=(),
        versions=versions,
        digests=(),
    )
