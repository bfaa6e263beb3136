"""Tasks: the prompts of a list, to be trained in a given order. Follows from the log.

A task is one prompt of one epoch. A curriculum may draw a prompt several times; then each draw is a task. A task is in
one place at a time:

    to come     the epoch's order has not reached it
    leased      a process works on it
    returned    its lease ended without a group: it is handed out next, before the order goes on
    held        its group is accepted and waits for training
    set aside   its group is in quarantine
    finished    a step was drawn with its group, or it was dropped with a reason

Nothing is kept of finished tasks but counts. Memory holds eight bytes per prompt, what is under way, and what a
curriculum knows.

The id of a group says which task it completes: `task:LIST:EPOCH:PROMPT:ATTEMPT`, with the number of the prompt. So
accepting the group completes the task, and no further record is needed. A group that is dropped afterwards for a reason
in `again` makes its task return under the next attempt, which has another id. Two processes that work on the same
attempt, because the lease of one ran out, make groups with the same id, and the plane accepts one of them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from enum import Enum
from typing import NamedTuple

import msgspec
import numpy as np

from penstock.log import HandOut, OpenList, ReturnLeases, State
from penstock.plane.lease_book import COMPLETED, Lease, LeaseBook
from penstock.plane.task_order import Place, SavedOrder, order_of
from penstock.protocol import FeedbackEvent

PROMPT = "prompt"
"""The kind of these leases."""
REMOVED, EXPIRED = "removed", "lease expired"
_PREFIX = "task:"


class Task(NamedTuple):
    """One attempt at one prompt of one epoch."""

    list: str
    epoch: int
    prompt: int
    attempt: int

    @property
    def id(self) -> str:
        """The id of its group.

        >>> Task("math", 1, 17, 0).id, read_task("task:math:1:17:0")
        ('task:math:1:17:0', Task(list='math', epoch=1, prompt=17, attempt=0))
        """
        return f"{_PREFIX}{self.list}:{self.epoch}:{self.prompt}:{self.attempt}"


def read_task(group: str) -> Task | None:
    """Return the task that a group belongs to, or None for any other group.

    >>> read_task("task:a:b:1:2:03"), read_task("task:a:b:1:2:3")
    (None, Task(list='a:b', epoch=1, prompt=2, attempt=3))
    """
    if not group.startswith(_PREFIX):
        return None
    name, *numbers = group.removeprefix(_PREFIX).rsplit(":", 3)
    if len(numbers) != 3 or not all(one.isascii() and one.isdigit() and len(one) < 16 for one in numbers):
        return None
    found = Task(name, *map(int, numbers))
    return found if found.id == group else None  # "03" would be a second id of the same task


class Verdict(Enum):
    """Whether a group of a task may be put."""

    OPEN = "the task is open"
    LATE = "another group completed it, or another attempt is under way"
    UNKNOWN = "no such task was handed out"


class HeldTask(NamedTuple):
    attempt: int
    dispatch: int
    """The number of the hand-out."""


class SavedList(msgspec.Struct, array_like=True, kw_only=True):
    """A snapshot of a `PromptList`."""

    opened: OpenList
    known: int
    versions: list[tuple[int, int, bytes]]
    rows: bytes
    order: SavedOrder
    returned: list[tuple[int, int, int]]
    leased: list[tuple[int, int, int]]
    held: list[tuple[int, int, int, int]]
    aside: list[tuple[int, int, int, int]]
    trained: dict[int, int]
    dropped: dict[str, int]
    again: dict[str, int]
    evicted: bool
    expired: list[tuple[int, int, int]]


class PromptList:
    """The tasks of one list of prompts. Numbers of prompts stay as they are when the list changes."""

    def __init__(self, opened: OpenList) -> None:
        self.opened = opened
        """Settings and digest, as they were given last."""
        self.known = 0
        """Prompts that the list ever had. The next new one gets this number."""
        self.versions: list[tuple[int, int, bytes]] = []
        """First row in the log, number of prompts and their numbers, of each version of the list."""
        self.rows = np.empty(0, np.int64)
        """Row in the log of each prompt, by number; -1 for prompts that the list no longer has."""
        self.order = order_of(opened)
        """The tasks that are still to come."""
        self.returned: OrderedDict[Place, int] = OrderedDict()
        """Tasks to hand out again, with their attempt, first in, first out. Finding the first key of a dict takes time
        for every key deleted before it: 33 us on average while 10,000 are taken."""
        self.leased: dict[Place, int] = {}
        self.expired: dict[Place, int] = {}
        """How often in a row the lease on a task ran out."""
        self.held: dict[Place, HeldTask] = {}
        self.aside: dict[Place, HeldTask] = {}
        self.trained: Counter[int] = Counter()
        """Finished tasks by epoch, without those that were dropped."""
        self.dropped: Counter[str] = Counter()
        """Tasks that were given up, by reason."""
        self.again: Counter[str] = Counter()
        """Attempts that were repeated, by reason."""
        self.num_live = 0
        """Prompts that the list has now."""
        self.evicted = False
        self.open(opened)

    # -------------------------------------------------------------- the list itself

    def open(self, opened: OpenList) -> None:
        """Apply new settings, or a new version of the list."""
        self.opened = opened
        if self.versions[-1:] == [(opened.base, opened.count, opened.places)]:
            self.order.configure(opened)
            return
        numbers = np.frombuffer(opened.places, "<u4") if opened.places else np.arange(opened.count, dtype=np.uint32)
        known, self.known = self.known, max(self.known, int(numbers.max(initial=0)) + 1)
        self.rows = np.full(self.known, -1, np.int64)
        self.rows[numbers] = opened.base + np.arange(opened.count)
        self.num_live = opened.count
        self.versions.append((opened.base, opened.count, opened.places))
        for place, attempt in list(self.returned.items()):
            if not self.has(place[1]):
                del self.returned[place]
                self._remove(place, attempt)
        back = self.order.change(opened, self.rows, numbers, known)
        self.returned |= {(self.order.epoch, prompt): attempt for prompt, attempt in back.items()}

    def _remove(self, place: Place, attempt: int) -> str:
        """Give up a task whose prompt the list no longer has. Returns the reason."""
        self.expired.pop(place, None)
        self.dropped[REMOVED] += 1
        self.order.withdraw(place, attempt)
        return REMOVED

    def has(self, prompt: int) -> bool:
        """Return whether the list has a prompt now."""
        return prompt < len(self.rows) and bool(self.rows[prompt] >= 0)

    # -------------------------------------------------------------- handing out

    def next_tasks(self) -> Generator[Task]:
        """Yield tasks in the order in which they must be handed out. Changes nothing, once it is closed."""
        name = self.opened.list
        if self.evicted:
            return
        for (epoch, prompt), attempt in self.returned.items():
            yield Task(name, epoch, prompt, attempt)
        with closing(self.order.to_come()) as places:
            for epoch, prompt in places:
                yield Task(name, epoch, prompt, 0)

    def hand_out(self, task: Task) -> None:
        """Apply the hand-out of a task."""
        place = (task.epoch, task.prompt)
        if self.returned.get(place) == task.attempt:
            del self.returned[place]
        elif task.attempt or not self.order.advance(place):
            return  # a step was undone since, so its group is held after all: what is put for this lease comes late
        self.leased[place] = task.attempt

    # -------------------------------------------------------------- what became of a task

    def number_of(self, group: str) -> int:
        """Return the number of the prompt that a group of this list is of, or -1."""
        task = read_task(group)
        return task.prompt if task is not None and task.list == self.opened.list else -1

    def verdict(self, task: Task) -> Verdict:
        place = (task.epoch, task.prompt)
        if task.attempt in (self.leased.get(place), self.returned.get(place)):
            return Verdict.OPEN
        return Verdict.LATE if self.order.has_come(place) else Verdict.UNKNOWN

    def accept(self, task: Task, dispatch: int) -> None:
        """Apply the acceptance of a task's group."""
        if self._close(task):
            self.held[task.epoch, task.prompt] = HeldTask(task.attempt, dispatch)

    def _close(self, task: Task) -> bool:
        """End the lease of a task, or take it out of the queue. Returns False if it is not open."""
        place = (task.epoch, task.prompt)
        for where in (self.leased, self.returned):
            if where.get(place) == task.attempt:
                del where[place]
                self.expired.pop(place, None)
                return True
        return False

    def give_back(self, task: Task, reason: str, *, expired: bool) -> str:
        """Apply the end of a lease without a group. Returns why the task is given up, or "" if it is not.

        A reason counts as an attempt, an end of the process does not. `expired` leases are counted on their own: a
        prompt that kills every process that works on it must not be handed out forever."""
        place = (task.epoch, task.prompt)
        if self.leased.get(place) != task.attempt:
            return ""
        gives_up = expired and self.would_give_up(task)
        before = self.expired.pop(place, 0)
        del self.leased[place]
        if reason:
            return self._fail(task, reason)
        if not self.has(task.prompt):
            return self._remove(place, task.attempt)
        if gives_up:
            self.dropped[EXPIRED] += 1
            return EXPIRED
        if expired:
            self.expired[place] = before + 1
        self.returned[place] = task.attempt
        return ""

    def would_give_up(self, task: Task) -> bool:
        """Return whether the task is given up if its lease runs out now."""
        place, most = (task.epoch, task.prompt), self.opened.max_expiries
        is_leased = self.leased.get(place) == task.attempt and self.has(task.prompt)
        return is_leased and most is not None and self.expired.get(place, 0) + 1 >= most

    def drop(self, task: Task, reason: str) -> None:
        """Apply the drop of a task's group, after it was accepted or because all its samples were too long."""
        found = self.held.get((task.epoch, task.prompt)) or self.aside.get((task.epoch, task.prompt))
        if found is not None and found.attempt == task.attempt:
            self.held.pop((task.epoch, task.prompt), None)
            self.aside.pop((task.epoch, task.prompt), None)
            self._fail(task, reason)
        elif self._close(task):
            self._fail(task, reason)

    def _fail(self, task: Task, reason: str) -> str:
        """Try a task again, or give it up. Returns the reason if it is given up."""
        may_again = reason in self.opened.again and task.attempt + 1 < self.opened.attempts
        if may_again and self.has(task.prompt):
            self.again[reason] += 1
            self.returned[task.epoch, task.prompt] = task.attempt + 1
            return ""
        self.dropped[reason] += 1
        return reason

    def draw(self, task: Task) -> None:
        """Apply the draw of a step that has a task's group."""
        found = self.held.get((task.epoch, task.prompt))
        if found is not None and found.attempt == task.attempt:
            del self.held[task.epoch, task.prompt]
            self.trained[task.epoch] += 1

    def set_aside(self, task: Task, *, is_aside: bool) -> None:
        """Move a task's group into quarantine, or back."""
        here, there = (self.held, self.aside) if is_aside else (self.aside, self.held)
        found = here.get((task.epoch, task.prompt))
        if found is not None and found.attempt == task.attempt:
            there[task.epoch, task.prompt] = here.pop((task.epoch, task.prompt))

    @property
    def num_to_come(self) -> int:
        """Tasks that are still to be handed out, in this epoch and in all later ones."""
        later = max(self.opened.epochs - self.order.epoch, 0) * self.num_live
        return len(self.returned) + self.order.left + later

    # -------------------------------------------------------------- snapshots

    def save(self) -> SavedList:
        return SavedList(
            opened=self.opened,
            known=self.known,
            versions=self.versions,
            rows=self.rows.astype("<i8").tobytes(),
            order=self.order.save(),
            returned=[(*place, attempt) for place, attempt in self.returned.items()],
            leased=[(*place, attempt) for place, attempt in self.leased.items()],
            held=[(*place, *held) for place, held in self.held.items()],
            aside=[(*place, *held) for place, held in self.aside.items()],
            trained=dict(self.trained),
            dropped=dict(self.dropped),
            again=dict(self.again),
            evicted=self.evicted,
            expired=[(*place, count) for place, count in self.expired.items()],
        )

    @staticmethod
    def load(saved: SavedList) -> PromptList:
        found = PromptList(saved.opened)
        found.known, found.versions = saved.known, saved.versions
        found.rows = np.frombuffer(saved.rows, "<i8").astype(np.int64)
        found.order.load(saved.order, found.rows)
        found.returned = OrderedDict(((epoch, prompt), attempt) for epoch, prompt, attempt in saved.returned)
        found.leased = {(epoch, prompt): attempt for epoch, prompt, attempt in saved.leased}
        found.held = {(epoch, prompt): HeldTask(*held) for epoch, prompt, *held in saved.held}
        found.aside = {(epoch, prompt): HeldTask(*held) for epoch, prompt, *held in saved.aside}
        found.trained, found.dropped = Counter(saved.trained), Counter(saved.dropped)
        found.again, found.evicted = Counter(saved.again), saved.evicted
        found.expired = {(epoch, prompt): count for epoch, prompt, count in saved.expired}
        found.num_live = int(np.count_nonzero(found.rows >= 0))
        return found


class TaskBook:
    """All lists of prompts. `PlaneState` calls it with what happens to groups and leases."""

    def __init__(self, leases: LeaseBook) -> None:
        self._leases = leases
        self.lists: dict[str, PromptList] = {}
        self.events: Callable[[int, int], Iterable[FeedbackEvent]] = lambda _after, _until: ()
        """Reads events of the log, for curricula."""

    def _find(self, group: str) -> tuple[Task, PromptList] | None:
        task = read_task(group)
        found = None if task is None else self.lists.get(task.list)
        return None if task is None or found is None else (task, found)

    def open_list(self, record: OpenList) -> None:
        if record.list in self.lists:
            self.lists[record.list].open(record)
        else:
            self.lists[record.list] = PromptList(record)

    def hand_out(self, record: HandOut) -> None:
        for group in record.keys if record.kind == PROMPT else ():
            if found := self._find(group):
                self.learn(found[1], record.seen)
                found[1].hand_out(found[0])

    def learn(self, found: PromptList, until: int) -> None:
        """Let the curriculum of a list learn from the events up to number `until`."""
        if until > found.order.seen:
            events = self.events(found.order.seen, until)
            found.order.learn(((event, found.number_of(event.group)) for event in events), until)

    def give_back(self, lease: Lease | None, record: ReturnLeases) -> str:
        """Apply the end of a lease without a group. Returns why its prompt is given up, or "" if it is not."""
        if lease is not None and lease.kind == PROMPT and (found := self._find(lease.key)):
            return found[1].give_back(found[0], record.reason, expired=record.expired)
        return ""

    def given_up(self, lease: Lease) -> Task | None:
        """Return the task of a lease if it is given up when the lease runs out now."""
        found = self._find(lease.key) if lease.kind == PROMPT else None
        return found[0] if found is not None and found[1].would_give_up(found[0]) else None

    def verdict(self, group: str) -> Verdict | None:
        """Return what a put of a group may do, or None if it belongs to no list of this run: a run that is fed with the
        groups of another one gets their ids."""
        found = self._find(group)
        return None if found is None else found[1].verdict(found[0])

    def accept(self, group: str, op: int) -> None:
        """Apply the acceptance of a group by decision `op`. Ends the lease on it."""
        if found := self._find(group):
            lease = self._leases.number_of(PROMPT, group)
            found[1].accept(found[0], op if lease is None else lease)
            if lease is not None:
                self._leases.end(lease, COMPLETED)

    def drop(self, group: str, reason: str) -> None:
        if found := self._find(group):
            lease = self._leases.number_of(PROMPT, group)
            found[1].drop(found[0], reason)
            if lease is not None:
                self._leases.end(lease, reason)

    def draw(self, group: str) -> None:
        if found := self._find(group):
            found[1].draw(found[0])

    def follow(self, group: str, old: State, new: State, reason: str) -> None:
        """Apply a group's change of state."""
        if new is State.DROPPED:
            self.drop(group, reason)
        elif State.QUARANTINED in (old, new) and (found := self._find(group)):
            found[1].set_aside(found[0], is_aside=new is State.QUARANTINED)

    def tenant_of(self, group: str) -> str:
        """Return the tenant of a task's list, or "" if there is none."""
        found = self._find(group)
        return "" if found is None else found[1].opened.tenant

    def dispatched(self, group: str) -> int | None:
        """Return the number of the hand-out of a held group, or None if it belongs to no task."""
        if found := self._find(group):
            held = found[1].held.get((found[0].epoch, found[0].prompt))
            return None if held is None else held.dispatch
        return None

    def evict(self, tenant: str, *, is_evicted: bool) -> None:
        """Hand out no tasks of an evicted tenant, or go on once it is admitted again."""
        for found in self.lists.values():
            if tenant and found.opened.tenant == tenant:
                found.evicted = is_evicted

    def save(self) -> list[SavedList]:
        return [found.save() for found in self.lists.values()]

    def load(self, saved: list[SavedList]) -> None:
        self.lists = {one.opened.list: PromptList.load(one) for one in saved}
