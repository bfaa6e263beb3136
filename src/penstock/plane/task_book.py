"""Tasks: the prompts of a list, each to be trained once per epoch. Follows from the log.

A task is one prompt of one epoch. It is in one place at a time:

    to come     the epoch's order has not reached it
    leased      a process works on it
    returned    its lease ended without a group: it is handed out next, before the order goes on
    held        its group is accepted and waits for training
    set aside   its group is in quarantine
    finished    a step was drawn with its group, or it was dropped with a reason

Nothing is kept of finished tasks but counts, so memory holds four bytes per prompt and what is under way.

The id of a group says which task it completes: `task:LIST:EPOCH:PROMPT:ATTEMPT`, with the number of the prompt. So
accepting the group completes the task, and no further record is needed. A group that is dropped afterwards for a reason
in `again` makes its task return under the next attempt, which has another id. Two processes that work on the same
attempt, because the lease of one ran out, make groups with the same id, and the plane accepts one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.log import HandOut, OpenList, State
from penstock.plane.lease_book import COMPLETED, Lease, LeaseBook

PROMPT = "prompt"
"""The kind of these leases."""
REMOVED, EVICTED = "removed", "evicted"
_PREFIX = "task:"
Place: TypeAlias = tuple[int, int]
"""Epoch and number of the prompt."""


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
    """What a put of a task's group may do."""

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
    epoch: int
    order: bytes
    returned: list[tuple[int, int, int]]
    leased: list[tuple[int, int, int]]
    held: list[tuple[int, int, int, int]]
    aside: list[tuple[int, int, int, int]]
    trained: dict[int, int]
    dropped: dict[str, int]
    again: dict[str, int]
    evicted: bool
    withdrawn: dict[int, int]


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
        self.epoch = 0
        """The epoch that is handed out now; 0 before the first."""
        self.order = np.empty(0, np.uint32)
        """Prompts of this epoch that are still to come. The first is at `cursor`."""
        self.cursor = 0
        self.returned: dict[Place, int] = {}
        """Tasks to hand out again, with their attempt, first in, first out."""
        self.leased: dict[Place, int] = {}
        self.held: dict[Place, HeldTask] = {}
        self.aside: dict[Place, HeldTask] = {}
        self.trained: Counter[int] = Counter()
        """Finished tasks by epoch, without those that were dropped."""
        self.dropped: Counter[str] = Counter()
        """Tasks that were given up, by reason."""
        self.again: Counter[str] = Counter()
        """Attempts that were repeated, by reason."""
        self.withdrawn: dict[int, int] = {}
        """Prompts that the list no longer has and this epoch has not tried, with their attempt. They join it if they
        return."""
        self.num_live = 0
        """Prompts that the list has now."""
        self.evicted = False
        self._upcoming: tuple[int, npt.NDArray[np.uint32]] | None = None
        """The order of the next epoch, once it was needed."""
        self.open(opened)

    # -------------------------------------------------------------- the list itself

    def open(self, opened: OpenList) -> None:
        """Apply new settings, or a new version of the list."""
        is_same = self.versions[-1:] == [(opened.base, opened.count, opened.places)]
        self.opened, self._upcoming = opened, None
        if is_same:
            return
        numbers = np.frombuffer(opened.places, "<u4") if opened.places else np.arange(opened.count, dtype=np.uint32)
        known, self.known = self.known, max(self.known, int(numbers.max(initial=0)) + 1)
        self.rows = np.full(self.known, -1, np.int64)
        self.rows[numbers] = opened.base + np.arange(opened.count)
        self.num_live = opened.count
        self.versions.append((opened.base, opened.count, opened.places))
        if self.epoch:
            self._withdraw()
            self._join(numbers, known)

    def _withdraw(self) -> None:
        """Take prompts that the list no longer has out of this epoch."""
        to_come = self.order[self.cursor :]
        is_live = self.rows[to_come] >= 0
        self.withdrawn |= dict.fromkeys(to_come[~is_live].tolist(), 0)
        self.order, self.cursor = to_come[is_live], 0
        for (epoch, prompt), attempt in list(self.returned.items()):
            if not self.has(prompt):
                del self.returned[epoch, prompt]
                self._remove(epoch, prompt, attempt)

    def _remove(self, epoch: int, prompt: int, attempt: int) -> None:
        self.dropped[REMOVED] += 1
        if epoch == self.epoch:
            self.withdrawn[prompt] = attempt

    def _join(self, numbers: npt.NDArray[np.uint32], known: int) -> None:
        """Append prompts that are new, or were withdrawn from this epoch, to its order. Others were in it already."""
        joining = numbers[numbers >= known].tolist()
        back = [prompt for prompt in numbers.tolist() if prompt in self.withdrawn] if self.withdrawn else []
        for prompt in back:
            attempt = self.withdrawn.pop(prompt)
            if attempt:  # its earlier attempts have ids that were used
                self.returned[self.epoch, prompt] = attempt
            else:
                joining.append(prompt)
        self.order = np.concatenate([self.order, np.array(joining, np.uint32)])

    def has(self, prompt: int) -> bool:
        """Return whether the list has a prompt now."""
        return prompt < len(self.rows) and bool(self.rows[prompt] >= 0)

    def _order_of(self, epoch: int) -> npt.NDArray[np.uint32]:
        if self._upcoming is None or self._upcoming[0] != epoch:
            live = np.flatnonzero(self.rows >= 0).astype(np.uint32)
            if self.opened.shuffle:
                # RandomState and its permutations are frozen: every version of numpy gives the same order.
                seed = self.opened.seed
                live = np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32, epoch]).permutation(live)
            self._upcoming = (epoch, live)
        return self._upcoming[1]

    # -------------------------------------------------------------- handing out

    def next_tasks(self) -> Iterator[Task]:
        """Yield tasks in the order in which they must be handed out. Changes nothing."""
        name = self.opened.list
        if self.evicted:
            return
        for (epoch, prompt), attempt in self.returned.items():
            yield Task(name, epoch, prompt, attempt)
        for prompt in self.order[self.cursor :]:
            yield Task(name, self.epoch, int(prompt), 0)
        for epoch in range(self.epoch + 1, self.opened.epochs + 1):
            for prompt in self._order_of(epoch):
                yield Task(name, epoch, int(prompt), 0)

    def hand_out(self, task: Task) -> None:
        """Apply the hand-out of a task."""
        place = (task.epoch, task.prompt)
        if self.returned.get(place) == task.attempt:
            del self.returned[place]
        elif self._advance(task):
            pass
        else:
            return  # a step was undone since, so its group is held after all: what is put for this lease comes late
        self.leased[place] = task.attempt

    def _advance(self, task: Task) -> bool:
        """Move on to a task in the order. Returns False if it is not the next one."""
        if self.cursor == len(self.order) and task.epoch == self.epoch + 1:
            order = self._order_of(task.epoch)
            if task.attempt or not len(order) or order[0] != task.prompt:
                return False
            self.epoch, self.order, self.cursor = task.epoch, order, 1
            self.withdrawn = dict.fromkeys(np.flatnonzero(self.rows < 0).tolist(), 0)
            return True
        is_next = self.cursor < len(self.order) and self.order[self.cursor] == task.prompt
        if not is_next or task.epoch != self.epoch or task.attempt:
            return False
        self.cursor += 1
        return True

    # -------------------------------------------------------------- what became of a task

    def verdict(self, task: Task) -> Verdict:
        place = (task.epoch, task.prompt)
        if task.attempt in (self.leased.get(place), self.returned.get(place)):
            return Verdict.OPEN
        return Verdict.LATE if 0 < task.epoch <= self.epoch else Verdict.UNKNOWN

    def accept(self, task: Task, dispatch: int) -> None:
        """Apply that a group was accepted for a task."""
        if self._close(task):
            self.held[task.epoch, task.prompt] = HeldTask(task.attempt, dispatch)

    def _close(self, task: Task) -> bool:
        """End the lease of a task, or take it out of the queue. Returns False if it is not open."""
        place = (task.epoch, task.prompt)
        for where in (self.leased, self.returned):
            if where.get(place) == task.attempt:
                del where[place]
                return True
        return False

    def give_back(self, task: Task, reason: str) -> None:
        """Apply that a lease ended without a group. A reason counts as an attempt, an end of the process does not."""
        place = (task.epoch, task.prompt)
        if self.leased.get(place) != task.attempt:
            return
        del self.leased[place]
        if reason:
            self._fail(task, reason)
        elif self.has(task.prompt):
            self.returned[place] = task.attempt
        else:
            self._remove(task.epoch, task.prompt, task.attempt)

    def drop(self, task: Task, reason: str) -> None:
        """Apply that a group of a task was dropped, or lost all its samples when it was put."""
        found = self.held.get((task.epoch, task.prompt)) or self.aside.get((task.epoch, task.prompt))
        if found is not None and found.attempt == task.attempt:
            self.held.pop((task.epoch, task.prompt), None)
            self.aside.pop((task.epoch, task.prompt), None)
            self._fail(task, reason)
        elif self._close(task):
            self._fail(task, reason)

    def _fail(self, task: Task, reason: str) -> None:
        may_again = reason in self.opened.again and task.attempt + 1 < self.opened.attempts
        if may_again and self.has(task.prompt):
            self.again[reason] += 1
            self.returned[task.epoch, task.prompt] = task.attempt + 1
        else:
            self.dropped[reason] += 1

    def draw(self, task: Task) -> None:
        """Apply that a step was drawn with a group of a task."""
        found = self.held.get((task.epoch, task.prompt))
        if found is not None and found.attempt == task.attempt:
            del self.held[task.epoch, task.prompt]
            self.trained[task.epoch] += 1

    def set_aside(self, task: Task, *, is_aside: bool) -> None:
        """Apply that a group went into quarantine, or was released."""
        here, there = (self.held, self.aside) if is_aside else (self.aside, self.held)
        found = here.get((task.epoch, task.prompt))
        if found is not None and found.attempt == task.attempt:
            there[task.epoch, task.prompt] = here.pop((task.epoch, task.prompt))

    @property
    def num_to_come(self) -> int:
        """Tasks that are still to be handed out, in this epoch and in all later ones."""
        later = max(self.opened.epochs - self.epoch, 0) * self.num_live
        return len(self.returned) + len(self.order) - self.cursor + later

    # -------------------------------------------------------------- snapshots

    def save(self) -> SavedList:
        return SavedList(
            opened=self.opened,
            known=self.known,
            versions=self.versions,
            rows=self.rows.astype("<i8").tobytes(),
            epoch=self.epoch,
            order=self.order[self.cursor :].astype("<u4").tobytes(),
            returned=[(*place, attempt) for place, attempt in self.returned.items()],
            leased=[(*place, attempt) for place, attempt in self.leased.items()],
            held=[(*place, *held) for place, held in self.held.items()],
            aside=[(*place, *held) for place, held in self.aside.items()],
            trained=dict(self.trained),
            dropped=dict(self.dropped),
            again=dict(self.again),
            evicted=self.evicted,
            withdrawn=self.withdrawn,
        )

    @staticmethod
    def load(saved: SavedList) -> PromptList:
        found = PromptList(saved.opened)
        found.known, found.versions = saved.known, saved.versions
        found.rows = np.frombuffer(saved.rows, "<i8").astype(np.int64)
        found.epoch, found.order = saved.epoch, np.frombuffer(saved.order, "<u4").astype(np.uint32)
        found.returned = {(epoch, prompt): attempt for epoch, prompt, attempt in saved.returned}
        found.leased = {(epoch, prompt): attempt for epoch, prompt, attempt in saved.leased}
        found.held = {(epoch, prompt): HeldTask(*held) for epoch, prompt, *held in saved.held}
        found.aside = {(epoch, prompt): HeldTask(*held) for epoch, prompt, *held in saved.aside}
        found.trained, found.dropped = Counter(saved.trained), Counter(saved.dropped)
        found.again, found.evicted, found.withdrawn = Counter(saved.again), saved.evicted, saved.withdrawn
        found.num_live = int(np.count_nonzero(found.rows >= 0))
        return found


class TaskBook:
    """All lists of prompts. `PlaneState` calls it with what happens to groups and leases."""

    def __init__(self, leases: LeaseBook) -> None:
        self._leases = leases
        self.lists: dict[str, PromptList] = {}

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
                found[1].hand_out(found[0])

    def give_back(self, lease: Lease | None, reason: str) -> None:
        """Apply that a lease ended without a group."""
        if lease is not None and lease.kind == PROMPT and (found := self._find(lease.key)):
            found[1].give_back(found[0], reason)

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
        """Apply that a group is in another state now."""
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
