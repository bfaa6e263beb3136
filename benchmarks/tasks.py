"""Leased prompts and late rewards: how fast they are handed out and completed, and what open leases cost a turn.

The plane runs in a process of its own, with its run in a folder on the disk. A lease is durable before it is answered,
and so is the group that completes it, and an attached value. The rival is TransferQueue doing the same in memory:
prompts are put, a worker takes one that has no consumer yet and puts the response of that row; a judge takes the rows
of a group and puts their rewards, and a consumer takes rows that have both. Nothing there survives a process, and what
a worker took is not handed out again when it dies. Both take turns, round by round; the first round warms up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

from benchmarks.disk import disk_folder
from benchmarks.judging import JUDGES, SAMPLES, Times, judging
from benchmarks.report import Row, faster
from benchmarks.running import Program, Wanted, WayFailed, started
from penstock.arrays import Sample
from penstock.client import Task
from penstock.client.api import open as open_plane
from penstock.client.plane import Plane
from penstock.log import SqliteLog
from penstock.packing import Packing
from penstock.plane.loop import PlaneLoop
from penstock.plane.settings import PlaneSettings, Target
from penstock.plane.workers import Inline
from penstock.protocol import (
    AddPrompts,
    Attach,
    FromClient,
    GiveBack,
    LeaseTasks,
    OfferPrompts,
    Renew,
    TasksLeased,
    chunk_prompts,
    list_digest,
    pack_message,
    read_from_plane,
)
from penstock.server.plane_process import PlaneProcess

Progress = Callable[[str], None]
FLAT = 1.5
"""A turn with 10,000 open leases may cost this many times one with 100: noise of a shared machine."""
AT_ONCE = 16
_MANY, _FEW = 10_000, 100


def run(
    *, full: bool = False, progress: Progress = lambda _: None, rivals: str | None = None, scale: float = 1.0
) -> list[Row]:
    """`scale` below 1 is for tests."""
    count = max(int((4000 if full else 500) * scale), 20)
    with disk_folder() as folder:
        words = [str(folder / "run"), "--ranks=1", "--seq-len=64", "--groups-per-step=1", "--capacity=1000000"]
        with PlaneProcess([*words, f"--listen=ipc://{folder}/s"]) as process, open_plane(process.url) as plane:
            with judging(folder) as judges, _rival(rivals, folder) as (rival, why):
                tasks: Callable[[int], Times] = partial(_one_by_one, plane)
                kinds = {"tasks": tasks, "judge": judges.one, "judges": judges.many}
                ours, theirs, why = _in_turns(kinds, rival, max(count // ROUNDS, 4), why, progress)
            progress("many leases at once")
            batched = _batched(plane, count)
            at_once = asyncio.run(_at_once(plane, count))
    progress("open leases")
    few, many = _turns(max(int(_FEW * scale), 2), max(int(_MANY * scale), 4), rounds=max(int(400 * scale), 20))
    return [
        *_compared(ours, theirs, why),
        Row(name=f"one worker, batches of {_BATCH}: leases", ours=batched, unit="1/s"),
        Row(name=f"{AT_ONCE} tasks at once: leased, put and complete", ours=at_once, unit="1/s"),
        Row(
            name=f"CPU of a turn with {_MANY:,} open leases over {_FEW}",
            ours=many / few,
            unit="x",
            target=FLAT,
            bound="max",
            note=f"{many * 1e6:.0f} and {few * 1e6:.0f} us: one lease, one return, {_FEW} renewals",
        ),
    ]


def _in_turns(
    kinds: Mapping[str, Callable[[int], Times]], rival: Program | None, count: int, why: str, progress: Progress
) -> tuple[Times, Times, str]:
    """Run every kind of round, ours and the rival's in turns. Returns seconds by kind and call, and why there is no
    rival."""
    ours: Times = {}
    theirs: Times = {}
    for number in range(-1, ROUNDS):
        progress(f"leases, puts and attaches: round {number + 1} of {ROUNDS}")
        for kind, act in kinds.items():
            found = act(count)
            answer: Any = {}
            if rival is not None:
                try:
                    answer = rival.round(kind=kind, count=count, samples=SAMPLES, judges=JUDGES)
                except WayFailed as error:
                    rival, why, theirs = None, f"TransferQueue: {error}", {}
            if number < 0:
                continue  # both are warm from here on
            for sums, some in ((ours, found), (theirs, answer)):
                for call, seconds in some.items():
                    sums.setdefault(f"{kind} {call}", []).extend(seconds)
    return ours, theirs, why


def _compared(ours: Times, theirs: Times, why: str) -> list[Row]:
    """Return the rows that have a rival."""
    for times in (ours, theirs):
        if times:
            parts = zip(times["judge put_s"], times["judge score_s"], times["judge read_s"], strict=True)
            times["judge all_s"] = [sum(one) for one in parts]
    one, many = "one judge: lease and attach 8 rewards", f"{JUDGES} judges at once: lease and attach 8 rewards"
    names = {
        "one worker: leases": "tasks lease_s",
        "one worker: puts that complete a task": "tasks put_s",
        one: "judge score_s",
        "one group after the other: put, scored, read": "judge all_s",
        many: "judges group_s",
    }
    tails = {
        "one worker: lease, p99": "tasks lease_s",
        "one worker: put, p99": "tasks put_s",
        f"{one}, p99": "judge score_s",
        f"{many}, p99": "judges score_s",
    }
    rows = [_rate(name, ours[call], theirs.get(call), why) for name, call in names.items()]
    return rows + [_tail(name, ours[call], theirs.get(call), why) for name, call in tails.items()]


def _tail(name: str, ours: Sequence[float], theirs: Sequence[float] | None, why: str) -> Row:
    if theirs is None:
        return Row(name=name, ours=_p99(ours) * 1e3, unit="ms", note=why)
    return faster(name, _p99(ours), _p99(theirs), "TransferQueue")


ROUNDS = 5
_BATCH = 64


def _rate(name: str, ours: Sequence[float], theirs: Sequence[float] | None, why: str) -> Row:
    """Per second, at the median of the calls."""
    mine = 1 / median(ours)
    if theirs is None:
        return Row(name=name, ours=mine, unit="1/s", note=why)
    rival = 1 / median(theirs)
    return Row(name=name, ours=mine, rival=rival, rival_name="TransferQueue", ratio=mine / rival, unit="1/s")


def _p99(seconds: Sequence[float]) -> float:
    return sorted(seconds)[int(0.99 * (len(seconds) - 1))]


def _samples(task: Task) -> list[Sample]:
    """One sample of 64 tokens: what is measured is the task, not the frame."""
    return [
        Sample.from_prompt(
            id=f"{task.id}/0",
            group=task.id,
            policy_version=0,
            prompt_ids=range(32),
            completion_ids=range(32),
            completion_logprobs=[-0.5] * 32,
            advantages=1.0,
        )
    ]


def _prompts(count: int, name: str) -> list[Any]:
    return [{"name": f"{name}-{number}", "question": "x" * 200} for number in range(count)]


def _one_by_one(plane: Plane, count: int) -> Times:
    leases, puts = [], []
    name = f"one-{uuid4().hex}"  # a list of its own for every round
    tasks = iter(plane.tasks(_prompts(count + 1, name), name=name))
    next(tasks).give_back()  # sends the list
    for _ in range(count):
        began = time.perf_counter()
        task = next(tasks)
        leased = time.perf_counter()
        plane.put(_samples(task))
        puts.append(time.perf_counter() - leased)
        leases.append(leased - began)
        task.completed(0)
    return {"lease_s": leases, "put_s": puts}


def _batched(plane: Plane, count: int) -> float:
    """Leases per second, of a worker that takes many at a time. The groups are put outside the clock."""
    took, number = 0.0, 0
    batches = iter(plane.tasks(_prompts(count, "batched"), name="batched").batches(_BATCH))
    next(batches)  # sends the list; its tasks return
    while True:
        began = time.perf_counter()
        tasks = next(batches, None)
        if tasks is None:
            return number / took
        took, number = took + time.perf_counter() - began, number + len(tasks)
        plane.put_many([_samples(task) for task in tasks])
        for task in tasks:
            task.completed(0)


async def _at_once(plane: Plane, count: int) -> float:
    free = asyncio.Semaphore(AT_ONCE)

    async def work(task: Task) -> None:
        try:
            await plane.aput(_samples(task))
            task.completed(0)
        finally:
            free.release()

    began = time.perf_counter()
    async with asyncio.TaskGroup() as running:
        async for task in plane.tasks(_prompts(count, "many"), name="many", batch=AT_ONCE):
            await free.acquire()
            running.create_task(work(task))
    return count / (time.perf_counter() - began)


# ------------------------------------------------------------------ open leases


class _Wire:
    """The plane's end of a connection to nowhere."""

    poll_s: float | None = None
    url = "bench:"

    def __init__(self) -> None:
        self.inbox: list[Any] = []
        self.sent: list[Any] = []

    def pollable(self) -> None:
        return None

    def receive(self) -> list[Any]:
        got, self.inbox = self.inbox, []
        return got

    def send(self, _peer: object, header: bytes, _frames: object = ()) -> bool:
        self.sent.append(header)
        return True

    def is_writer(self, _peer: object) -> bool:
        return False

    def forget(self, _peer: object) -> None: ...

    def close(self) -> None: ...


class _Leasing:
    """A plane in memory with a number of open leases."""

    def __init__(self, open_leases: int) -> None:
        self._wire = _Wire()
        settings = PlaneSettings(packing=Packing(ranks=1, seq_len=64), target=Target(groups=1))
        log = SqliteLog(None)
        self._run_id = bytes.fromhex(log.run_id)
        self.loop = PlaneLoop(settings, log, [self._wire], workers=Inline())
        self._tickets, self.now = 0, 0.0
        self.ask(lambda ticket: Attach(ticket=ticket))
        self._open_list(2 * open_leases + 10_000)
        self.leases: list[int] = []
        while len(self.leases) < open_leases:
            self.leases += self.lease(min(_BATCH, open_leases - len(self.leases)))

    def ask(self, *make: Callable[[int], FromClient]) -> list[Any]:
        """Send messages and run one turn. Returns the answers."""
        for one in make:
            self._tickets += 1
            self._wire.inbox.append((1, pack_message(one(self._tickets), self._run_id), ()))
        self.now += 0.001
        self._wire.sent.clear()
        self.loop.turn(self.now)
        return [read_from_plane(header) for header in self._wire.sent]

    def _open_list(self, count: int) -> None:
        chunks = list(chunk_prompts([(f"p{number}", b"") for number in range(count)]))
        digests = tuple(chunk.digest for chunk in chunks)
        digest = list_digest(digests)

        def offer(ticket: int) -> FromClient:
            return OfferPrompts(
                ticket=ticket,
                list="p",
                digest=digest,
                count=count,
                chunks=digests,
                epochs=1,
                seed=0,
                shuffle=True,
                attempts=1,
                again=(),
            )

        self.ask(offer)
        for number, chunk in enumerate(chunks):
            self.ask(lambda ticket, n=number, c=chunk: AddPrompts(ticket=ticket, digest=digest, chunk=n, **c._asdict()))  # type: ignore[misc]
        self.ask(offer)

    def lease(self, count: int) -> list[int]:
        (answer,) = self.ask(lambda ticket: _want(ticket, count))
        assert isinstance(answer, TasksLeased)
        return [task.lease for task in answer.tasks]

    def turn(self) -> float:
        """CPU seconds of a turn with one lease, one return and some renewals."""
        some, gone = tuple(self.leases[:_FEW]), self.leases.pop()
        began = time.thread_time_ns()
        answers = self.ask(
            lambda ticket: _want(ticket, 1),
            lambda ticket: GiveBack(ticket=ticket, leases=(gone,)),
            lambda ticket: Renew(ticket=ticket, leases=some),
        )
        took = (time.thread_time_ns() - began) / 1e9
        self.leases += [task.lease for one in answers if isinstance(one, TasksLeased) for task in one.tasks]
        return took


def _want(ticket: int, count: int) -> LeaseTasks:
    return LeaseTasks(ticket=ticket, list="p", count=count, worker="w", lease_s=60.0)


def _turns(few: int, many: int, *, rounds: int) -> tuple[float, float]:
    """Median CPU seconds of a turn with few and with many open leases, measured in turns."""
    planes = [_Leasing(few), _Leasing(many)]
    found: list[list[float]] = [[], []]
    for _ in range(rounds):
        for plane, took in zip(planes, found, strict=True):
            took.append(plane.turn())
    for plane in planes:
        plane.loop._close()
    return median(found[0]), median(found[1])


# ------------------------------------------------------------------ the rival


@contextmanager
def _rival(python: str | None, folder: Path) -> Iterator[tuple[Program | None, str]]:
    """Start TransferQueue. Yields it, or why it is not there."""
    wanted = Wanted(
        module="task_rival",
        python=python,
        absent="no interpreter with TransferQueue; give one with --rivals",
        needs="transfer_queue",
        alone=True,
    )
    with started({"queue": wanted}, folder, 1) as (programs, why):
        yield programs.get("queue"), why.get("queue", "")
