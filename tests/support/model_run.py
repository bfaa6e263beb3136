"""Random decisions against a crash copy: a plane rebuilt at any point equals the plane that never stopped.

One seed is one run: settings are drawn, then decisions (groups to be trained or evaluated, steps, commits, priorities,
shares, evictions, resumes, quarantines, restarts). At random moments the folder is copied as it lies, as a crash would
leave it, and a second plane is rebuilt from the copy. All it holds in memory must be equal to what the first one holds;
then both take the same decisions for a while, and must give the same answers, down to the digests of the steps.

    python -m tests.support.model_run --seed 17       one seed, with what happened
    python -m tests.support.model_run --runs 1000     many, until one fails
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from penstock.errors import PenstockError
from penstock.frames import encode
from penstock.log import SqliteLog
from penstock.packing import Packing
from penstock.plane.settings import PlaneSettings, Replay, Target
from penstock.replay import Fifo, Lifo, Limiter, Prioritized, SamplesPerInsert, Selector, Uniform
from tests.support.engines import DirectEngine
from tests.support.groups import named_group
from tests.support.plane_memory import memory_of

RUNS = ("a", "b", "c")
SNAPSHOTS = (1, 2, 3, 5, 10, 50, 20_000)
"""Decisions between two snapshots of memory."""


def open_engine(settings: PlaneSettings, folder: Path) -> DirectEngine:
    """A plane's decisions over a folder; whatever is there is rebuilt."""
    return DirectEngine(settings, SqliteLog(folder, max_disk_bytes=settings.max_disk_bytes))


def close_engine(engine: DirectEngine, *, orderly: bool) -> None:
    """Stop; without order, nothing more is written, as after `kill -9`."""
    if orderly:
        engine.close()
    engine.log.close()


class Differs(AssertionError):
    """A rebuilt plane is not the one it was rebuilt from."""


@dataclass(slots=True)
class Result:
    """What a run did."""

    decisions: Counter[str] = field(default_factory=Counter)
    copies: int = 0
    """Crash copies that were rebuilt and compared."""
    restarts: int = 0

    def add(self, other: Result) -> None:
        self.decisions += other.decisions
        self.copies += other.copies
        self.restarts += other.restarts


class ModelRun:
    """One run. A decision is a name and what it needs; it is made on the plane, and on its twin while there is one."""

    def __init__(self, seed: int, folder: Path, note: Callable[[str], None] = lambda _: None) -> None:
        self.seed, self._folder, self._note = seed, folder, note
        self._rng = Random(seed)
        self.settings = _settings(self._rng)
        self.result = Result()
        self._engine = open_engine(self.settings, folder / "run")
        self._twin: DirectEngine | None = None
        self._twin_until = 0
        self._puts: list[tuple[str, bytes, bool]] = []
        """Name, frame, and whether it is for evaluation."""
        self._session = self._received = 0

    def run(self, decisions: int) -> Result:
        """Make this many decisions. Raises `Differs`."""
        self._note(f"{self.settings}")
        try:
            for number in range(decisions):
                self._decide()
                if self._twin is not None and number >= self._twin_until:
                    self._end_twin()
                elif self._twin is None and self._rng.random() < 0.15:
                    self._crash_copy(number + self._rng.choice([0, 1, 3, 10]))
                elif self._twin is None and self._rng.random() < 0.04:
                    self._restart()
            self._crash_copy(decisions)
        finally:
            self._drop_twin()
            with suppress(PenstockError):
                close_engine(self._engine, orderly=False)
        return self.result

    # -------------------------------------------------------------- decisions

    def _decide(self) -> None:
        name = self._rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        decision = getattr(self, f"_{name}")()
        if decision is None:
            return
        self.result.decisions[name] += 1
        answer = _answer(decision, self._engine)
        self._note(f"{name}: {answer}")
        self._check(self._engine.ledger.balanced, f"after {name}: {self._engine.ledger}")
        if self._twin is not None:
            other = _answer(decision, self._twin)
            self._check(answer == other, f"{name}: {answer}, and on the copy {other}")

    def _put(self) -> Callable[[DirectEngine], Any]:
        batch = [self._group() for _ in range(self._rng.choice([1, 1, 2, 4]))]
        self._puts += batch

        def decision(engine: DirectEngine) -> Any:
            at_once = [
                _outcome(engine.put(name, name, frame, evaluation=evaluation)) for name, frame, evaluation in batch
            ]
            return at_once, [_outcome(outcome) for outcome in engine.flush()]

        return decision

    def _group(self) -> tuple[str, bytes, bool]:
        rng = self._rng
        if self._puts and rng.random() < 0.1:  # again, or the same name with other content, or for something else
            name, frame, evaluation = rng.choice(self._puts)
            other = frame if rng.random() < 0.7 else encode(named_group(name, samples=5))
            return name, other, evaluation != (rng.random() < 0.1)
        name = f"g{len(self._puts)}-{rng.randrange(100)}"
        version = max(self._engine.policy_version - rng.choice([0, 0, 0, 1, 3]), 0)
        run = rng.choice(RUNS) if self.settings.shares else ""
        samples = named_group(
            name, samples=rng.choice([1, 2, 3]), tokens=rng.choice([2, 6, 40]), policy_version=version, run=run
        )
        if rng.random() < 0.06:  # no log-probabilities: does not go with the others
            samples = [sample.replace(logprobs=None) for sample in samples]
        return name, encode(samples), rng.random() < 0.2

    def _plan(self) -> Callable[[DirectEngine], Any] | None:
        if self._engine.last_step - self._engine.next_step > 3:
            return None

        def decision(engine: DirectEngine) -> Any:
            made = engine.plan_step(engine.last_step + 1)
            return "waits" if isinstance(made, str) else made.digests

        return decision

    def _receive(self) -> Callable[[DirectEngine], Any] | None:
        engine = self._engine
        if engine.next_step > engine.last_step:
            return None
        step = self._rng.randint(engine.next_step, engine.last_step)
        self._received = max(self._received, step)
        return lambda engine: engine.received(step)

    def _commit(self) -> Callable[[DirectEngine], Any] | None:
        engine = self._engine
        if engine.next_step > engine.last_step:
            return None
        step, version = engine.next_step, self._rng.choice([None, engine.policy_version, engine.policy_version + 1])
        return lambda engine: engine.commit(step, version)

    def _serve_again(self) -> Callable[[DirectEngine], Any] | None:
        engine = self._engine
        ranks = engine.settings.packing.ranks
        steps = [n for n, found in engine.state.steps.items() if n >= engine.next_step or len(found.digests) == ranks]
        if not steps:
            return None
        step = self._rng.choice(sorted(steps))
        return lambda engine: engine.stage_again(step).digests

    def _report(self) -> Callable[[DirectEngine], Any] | None:
        if not self._puts:
            return None
        names = [self._rng.choice(self._puts)[0] for _ in range(3)]
        priorities = {f"{name}/0": self._rng.choice([0.0, 0.1, 1.0, 7.5, -1.0]) for name in names}
        return lambda engine: engine.report(priorities, {"loss": 1.0})

    def _resume(self) -> Callable[[DirectEngine], Any]:
        """Back, on, as far as a step was received, or too far. In between a plane that was rebuilt takes the trainer's
        word, for it cannot know that a step was not received."""
        self._session += 1
        session, engine = self._session, self._engine
        known = max(engine.next_step, self._received + 1)
        step = self._rng.choice([self._rng.randint(max(engine.next_step - 4, 1), known), known, engine.last_step + 2])
        return lambda engine: engine.resume(session, step)

    def _share(self) -> Callable[[DirectEngine], Any] | None:
        if not self.settings.shares:
            return None
        run, weight = self._rng.choice(RUNS), self._rng.choice([0.1, 1.0, 3.0])
        return lambda engine: engine.share(run, weight)

    def _evict(self) -> Callable[[DirectEngine], Any] | None:
        if not self.settings.shares:
            return None
        run = self._rng.choice(RUNS)
        return lambda engine: engine.evict(run, "for a test")

    def _settle(self) -> Callable[[DirectEngine], Any] | None:
        names = sorted(row.id for row in self._engine.state.quarantined.values())
        if not names:
            return None
        name, drop = self._rng.choice(names), self._rng.random() < 0.3
        return lambda engine: engine.settle(name, drop=drop)

    def _discard(self) -> Callable[[DirectEngine], Any]:
        reason, samples = self._rng.choice(["zero variance", "too long"]), self._rng.randint(1, 5)
        return lambda engine: engine.discard(reason, samples)

    # -------------------------------------------------------------- crashes

    def _crash_copy(self, until: int) -> None:
        """Copy the folder as it lies, rebuild a plane from the copy, compare; it follows until that decision."""
        self._drop_twin()
        copy = self._folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        _copy(self._folder / "run", copy)
        self._twin, self._twin_until = open_engine(self.settings, copy), until
        self.result.copies += 1
        self._compare(self._twin, "the copy")

    def _end_twin(self) -> None:
        if self._twin is not None:
            self._compare(self._twin, "the copy, some decisions later,")
        self._drop_twin()

    def _drop_twin(self) -> None:
        if self._twin is not None:
            close_engine(self._twin, orderly=False)
            self._twin = None

    def _restart(self) -> None:
        """Stop in order or not, and go on, also with other ranks; the memory of before is that of after."""
        before, orderly = memory_of(self._engine), self._rng.random() < 0.5
        close_engine(self._engine, orderly=orderly)
        self.settings = replace(self.settings, packing=Packing(ranks=self._rng.choice([1, 2, 3]), seq_len=32))
        self._engine = open_engine(self.settings, self._folder / "run")
        self.result.restarts += 1
        self._note(f"restarted, {'in order' if orderly else 'killed'}")
        self._differences(before, memory_of(self._engine), "the restarted plane")

    def _compare(self, other: DirectEngine, what: str) -> None:
        self._differences(memory_of(self._engine), memory_of(other), what)

    def _differences(self, mine: dict[str, Any], theirs: dict[str, Any], what: str) -> None:
        different = {name: (mine[name], theirs.get(name)) for name in mine if mine[name] != theirs.get(name)}
        self._check(not different, f"{what} differs: {different}")

    def _check(self, good: bool, what: str) -> None:
        if not good:
            raise Differs(f"seed {self.seed}: {what}"[:3000])


_WEIGHTS = {
    "put": 30,
    "plan": 20,
    "receive": 8,
    "commit": 12,
    "report": 6,
    "serve_again": 4,
    "resume": 3,
    "share": 3,
    "evict": 1,
    "settle": 3,
    "discard": 2,
}


def _copy(source: Path, target: Path) -> None:
    """What a crash leaves: every file but the lock, the space in reserve, and what SQLite shares in memory."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*-shm", "lock", "reserve"))


def _answer(decision: Callable[[DirectEngine], Any], engine: DirectEngine) -> Any:
    try:
        return decision(engine)
    except PenstockError as error:
        return type(error).__name__


def _outcome(outcome: Any) -> Any:
    return None if outcome is None else (outcome.ticket, type(outcome.error).__name__, outcome.duplicate)


def _settings(rng: Random) -> PlaneSettings:
    samplers: list[Selector] = [Fifo(), Lifo(), Uniform(), Prioritized(0.6)]
    removers: list[Selector] = [Fifo(), Lifo(), Uniform()]
    limiters: list[Limiter] = [SamplesPerInsert(ratio=1.0, min_size=2, error_buffer=8.0, batch_size=2)]
    sampler, remover, limiter = rng.choice(samplers), rng.choice(removers), rng.choice(limiters)
    queue = rng.random() < 0.4
    replay = Replay(
        capacity=rng.choice([4, 8, 64]),
        sampler=Fifo() if queue else sampler,
        remover=None if queue else remover,
        **({"limiter": limiter} if rng.random() < 0.1 else {}),
        max_times_sampled=1 if queue else rng.choice([1, 2, None]),
        max_staleness=rng.choice([None, None, 2]),
        seed=rng.randrange(1000),
    )
    return PlaneSettings(
        packing=Packing(ranks=rng.choice([1, 2, 3]), seq_len=32),
        target=rng.choice([Target(groups=2), Target(samples=3), Target(tokens=20)]),
        replay=replay,
        retain_steps=rng.choice([0, 1, 4, 64]),
        snapshot_every=rng.choice(SNAPSHOTS),
        max_held_bytes=rng.choice([4000, 1 << 20]),
        retain_eval_bytes=rng.choice([1000, 1 << 20]),
        shares={"a": 1.0, "b": 2.0} if rng.random() < 0.5 else {},
    )


@contextmanager
def _scratch() -> Any:
    where = tempfile.mkdtemp(prefix="penstock-model-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    try:
        yield Path(where)
    finally:
        shutil.rmtree(where, ignore_errors=True)


def model_run(seed: int, *, decisions: int = 60, note: Callable[[str], None] = lambda _: None) -> Result:
    """Run once in a temporary folder. Raises `Differs`."""
    with _scratch() as folder:
        return ModelRun(seed, folder, note).run(decisions)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Random decisions against a crash copy.")
    parser.add_argument("--seed", type=int, help="one run, with what happened in it")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--decisions", type=int, default=60)
    asked = parser.parse_args(argv)
    if asked.seed is not None:
        print(model_run(asked.seed, decisions=asked.decisions, note=lambda line: print(line)))
        return 0
    total = Result()
    for seed in range(asked.first, asked.first + asked.runs):
        total.add(model_run(seed, decisions=asked.decisions))
    print(f"{asked.runs} runs, {total.decisions.total():,} decisions, {total.copies:,} crash copies, 0 differences")
    return 0


if __name__ == "__main__":
    sys.exit(main())
