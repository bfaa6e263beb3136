"""A plain model of tasks beside a real engine: who has what, and what became of it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.client.prompt_lists import order_fields
from penstock.errors import PenstockError
from penstock.frames import encode
from penstock.log import Lose
from penstock.plane.leases import Leases
from penstock.plane.outcomes import events_between
from penstock.plane.recorder import rebuild
from penstock.plane.task_book import EXPIRED, Task, read_task
from penstock.plane.task_service import TaskService
from penstock.protocol import (
    AddPrompts,
    FromPlane,
    GiveBack,
    LeasedTask,
    LeaseTasks,
    OfferPrompts,
    PromptsOffered,
    Renew,
    TasksLeased,
    chunk_prompts,
    list_digest,
)
from penstock.protocol.steps import Staged
from penstock.replay import DifficultyPools, Thompson
from tests.support.engines import DirectEngine
from tests.support.groups import named_group
from tests.support.planes import sqlite_of

FAILED = "rollout failed"
STALENESS = 1
MakeOrder = Callable[[list[str]], DifficultyPools | Thompson]
"""Makes the curriculum of a list with these names."""


class Named(NamedTuple):
    """An event of a prompt, by its name."""

    outcome: str
    prompt: str
    rewards: tuple[float | None, ...]
    step: int | None


@dataclass
class TaskRun:
    """An engine, the service that hands out its tasks, and the model of both."""

    engine: DirectEngine
    rng: random.Random
    now: float = 0.0
    answers: list[Any] = field(default_factory=list)
    leased: dict[int, LeasedTask] = field(default_factory=dict)
    """What workers hold, as they know it; also leases that ran out since."""
    versions: dict[int, int] = field(default_factory=dict)
    state: dict[tuple[int, str], tuple[Any, ...]] = field(default_factory=dict)
    """Epoch and name -> todo, leased, returned, held, trained or dropped, with its attempt."""
    names: list[str] = field(default_factory=list)
    numbers: dict[int, str] = field(default_factory=dict)
    """Number of a prompt -> its name."""
    trained: Counter[tuple[int, str]] = field(default_factory=Counter)
    late: int = 0
    epoch: int = 0
    """The last one that was handed out."""
    make_order: MakeOrder | None = None
    """None: every prompt once per epoch."""
    max_expiries: int | None = None
    expired: Counter[tuple[int, str]] = field(default_factory=Counter)
    """How often in a row the lease on a task ran out."""
    order: DifficultyPools | Thompson | None = None
    """The same curriculum, by names, which reads what anyone can read: the stream of events."""
    seen: int = 0
    drawn: int = 0
    """Prompts that the curriculum drew in this epoch."""

    def __post_init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self.leases = Leases(self.engine.recorder)
        self.service = TaskService(self.engine, self.leases, self._reply, hold_s=0.0, is_training=lambda: True)
        self.leases.turn(self.now)

    def _reply(self, _ticket: object, found: FromPlane | PenstockError | None) -> None:
        self.answers.append(found)

    def _ask(self, message: Any) -> Any:
        self.answers.clear()
        self.service.on_message("peer", message, self.now)
        self.turn()
        while self.service.is_opening:
            self.turn()
        (answer,) = self.answers
        return answer

    def turn(self) -> None:
        self.service.hand_out()
        self.leases.turn(self.now)
        self.service.answer_waiting(self.now)

    # -------------------------------------------------------------- the list

    def open(self, names: list[str], epochs: int, *, attempts: int = 3, seed: int = 0) -> None:
        chunks = list(chunk_prompts([(name, b"") for name in names]))
        digests = tuple(chunk.digest for chunk in chunks)
        offer = OfferPrompts(
            ticket=self.rng.randrange(1 << 60),
            list="p",
            digest=list_digest(digests),
            count=len(names),
            chunks=digests,
            epochs=epochs,
            seed=seed,
            attempts=attempts,
            again=("stale", "lost", FAILED),
            max_expiries=self.max_expiries,
            **order_fields(self.make_order(names) if self.make_order else None, names),
        )
        answer = self._ask(offer)
        assert isinstance(answer, PromptsOffered), answer
        for number in answer.missing:
            one = chunks[number]
            more = AddPrompts(
                ticket=1,
                digest=offer.digest,
                chunk=number,
                first=one.first,
                names=one.names,
                payloads=one.payloads,
            )
            assert self._ask(more) is None
        if answer.missing:
            assert self._ask(offer) == PromptsOffered(ticket=offer.ticket)
        self.attempts, self.epochs = attempts, epochs
        self._change(names)
        if self.make_order is not None:
            made = self.make_order(names)
            made.begin(names, seed)
            if self.order is not None:
                made.restore(self.order.state())
            self.order = made

    def _change(self, names: list[str]) -> None:
        epoch, gone = self.epoch, set(self.names) - set(names)
        self.names = names
        for (at, name), (what, *more) in list(self.state.items()):
            if name in gone and what == "returned":
                self.expired.pop((at, name), None)
            if name in gone and what == "returned" and self.make_order is not None:
                self.state[at, name] = ("dropped", "removed")
            elif name in gone and what == "todo":
                self.state[at, name] = ("withdrawn", 0)
            elif name in gone and what == "returned":
                self.state[at, name] = ("withdrawn", more[0]) if at == epoch else ("dropped", "removed")
            elif what == "withdrawn" and name in names and at >= epoch:
                self.state[at, name] = ("returned", more[0]) if more[0] else ("todo",)
        for at in range(1, self.epochs + 1) if self.make_order is None else ():
            for name in names:
                # A prompt that was not in an epoch when it ended does not join it afterwards.
                if at >= max(epoch, 1):
                    self.state.setdefault((at, name), ("todo",))

    # -------------------------------------------------------------- workers

    def lease(self, count: int) -> None:
        learned = self.engine.state.outcomes.last  # a hand-out may write further events, which it did not know
        answer = self._ask(
            LeaseTasks(ticket=self.rng.randrange(1 << 60), list="p", count=count, worker="w", lease_s=10.0)
        )
        assert isinstance(answer, TasksLeased)
        if answer.tasks:
            self._learn(learned)
        for one in answer.tasks:
            task = read_task(one.group)
            assert task is not None and (task.epoch, task.attempt) == (one.epoch, one.attempt)
            assert self.numbers.setdefault(task.prompt, one.prompt) == one.prompt
            before = self.state.get((one.epoch, one.prompt))
            if self.order is not None and before is None:
                self._check_draw(one)
            else:
                assert before in (("todo",), ("returned", one.attempt)), (one, before)
            assert one.prompt in self.names
            self.state[one.epoch, one.prompt] = ("leased", one.attempt, one.lease)
            self.epoch = max(self.epoch, one.epoch) if self.order is None else self.epoch
            self.leased[one.lease] = one
            self.versions[one.lease] = self.engine.policy_version
        if not answer.tasks and self.order is not None:
            assert self.epoch == self.epochs and self.drawn >= len(self.names)
        if not answer.tasks:
            places = [one[0] for (_, name), one in self.state.items() if name in self.names]
            assert "todo" not in places and "returned" not in places

    def _check_draw(self, one: LeasedTask) -> None:
        """The plane draws what the curriculum draws for anyone who reads the events."""
        assert self.order is not None
        if self.drawn >= len(self.names) or not self.epoch:
            self.epoch, self.drawn = self.epoch + 1, 0
        self.drawn += 1
        times = sum(name == one.prompt for _, name in self.state)
        assert (one.prompt, one.epoch, one.attempt) == (self.order.next(), times + 1, 0)

    def _learn(self, until: int) -> None:
        if self.order is None:
            return
        for event in events_between(self.engine.log, self.seen, until):
            task = read_task(event.group)
            name = "" if task is None else self.numbers[task.prompt]
            self.order.observe(Named(event.outcome, name, event.rewards, event.step))
            self.seen += 1

    def _is_leased(self, one: LeasedTask) -> bool:
        return self.state[one.epoch, one.prompt] == ("leased", one.attempt, one.lease)

    def run_out(self) -> None:
        """Some processes die: their leases are not renewed for their time."""
        alive = [lease for lease in self.leased if self.rng.random() < 0.6]
        for _ in range(12):
            self.now += 1.0
            if alive:
                self.service.on_message("peer", Renew(ticket=1, leases=tuple(alive)), self.now)
            self.turn()
        for lease, one in self.leased.items():
            if lease not in alive and self._is_leased(one):
                self._return(one, "", expired=True)

    def _return(self, one: LeasedTask, reason: str, *, expired: bool = False) -> None:
        count = self.expired.pop((one.epoch, one.prompt), 0) + expired
        if expired and one.prompt in self.names and count == self.max_expiries:
            self.state[one.epoch, one.prompt] = ("dropped", EXPIRED)
            return
        if expired and one.prompt in self.names:
            self.expired[one.epoch, one.prompt] = count
        if reason:
            self._fail(one.epoch, one.prompt, one.attempt, reason)
        elif one.prompt in self.names:
            self.state[one.epoch, one.prompt] = ("returned", one.attempt)
        else:
            self._withdraw(one.epoch, one.prompt, one.attempt)

    def _withdraw(self, epoch: int, name: str, attempt: int) -> None:
        again = self.make_order is None and epoch == self.epoch
        self.state[epoch, name] = ("withdrawn", attempt) if again else ("dropped", "removed")

    def _fail(self, epoch: int, name: str, attempt: int, reason: str) -> None:
        if reason in ("stale", "lost", FAILED) and attempt + 1 < self.attempts and name in self.names:
            self.state[epoch, name] = ("returned", attempt + 1)
        else:
            self.state[epoch, name] = ("dropped", reason)

    def give_back(self) -> None:
        if self.leased:
            lease = self.rng.choice(list(self.leased))
            one = self.leased.pop(lease)
            reason = self.rng.choice(["", "", FAILED, "filtered"])
            was = self._is_leased(one)
            assert self._ask(GiveBack(ticket=1, leases=(lease,), reason=reason)) is None
            if was:
                self._return(one, reason)

    def put(self) -> None:
        """Put a group for a lease, also for one that ran out, and some of them twice."""
        if not self.leased:
            return
        lease = self.rng.choice(list(self.leased))
        one, version = self.leased[lease], self.versions[lease]
        if self.rng.random() < 0.8:
            del self.leased[lease]
        found = self.state[one.epoch, one.prompt]
        is_open = found[:2] in (("leased", one.attempt), ("returned", one.attempt))
        samples = named_group(one.group, policy_version=version, tokens=2 * self.rng.randrange(2, 9))
        frame = encode([sample.replace(rewards=self.rng.choice([0.0, 0.3, 1.0])) for sample in samples])
        outcome = self.engine.put("t", one.group, frame)
        outcomes = [outcome] if outcome else self.engine.flush()
        assert all(out.error is None for out in outcomes), outcomes
        assert is_open == (not outcomes[0].duplicate)
        self.late += outcomes[0].late
        if not is_open:
            return
        self.expired.pop((one.epoch, one.prompt), None)
        if self.engine.policy_version - version > STALENESS:
            assert outcomes[0].stale
            self._fail(one.epoch, one.prompt, one.attempt, "stale")
        else:
            self.state[one.epoch, one.prompt] = ("held", one.attempt, version)

    # -------------------------------------------------------------- the plane

    def train(self) -> None:
        step = self.engine.next_step
        if step > self.engine.last_step and not isinstance(self.engine.plan_step(step), Staged):
            return
        groups = self.engine.state.steps[step].groups
        for row in [self.engine.state.rows[op] for op in groups]:
            epoch, name, attempt = self._named(row.id)
            assert self.state[epoch, name][:2] == ("held", attempt)
            self.state[epoch, name] = ("trained",)
            self.trained[epoch, name] += 1
        version = self.engine.policy_version + (self.rng.random() < 0.7)
        self.engine.commit(step, version)
        self._age()

    def _named(self, group: str) -> tuple[int, str, int]:
        task = read_task(group)
        assert isinstance(task, Task)
        return task.epoch, self.numbers[task.prompt], task.attempt

    def _age(self) -> None:
        for (epoch, name), (what, *more) in list(self.state.items()):
            if what == "held" and self.engine.policy_version - more[1] > STALENESS:
                self._fail(epoch, name, more[0], "stale")

    def lose(self) -> None:
        """Storage loses a group that waits."""
        held = [place for place, one in self.state.items() if one[0] == "held"]
        if held:
            epoch, name = self.rng.choice(held)
            attempt = self.state[epoch, name][1]
            number = next(number for number, known in self.numbers.items() if known == name)
            op = self.engine.state.by_id[Task("p", epoch, number, attempt).id]
            self.engine.recorder.decide(Lose(groups={op: "gone"}))
            self._fail(epoch, name, attempt, "lost")

    def undo(self) -> None:
        """A step is planned and cannot be built: it is undone, and the group that caused it is set aside."""
        step = self.engine.next_step
        if step != self.engine.last_step + 1 or not isinstance(self.engine.plan_step(step), Staged):
            return
        groups = [self.engine.state.rows[op].id for op in self.engine.state.steps[step].groups]
        assert self.engine.unplan(step, groups[0], "damaged")
        epoch, name, attempt = self._named(groups[0])
        self.state[epoch, name] = ("aside", attempt, self.state[epoch, name][2])

    def settle(self) -> None:
        """The operator drops a group in quarantine, or releases it."""
        aside = [place for place, one in self.state.items() if one[0] == "aside"]
        if aside:
            epoch, name = self.rng.choice(aside)
            _, attempt, version = self.state[epoch, name]
            number = next(number for number, known in self.numbers.items() if known == name)
            drop = self.rng.random() < 0.5
            self.engine.settle(Task("p", epoch, number, attempt).id, drop=drop)
            if drop:
                self._fail(epoch, name, attempt, "quarantined")
            elif self.engine.policy_version - version > STALENESS:
                self._fail(epoch, name, attempt, "stale")
            else:
                self.state[epoch, name] = ("held", attempt, version)

    def restart(self) -> None:
        """Rebuild from the log, with its snapshot or without: nothing may change but the clock."""
        before = self._memory()
        log, settings = self.engine.log, self.engine.settings
        if self.rng.random() < 0.5:
            with log.transaction():
                sqlite_of(log).execute("DELETE FROM snapshots")
        state = rebuild(log, settings.replay, retain_steps=settings.retain_steps)
        assert (state.leases.save(), state.tasks.save(), state.usable_groups, state.op) == before
        self.engine.recorder.rebuild()
        self._start()

    def _memory(self) -> tuple[Any, ...]:
        state = self.engine.state
        return state.leases.save(), state.tasks.save(), state.usable_groups, state.op

    def check(self) -> None:
        """The engine counts what the model counts."""
        found = self.engine.state.tasks.lists["p"]
        counts = Counter(one[0] for one in self.state.values())
        assert len(found.leased) == counts["leased"] == len(self.engine.state.leases.open)
        assert len(found.returned) == counts["returned"]
        assert len(found.held) == counts["held"]
        assert len(found.aside) == counts["aside"]
        assert found.trained.total() == counts["trained"] == self.trained.total()
        assert not self.trained or max(self.trained.values()) == 1
        todo = [name for (_, name), one in self.state.items() if one[0] in ("todo", "returned")]
        to_come = len([name for name in todo if name in self.names])
        if self.order is not None:
            left = max(len(self.names) - self.drawn, 0) if self.epoch else 0
            to_come += left + (self.epochs - self.epoch) * len(self.names)
        assert found.num_to_come == to_come
        assert found.expired == {self._number(place): count for place, count in self.expired.items() if count}
        given_up = sum(one == ("dropped", EXPIRED) for one in self.state.values())
        assert found.dropped[EXPIRED] == self.engine.ledger.given_up[EXPIRED] == given_up

    def _number(self, place: tuple[int, str]) -> tuple[int, int]:
        return place[0], next(number for number, name in self.numbers.items() if name == place[1])

    def check_events(self) -> None:
        """Every prompt that was given up has one event that says so."""
        newest = self.engine.state.outcomes.last
        events = [one for one in events_between(self.engine.log, 0, newest) if one.reason == EXPIRED]
        given_up = [place for place, one in self.state.items() if one == ("dropped", EXPIRED)]
        assert sorted(event.prompt for event in events) == sorted(name for _, name in given_up)
        assert all(event.outcome == "dropped" and read_task(event.group) for event in events)
