"""Real workers, ranks and a plane, killed again and again while prompts are leased, and a plain loader beside them.

Each process is one of `python -m tests.support.task_torture KIND FOLDER URL NUMBER --parent=PID`:

    plane      the plane; too old groups are dropped, and in a judged run those that miss their deadline, or whose
               rewards are all the same; all three are made again
    worker     for task in plane.tasks(...), puts a group for each; in a judged run without rewards
    judge      leases groups that lack rewards, and gives them random ones
    loader     the baseline: reads its shard of the prompts in a seeded order, as a DataLoader does, saves how far it
               read with every fourth batch, and continues there after a restart
    rank       trains and publishes a version with every step

`torture_tasks` starts them and kills workers, judges and the plane. In the end the log says how often each prompt of
each epoch was trained, and which values each sample got.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import penstock as ps
from penstock.errors import Conflict, PenstockError
from penstock.log import AttachColumn, reading
from penstock.plane.task_book import read_task
from penstock.protocol import Timeouts
from penstock.server.watchdog import die_with_parent
from tests.support.forked import Forked
from tests.support.ports import free_port
from tests.support.processes import Notes

WORKERS, JUDGES, RANKS, EPOCHS, GROUPS_PER_STEP = 3, 2, 2, 2, 4
AGAIN = ("stale", "lost", "columns missing", "zero variance", "rollout failed")
TIMEOUTS = Timeouts(heartbeat_s=0.3, peer_s=3.0, delivery_s=20.0, plane_s=120.0, resend_s=0.3)
PATIENCE_S = 240.0
_BATCH, _SAVE_EVERY = 2, 4


@dataclass(slots=True, kw_only=True)
class TaskResult:
    """What became of the prompts."""

    tasks: int
    """Prompts times epochs."""
    trained_once: int = 0
    skipped: int = 0
    """Prompts of an epoch that no step took."""
    repeated: int = 0
    """Prompts of an epoch that steps took more than once."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Tasks given up, by reason."""
    again: dict[str, int] = field(default_factory=dict)
    """Attempts repeated, by reason."""
    late: int = 0
    unscored: int = 0
    """Groups that were trained without a reward for each sample. Of a judged run."""
    rescored: int = 0
    """Samples that were given two values, or another one than its judge was told."""
    expired: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return self.trained_once == self.tasks and not (self.repeated or self.unscored or self.rescored)


# ------------------------------------------------------------------ the processes


def is_judged(folder: Path) -> bool:
    return (folder / "judged").exists()


def run_plane(folder: Path, url: str) -> None:
    late: dict[str, Any] = {"needs": ("rewards",), "needs_deadline_s": 8.0} if is_judged(folder) else {}
    with ps.open(
        folder / "run",
        listen=[url],
        ranks=RANKS,
        seq_len=64,
        groups_per_step=GROUPS_PER_STEP,
        max_staleness=2,
        timeouts=TIMEOUTS,
        snapshot_every=50,
        run="tasks",
        **late,
    ):
        signal.pause()


def rollouts(group: ps.client.group_builder.CollectedRollouts, rng: Random, *, judged: bool = False) -> None:
    """As a sampler makes them, in a few milliseconds."""
    time.sleep(rng.random() * 0.02)
    for reward in (None, None) if judged else (0.0, 1.0):
        turns = [ps.Turn([1, 2]), ps.Turn([rng.randrange(1000) for _ in range(4)], logprobs=[-0.5] * 4)]
        group.add(ps.Trajectory(turns=turns, reward=reward))


def run_worker(folder: Path, url: str, number: int) -> None:
    notes, rng, judged = Notes(folder / "done"), Random(), is_judged(folder)
    how: dict[str, Any] = {"advantage": "grpo", "filters": ("zero_variance",)} if judged else {}
    with ps.open(url, timeouts=TIMEOUTS) as plane:
        for task in plane.tasks(folder / "prompts.jsonl", epochs=EPOCHS, lease_s=2.0, batch=_BATCH, again=AGAIN):
            with task.group(**how) as group:
                rollouts(group, rng, judged=judged)
            notes.write(number, task.id)


def run_judge(folder: Path, url: str, number: int) -> None:
    """Give random rewards: two judges never agree, so a group that both scored shows whose value counted."""
    notes, rng = Notes(folder / "scored"), Random()
    with ps.open(url, timeouts=TIMEOUTS) as plane:
        for lease in plane.lacking("rewards", groups=4, lease_s=2.0):
            values = {sample.id: float(rng.randrange(4)) for sample in lease.samples}
            time.sleep(rng.random() * 0.02)
            try:
                result = lease.attach(values)
            except Conflict:  # the lease ran out, and another judge was faster
                notes.write(number, "conflict")
                continue
            if result.new == len(values):
                for name, value in values.items():
                    notes.write(number, name, value)


def run_loader(folder: Path, url: str, number: int) -> None:
    """Continue where the last state was saved. What was read and not put then is skipped, or put twice."""
    saved, notes, rng = folder / f"position-{number}", Notes(folder / "done"), Random()
    names = [line.strip().strip('"') for line in (folder / "prompts.jsonl").read_text().splitlines()]
    order = []
    for epoch in range(1, EPOCHS + 1):
        shuffled = sorted(names)
        Random(epoch).shuffle(shuffled)
        order += [f"{epoch}:{name}" for name in shuffled[number::WORKERS]]
    with ps.open(url, timeouts=TIMEOUTS) as plane:
        at = int(saved.read_text()) if saved.exists() else 0
        for first in range(at, len(order), _BATCH):
            if (first - at) // _BATCH % _SAVE_EVERY == _SAVE_EVERY - 1:
                ahead = saved.with_suffix(".new")
                ahead.write_text(str(first + _BATCH))  # as a loader that has read one batch ahead does
                ahead.replace(saved)
            for name in order[first : first + _BATCH]:
                with plane.group(name, policy_version=plane.policy_version) as group:
                    rollouts(group, rng)
                notes.write(number, name)


def run_rank(url: str, number: int) -> None:
    while True:
        try:
            with ps.connect(url, rank=number, world=RANKS, timeouts=TIMEOUTS) as source:
                for step in source.steps():
                    source.commit(step, policy_version=step.number)
        except PenstockError:
            time.sleep(0.2)  # another rank failed, or the plane is away: begin again where the log says


# ------------------------------------------------------------------ the run


class TaskTorture:
    def __init__(self, folder: Path, prompts: int, seed: int, kind: str) -> None:
        self.folder, self.rng, self.kind, self._num_prompts = folder, Random(seed), kind, prompts
        folder.mkdir(parents=True, exist_ok=True)
        lines = "\n".join(f'"p{number}"' for number in range(prompts))
        (folder / "prompts.jsonl").write_text(lines + "\n")
        if kind == "judged":
            (folder / "judged").touch()
            self.kind = "worker"
        self.judges = JUDGES if kind == "judged" else 0
        self.url = f"tcp://127.0.0.1:{free_port()}"
        self.processes: dict[str, Forked] = {}
        self.result = TaskResult(tasks=prompts * EPOCHS)

    def start(self, name: str) -> None:
        kind, number = name.split("-")
        words = [kind, str(self.folder), self.url, number, f"--parent={os.getpid()}"]
        with (self.folder / f"{name}.err").open("ab") as errors:
            ends = {"stderr": errors.fileno(), "stdout": errors.fileno()}
            self.processes[name] = Forked("tests.support.task_torture", words, **ends)

    def start_all(self) -> None:
        for name in ["plane-0", *(f"rank-{n}" for n in range(RANKS)), *(f"{self.kind}-{n}" for n in range(WORKERS))]:
            self.start(name)
        for n in range(self.judges):
            self.start(f"judge-{n}")

    def kill(self, name: str) -> None:
        process = self.processes[name]
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
            self.result.kills[name.split("-")[0]] += 1
        self.start(name)

    def is_working(self) -> bool:
        """Start workers again that failed. Returns False once all of them are done."""
        states = {n: self.processes[f"{self.kind}-{n}"].poll() for n in range(WORKERS)}
        for number, code in states.items():
            if code not in (None, 0):
                self.start(f"{self.kind}-{number}")
        for name in ["plane-0", *(f"judge-{n}" for n in range(self.judges))]:
            if self.processes[name].poll() is not None:
                self.start(name)
        return any(code != 0 for code in states.values())

    def run(self, kills: int) -> TaskResult:
        began, total = time.monotonic(), self.result.tasks
        self.start_all()
        try:
            for number in range(kills):
                self._until(lambda n=number: self._num_done() >= n * total * 0.8 / kills)
                self.kill(self._victim(number))
            self._until(lambda: not self.is_working())
            self._finish()
        finally:
            for process in self.processes.values():
                process.kill()
                process.wait()
        self._count()
        self.result.seconds = time.monotonic() - began
        return self.result

    def _victim(self, number: int) -> str:
        if self.judges:  # each kind as often
            kind = ("plane", self.kind, "judge")[number % 3]
            return f"{kind}-{self.rng.randrange({'plane': 1, 'judge': self.judges}.get(kind, WORKERS))}"
        return "plane-0" if self.rng.random() < 0.3 else f"{self.kind}-{self.rng.randrange(WORKERS)}"

    def _num_done(self) -> int:
        self.is_working()
        return len(Notes.read(self.folder / "done"))

    def _until(self, condition: object) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():  # type: ignore[operator]
            assert time.monotonic() < deadline, f"{self.folder}: no progress; see the .err files there"
            time.sleep(0.05)

    def _finish(self) -> None:
        """Wait until the ranks have trained what fills a step."""
        with ps.open(self.url, timeouts=TIMEOUTS) as plane:

            def is_done() -> bool:
                status = plane.status()
                return bool(
                    status["held_groups"] < GROUPS_PER_STEP
                    and not status["ledger"]["waiting"]
                    and status["last_step"] < status["next_step"]
                )

            self._until(is_done)
            status = plane.status()
        tasks = status["tasks"].get("prompts", {"dropped": {}, "again": {}})
        self.result.dropped, self.result.again = tasks["dropped"], tasks["again"]
        self.result.late, self.result.expired = status["counts"]["tasks_late"], status["counts"]["leases_expired"]

    def _count(self) -> None:
        trained: Counter[str] = Counter()
        with reading(self.folder / "run") as log:
            names = dict(enumerate(log.prompt_names(1, self._num_prompts)))
            for group, prompt in log.rows("SELECT id, prompt FROM groups WHERE uses > 0"):
                task = read_task(group)
                trained[prompt if task is None else f"{task.epoch}:{names[task.prompt]}"] += 1
        places = [f"{epoch}:p{number}" for epoch in range(1, EPOCHS + 1) for number in range(self._num_prompts)]
        self.result.trained_once = sum(trained[place] == 1 for place in places)
        self.result.skipped = sum(trained[place] == 0 for place in places)
        self.result.repeated = sum(trained[place] > 1 for place in places)
        if self.judges:
            self._count_scores()

    def _count_scores(self) -> None:
        """Compare what the log has with what judges were told."""
        told = {words[1]: float(words[2]) for words in Notes.read(self.folder / "scored") if len(words) == 3}
        with reading(self.folder / "run") as log:
            rows = {row.op: row for row in log.groups()}
            given: dict[int, dict[int, float]] = {}
            for _, record in log.records():
                if isinstance(record, AttachColumn):
                    for place, value in record.values.items():
                        before = given.setdefault(record.group, {}).setdefault(place, value)
                        self.result.rescored += before != value
        for op, row in rows.items():
            values = given.get(op, {})
            self.result.unscored += row.uses > 0 and len(values) < row.samples
            names = [f"{row.id}/{place}" for place in values]
            self.result.rescored += sum(told.get(name, v) != v for name, v in zip(names, values.values(), strict=True))


def torture_tasks(folder: Path, *, kills: int, prompts: int, seed: int = 0, kind: str = "worker") -> TaskResult:
    """Run two epochs of a list with kills. `kind`: "worker", "judged" with late rewards, "loader" for the baseline."""
    return TaskTorture(folder, prompts, seed, kind).run(kills)


def main(words: Sequence[str]) -> None:
    what, where, address, index, parent = words
    die_with_parent(int(parent.removeprefix("--parent=")), signal.SIGKILL)
    if what == "plane":
        run_plane(Path(where), address)
    elif what == "rank":
        run_rank(address, int(index))
    else:
        {"worker": run_worker, "loader": run_loader, "judge": run_judge}[what](Path(where), address, int(index))


if __name__ == "__main__":
    main(sys.argv[1:])
