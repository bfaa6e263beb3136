"""Play a verifiers environment and put its groups into a plane as they finish.

Each task is played `group_size` times against an OpenAI-compatible endpoint, and these rollouts are one group. At most
`in_flight` episodes run at once, and a finished group is put while others are played. When the plane is full, puts
wait, and no new task is started in the meantime.

    from penstock.integrations.environments.verifiers_rollouts import Environment, Rollouts

    rollouts = Rollouts(environment=Environment(name="my-taskset"), endpoint="http://127.0.0.1:8000/v1")
    rollouts.run(plane)            # or: await rollouts.arun(plane)

If several agents are trained, each has its own groups: a baseline compares rollouts in one role. An agent that never
got a turn in an episode has no rollout there; the others of the episode keep theirs, and their rewards. Failed rollouts
are left out of the baseline and train nothing. A group in which all rollouts failed is counted and not put. What is not
put is counted in the plane's ledger under its reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.capture import ImageLookup, Trajectory, failure_of, from_verifiers, is_silent
from penstock.client import Plane
from penstock.convert import Advantage, Filter, Group, grpo
from penstock.errors import ConfigError, InvalidInput, PeerError
from penstock.extras import require
from penstock.integrations.environments.verifiers_env import (
    Environment,
    Play,
    ask_endpoint,
    free_renderers,
    model_context,
    tasks_of,
)
from penstock.integrations.formats.trajectory_files import SAMPLE

__all__ = ["SAMPLE", "TRACES_FILE", "Environment", "Rollouts", "Tally"]

TRACES_FILE = "traces.jsonl"
"""verifiers' name for it in a results folder."""
_FAILED = "rollout failed"
_SILENT = "agent without a message"
_DROPPED = "dropped by the environment"
_ANSWER_S = 5.0
"""Seconds that an interrupted put waits for its answer."""


@dataclass(slots=True)
class Tally:
    """Counts of what was put and what was not."""

    groups: int = 0
    """Groups put."""
    rollouts: int = 0
    """Rollouts in those groups."""
    tokens: int = 0
    rewards: float = 0.0
    """Summed over the rollouts that have one."""
    rewarded: int = 0
    failed: int = 0
    """Failed rollouts, put or not."""
    silent: int = 0
    """Agents that never got a turn in their episode."""
    dropped: int = 0
    """Rollouts that the environment dropped (`trace.dropped`)."""
    failed_groups: int = 0
    """Groups not put because every rollout failed."""
    dropped_groups: int = 0
    """Groups not put: every rollout failed, or filters or the environment removed all."""
    playing: int = 0
    """Episodes running now."""
    first_failure: str = ""
    last_failure: str = ""
    failures_in_a_row: int = 0
    """Groups in a row in which every rollout failed."""

    def count(self, group: Group, rollouts: Sequence[Trajectory], *, put: bool) -> None:
        """Count a group made from rollouts. It is not put if filters removed all that worked."""
        if not put:
            self.dropped_groups += 1
            return
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        self.groups += 1
        self.rollouts += len(rollouts)
        self.tokens += group.num_tokens
        self.rewards += sum(rewards)
        self.rewarded += len(rewards)

    def __str__(self) -> str:
        reward = f", mean reward {self.rewards / self.rewarded:.3f}" if self.rewarded else ""
        lost = {
            "failed": self.failed,
            "agents without a message": self.silent,
            "dropped by the environment": self.dropped,
            "groups not put": self.dropped_groups,
        }
        counts = "".join(f", {count:,} {name}" for name, count in lost.items() if count)
        return f"{self.groups:,} groups put, {self.rollouts:,} rollouts, {self.tokens:,} tokens{reward}{counts}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """What to roll out, and how. `run` plays and puts."""

    environment: Environment
    endpoint: str
    """Base URL of a server with /inference/v1/generate; ends in /v1."""
    model: str = ""
    """The endpoint's name for the model; empty: its first model."""
    tokenizer: str = ""
    """Folder or name of the tokenizer that renders prompts; empty: that of `model`."""
    renderer: str = ""
    """Name of a renderer of the `renderers` package; empty: found by the model's name."""
    api_key_var: str = "OPENAI_API_KEY"
    """Environment variable with the endpoint's key."""
    sampling: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 1.0})
    """temperature, top_p, max_tokens, ... under the endpoint's names."""
    group_size: int = 8
    groups: int | None = None
    """Number of groups; None: until stopped."""
    in_flight: int = 32
    """Episodes played at the same time."""
    max_failures: int = 3
    """End after this many groups in a row in which every rollout failed."""
    seed: int | None = None
    """Seed for the order of tasks; None: another order each time."""
    evaluation: bool = False
    """Record the groups and never train them."""
    advantage: Advantage | None = grpo
    filters: tuple[Filter, ...] = ()
    images: ImageLookup | None = None
    """An image's URL -> its hash and grid; for traces that hold image tokens."""
    traces: Path | None = None
    """A folder. Episodes are appended to its `traces.jsonl`, so that they can be annotated later."""

    def __post_init__(self) -> None:
        for name in ("group_size", "in_flight", "max_failures"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)}; must be at least 1")
        if self.groups is not None and self.groups < 1:
            raise ConfigError(f"groups: {self.groups}; must be at least 1, or None for no end")

        if self.evaluation and self.filters:
            raise ConfigError(f"filters: {len(self.filters)}; leave them out, evaluation keeps all rollouts")

    def run(self, plane: Plane, tally: Tally | None = None) -> Tally:
        """Run `arun` in a new event loop. Ends after the last group, or at an interrupt."""
        return asyncio.run(self.arun(plane, tally))

    @contextlib.contextmanager
    def running(self, plane: Plane) -> Iterator[Tally]:
        """Run `arun` in a thread during a `with` block. An error in it is raised at the end of the block."""
        loop, tally = asyncio.new_event_loop(), Tally()
        task = loop.create_task(self.arun(plane, tally))
        thread = threading.Thread(target=_run_out, args=(loop, task), daemon=True, name="rollouts")
        thread.start()
        try:
            yield tally
        finally:
            with contextlib.suppress(RuntimeError):  # the loop has already ended
                loop.call_soon_threadsafe(task.cancel)
            thread.join()
        if not task.cancelled():
            task.result()

    async def arun(
        self, plane: Plane, tally: Tally | None = None, *, on_change: Callable[[Tally], None] | None = None
    ) -> Tally:
        """Play and put. Returns the tally. Pass your own `tally` to have the counts after an error too."""
        require("penstock rollouts verifiers", "verifiers")
        found = Tally() if tally is None else tally
        card = await ask_endpoint(self.endpoint, api_key_var=self.api_key_var)
        context = model_context(
            endpoint=self.endpoint,
            model=self.model or str(card["id"]),
            tokenizer=self.tokenizer,
            renderer=self.renderer,
            api_key_var=self.api_key_var,
            sampling=self.sampling,
        )
        env = await asyncio.to_thread(self.environment.load)
        free_renderers()
        async with self.environment.playing(env, context) as play:
            await _Players(self, plane, play, found, on_change).run(env)
        if found.failed_groups and found.failed_groups == found.dropped_groups and not found.groups:
            raise self.failed(found, f"every rollout of {found.failed_groups} groups failed")
        return found

    def failed(self, tally: Tally, what: str) -> PeerError:
        """Build the error that ends a run of failed rollouts."""
        last = "" if tally.last_failure == tally.first_failure else f", the last with {tally.last_failure}"
        return PeerError(
            f"{what}; the first with {tally.first_failure}{last}; check the environment and {self.endpoint}"
        )


class _Players:
    """Runs episodes concurrently and puts the groups they form."""

    def __init__(
        self,
        rollouts: Rollouts,
        plane: Plane,
        play: Play,
        tally: Tally,
        on_change: Callable[[Tally], None] | None,
    ) -> None:
        self._rollouts, self._plane, self._play, self._tally = rollouts, plane, play, tally
        self._on_change = on_change or (lambda _: None)
        self._places = asyncio.Semaphore(rollouts.in_flight)
        # Twice as many groups as fill the slots: while the last episode of one group ends, others' are played.
        # With in_flight 32 and groups of 8: 2 * 4 = 8 groups. -(-a // b) rounds up.
        self._groups = asyncio.Semaphore(2 * -(-rollouts.in_flight // rollouts.group_size))
        self._writing = asyncio.Lock()

    async def run(self, env: Any) -> None:
        seed = random.SystemRandom().getrandbits(32) if self._rollouts.seed is None else self._rollouts.seed
        tasks, begun = tasks_of(env, seed=seed), 0
        try:
            async with asyncio.TaskGroup() as group:
                while self._rollouts.groups is None or begun < self._rollouts.groups:
                    await self._groups.acquire()
                    task = await asyncio.to_thread(next, tasks)  # may load data: not on the event loop
                    group.create_task(self._group(task))
                    begun += 1
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None

    async def _group(self, task: Any) -> None:
        try:
            version = await self._version()
            episodes = await asyncio.gather(
                *(self._episode(task) for _ in range(self._rollouts.group_size)), return_exceptions=True
            )
            await self._put(_name(task), version, episodes)
        finally:
            self._groups.release()
            self._on_change(self._tally)

    async def _episode(self, task: Any) -> Any:
        async with self._places:
            self._tally.playing += 1
            try:
                return await self._play(task)
            finally:
                self._tally.playing -= 1
                self._on_change(self._tally)

    async def _version(self) -> int | None:
        """Return the version of the weights about to sample: as the endpoint reports it, else as the plane knows it."""
        try:
            card = await ask_endpoint(self._rollouts.endpoint, api_key_var=self._rollouts.api_key_var)
        except ConfigError:
            card = {}  # unreachable: the episodes fail too, and are counted
        version = card.get("policy_version")
        return version if isinstance(version, int) else await asyncio.to_thread(lambda: self._plane.policy_version)

    async def _put(self, prompt: str, version: int | None, episodes: Sequence[Any]) -> None:
        by_agent: dict[str, list[tuple[Trajectory, Any]]] = defaultdict(list)
        lost: Counter[str] = Counter()
        agents: set[str] = set()
        for episode in episodes:
            for trace in self._traces(episode, lost):
                agents.add(trace.agent.name)
                for trajectory in self._read(episode, trace, lost):
                    by_agent[trajectory.agent].append((trajectory, trace))
        useful = {name: rows for name, rows in by_agent.items() if any(t.error is None for t, _ in rows)}
        for agent, rows in useful.items():
            await self._put_group(f"{prompt}/{agent}" if len(agents) > 1 else prompt, version, rows)
        await self._write([episode for episode in episodes if not isinstance(episode, BaseException)])
        lost[_FAILED] += sum(len(rows) for name, rows in by_agent.items() if name not in useful)
        for reason in [reason for reason in lost if lost[reason]]:
            await self._plane.adiscard(reason, lost[reason], prompt=prompt)
        self._count_outcome(put=bool(useful), lost=lost)

    def _count_outcome(self, *, put: bool, lost: Counter[str]) -> None:
        """Count a task whose episodes have ended. Raises PeerError after too many that only failed."""
        tally = self._tally
        tally.silent += lost[_SILENT]
        tally.dropped += lost[_DROPPED]
        failed = not put and not lost[_DROPPED]
        tally.dropped_groups += not put
        tally.failed_groups += failed
        tally.failures_in_a_row = tally.failures_in_a_row + 1 if failed else 0
        if failed and not tally.first_failure:
            tally.first_failure = tally.last_failure = "no agent had a turn"
        if tally.failures_in_a_row >= self._rollouts.max_failures:
            raise self._rollouts.failed(tally, f"{tally.failures_in_a_row} groups in a row have only failed rollouts")

    def _traces(self, episode: Any, lost: Counter[str]) -> list[Any]:
        """Return the traces of an episode's trained agents; none if it failed before it had any."""
        if isinstance(episode, BaseException):
            if not isinstance(episode, Exception):
                raise episode
            self._note_failure(f"{type(episode).__name__}: {episode}")
            lost[_FAILED] += 1
            return []
        if not episode.traces:
            self._note_failure(failure_of(episode) or "an episode without a trace")
            lost[_FAILED] += 1
        return [trace for trace in episode.traces if trace.agent.trainable]

    def _read(self, episode: Any, trace: Any, lost: Counter[str]) -> list[Trajectory]:
        """Return the trajectory of a trace, or count why it has none. Other traces of the episode are unaffected."""
        reason = failure_of(trace) or failure_of(episode)
        if getattr(trace, "dropped", None) is not None:
            lost[_DROPPED] += 1
            return []
        if is_silent(trace) and reason is None:
            lost[_SILENT] += 1
            return []
        try:
            found = from_verifiers(episode.model_copy(update={"traces": [trace]}), images=self._rollouts.images)
        except InvalidInput as error:
            found, reason = [], reason or str(error)
        if reason is not None:
            self._note_failure(reason)
        lost[_FAILED] += not found
        return found

    def _note_failure(self, reason: str) -> None:
        self._tally.failed += 1
        self._tally.last_failure = reason[:500]
        self._tally.first_failure = self._tally.first_failure or self._tally.last_failure

    async def _put_group(self, prompt: str, version: int | None, rows: list[tuple[Trajectory, Any]]) -> None:
        rollouts = self._rollouts
        builder = self._plane.agroup(
            prompt,
            policy_version=version,
            advantage=rollouts.advantage,
            filters=rollouts.filters,
            evaluation=rollouts.evaluation,
        )
        for number, (trajectory, trace) in enumerate(rows):
            builder.add(trajectory)
            trace.info[SAMPLE] = f"{builder.id}/{number}"

        def count(group: Group) -> None:
            put = len(group) > 0 and not builder.has_failed(group)
            self._tally.count(group, [trajectory for trajectory, _ in rows], put=put)

        putting = asyncio.create_task(builder.put())
        try:
            group = await asyncio.shield(putting)
        except asyncio.CancelledError:
            # The put is probably accepted already. Wait for the answer, so that the tally counts it.
            await asyncio.wait({putting}, timeout=_ANSWER_S)
            if putting.done() and not putting.cancelled() and putting.exception() is None:
                count(putting.result())
            putting.cancel()
            raise
        count(group)

    async def _write(self, episodes: Sequence[Any]) -> None:
        if self._rollouts.traces is None:
            return
        path = self._rollouts.traces / TRACES_FILE
        lines = [json.dumps(episode.to_record(float_decimals=None)) + "\n" for episode in episodes]
        async with self._writing:
            await asyncio.to_thread(_append, path, lines)


def _run_out(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Tally]) -> None:
    """Run the loop until the task has ended, and close it. `running` raises the task's error."""
    try:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            loop.run_until_complete(task)
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()


def _append(path: Path, lines: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(lines)


def _name(task: Any) -> str:
    """Return the prompt's name: the task's own, or its index in the taskset."""
    data = task.data
    return str(next(value for value in (data.id, data.name, data.idx, task.key) if value is not None))
