"""Hands out tasks in the plane's loop: answers workers that want tasks.

All hand-outs of a turn are written in one transaction. A worker that asks while there is nothing to hand out is
answered when there is, or after a heartbeat with the reason, and asks again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from penstock.arrays import MAX_TEXT
from penstock.errors import CorruptFile, InvalidInput, PenstockError, UnknownKey
from penstock.log import MAX_EVENTS, GroupOutcome, HandOut, Summary, Unlisted
from penstock.plane.engine import Engine
from penstock.plane.lease_book import Lease
from penstock.plane.leases import MAX_LEASE_S, MIN_LEASE_S, Leases
from penstock.plane.recorder import ends_plane
from penstock.plane.task_book import EXPIRED, PROMPT, PromptList, Task, read_task
from penstock.plane.task_lists import PromptLists, Reply, Ticket
from penstock.protocol import (
    MAX_NAME,
    MAX_TASKS,
    AddPrompts,
    GiveBack,
    LeasedTask,
    LeaseTasks,
    OfferPrompts,
    Peer,
    Renew,
    TasksLeased,
)

_MOST_EVENTS = 4096
"""Events that a curriculum learns from in one turn."""
_REMEMBERED = 4096
"""Answers that are remembered: if one is lost, its worker asks again and gets the same leases."""
AboutTasks: TypeAlias = Renew | GiveBack | OfferPrompts | AddPrompts | LeaseTasks


class _Wanted(NamedTuple):
    """A worker that waits for tasks."""

    message: LeaseTasks
    until: float


class TaskService:
    """Answers messages about prompts, tasks and leases."""

    def __init__(
        self, engine: Engine, leases: Leases, reply: Reply, *, hold_s: float, is_training: Callable[[], bool]
    ) -> None:
        """`hold_s`: how long a worker waits for an answer without tasks. `is_training` returns whether a trainer is at
        work, or expected back."""
        self._engine, self._leases, self._reply = engine, leases, reply
        self._hold_s, self._is_training = hold_s, is_training
        self._prompt_lists = PromptLists(engine, leases, reply)
        self._waiting: dict[Ticket, _Wanted] = {}
        """In the order in which they asked."""
        self._granted: dict[Ticket, tuple[int, ...]] = {}
        leases.cancels[PROMPT], leases.last_words = self._why_cancelled, self._last_words

    @property
    def _lists(self) -> dict[str, PromptList]:
        return self._engine.state.tasks.lists

    @property
    def is_opening(self) -> bool:
        """Whether the next turn goes on opening a list."""
        return self._prompt_lists.is_opening

    def on_message(self, peer: Peer, message: AboutTasks, now: float) -> None:
        """Handle a message. The answer may follow at the end of the turn, or later."""
        ticket = (peer, message.ticket)
        try:
            if isinstance(message, Renew):
                self._reply(ticket, self._leases.on_renew(message, now))
            elif isinstance(message, GiveBack):
                self._leases.on_give_back(message, partial(self._reply, ticket))
            elif isinstance(message, OfferPrompts):
                self._prompt_lists.offer(ticket, message)
            elif isinstance(message, AddPrompts):
                self._prompt_lists.add(message)
                self._reply(ticket, None)
            else:
                self._want(ticket, message, now)
        except PenstockError as error:
            if ends_plane(error):
                raise
            self._reply(ticket, error)

    # -------------------------------------------------------------- tasks

    def _want(self, ticket: Ticket, message: LeaseTasks, now: float) -> None:
        if message.list not in self._lists:
            raise UnknownKey(f"list {message.list[:MAX_NAME]!r}: not known here; open it with plane.tasks(prompts)")
        if not 1 <= message.count <= MAX_TASKS:
            raise InvalidInput(f"count: {message.count}; lease from 1 to {MAX_TASKS} tasks at once")
        if not MIN_LEASE_S <= message.lease_s <= MAX_LEASE_S:
            raise InvalidInput(f"lease_s: {message.lease_s}; give from {MIN_LEASE_S:g} to {MAX_LEASE_S:,.0f} seconds")
        if not 0 < len(message.worker) <= MAX_NAME:
            raise InvalidInput(f"worker: a name of {len(message.worker):,} characters; give 1 to {MAX_NAME}")
        known = self._granted.get(ticket)
        if known is not None:  # our answer was lost
            leases = [self._engine.state.leases.open.get(number) for number in known]
            self._reply(ticket, self._leased(message, leases))
        else:
            self._waiting.setdefault(ticket, _Wanted(message, now + self._hold_s))

    def hand_out(self) -> None:
        """Choose tasks for the workers that wait. `Leases.turn` writes it; call `answer_waiting` after that."""
        self._prompt_lists.open_next()
        if not self._waiting:
            return
        room = self.room()
        left = MAX_TASKS * len(self._waiting) if room is None else room
        names = dict.fromkeys(message.list for message, _ in self._waiting.values())
        wanted = {name: self._lists[name] for name in names if self._lists[name].num_to_come}
        if not wanted or left <= 0:
            return
        with ExitStack() as pickers:  # closing one undoes its draws: only what the log has was drawn
            tasks_of = {name: pickers.enter_context(closing(self._picker(found))) for name, found in wanted.items()}
            for ticket, (message, _) in list(self._waiting.items()):
                tasks = list(islice(tasks_of.get(message.list, ()), min(message.count, left)))
                if tasks:
                    left -= len(tasks)
                    del self._waiting[ticket]
                    self._lease(ticket, message, tuple(task.id for task in tasks), wanted[message.list].order.seen)

    def _picker(self, found: PromptList) -> Generator[Task]:
        """Yield the tasks of a list in order. A curriculum learns from new events first."""
        state = self._engine.state
        if found.opened.order and not found.evicted:
            state.tasks.learn(found, min(state.outcomes.last, found.order.seen + _MOST_EVENTS))
        return found.next_tasks()

    def _lease(self, ticket: Ticket, message: LeaseTasks, keys: tuple[str, ...], seen: int) -> None:
        record = HandOut(kind=PROMPT, keys=keys, worker=message.worker, lease_s=message.lease_s, seen=seen)
        self._leases.decide(record, partial(self._handed_out, ticket, message, keys))

    def _handed_out(
        self, ticket: Ticket, message: LeaseTasks, keys: tuple[str, ...], error: PenstockError | None
    ) -> None:
        if error is not None:
            self._reply(ticket, TasksLeased(ticket=message.ticket, waiting_for=f"the log: {error}"[:MAX_TEXT]))
            return
        book = self._engine.state.leases
        numbers = tuple(n for n in (book.number_of(PROMPT, key) for key in keys) if n is not None)
        self._granted[ticket] = numbers
        while len(self._granted) > _REMEMBERED:
            del self._granted[next(iter(self._granted))]
        self._reply(ticket, self._leased(message, [book.open.get(number) for number in numbers]))

    def _leased(self, message: LeaseTasks, leases: list[Lease | None]) -> TasksLeased:
        tasks: list[tuple[Lease, Task, int]] = []
        for lease in leases:
            task = None if lease is None else read_task(lease.key)
            if lease is not None and task is not None and self._lists[task.list].has(task.prompt):
                tasks.append((lease, task, int(self._lists[task.list].rows[task.prompt])))
        rows = self._engine.log.prompts_of([row for _, _, row in tasks])
        if lost := [row for _, _, row in tasks if row not in rows]:
            raise CorruptFile(f"{self._engine.log.where}: prompts {lost[:3]} are missing; restore the log from a copy")
        found = tuple(
            LeasedTask(
                lease=lease.number,
                group=lease.key,
                prompt=rows[row][0],
                payload=rows[row][1],
                epoch=task.epoch,
                attempt=task.attempt,
            )
            for lease, task, row in tasks
        )
        return TasksLeased(ticket=message.ticket, tasks=found, policy_version=self._engine.policy_version)

    def answer_waiting(self, now: float) -> None:
        """Answer workers that waited for a heartbeat, or whose list is over."""
        if not self._waiting:
            return
        over = {name for name, found in self._lists.items() if self.is_over(found)}
        for ticket, (message, until) in list(self._waiting.items()):
            if message.list not in over and now < until:
                if over:
                    continue
                break  # those behind it asked later
            del self._waiting[ticket]
            answer = TasksLeased(
                ticket=message.ticket,
                waiting_for=self.waiting_for(self._lists[message.list]),
                ended=message.list in over,
                policy_version=self._engine.policy_version,
            )
            self._reply(ticket, answer)

    # -------------------------------------------------------------- what is left

    def room(self) -> int | None:
        """Return how many more tasks may be handed out now; None: any number."""
        state, settings = self._engine.state, self._engine.settings
        return settings.replay.limiter.lease_room(
            version=state.next_step - 1,  # weight updates made, whatever the trainer calls their versions
            groups_per_step=self._groups_per_step(),
            accepted=state.usable_groups,
            running=state.leases.kinds[PROMPT],
        )

    def _groups_per_step(self) -> float:
        """Return the groups that a step takes: as set, or by the groups that are held now."""
        state, target = self._engine.state, self._engine.settings.target
        if target.groups is not None:
            return float(target.groups)
        held = state.held(target)
        return max(target.amount * len(state.tenant_tables) / held, 1.0) if held else 1.0

    def is_over(self, found: PromptList) -> bool:
        """Return whether no task of a list will be handed out again, unless something is lost."""
        if found.evicted:
            return True
        return not found.num_to_come and not found.leased and not (found.held and self._may_return(found))

    def _may_return(self, found: PromptList) -> bool:
        """Return whether a held group may still be dropped and be made again: it waits for columns, and a filter or
        the deadline may drop it; or training goes on, and groups can become too old, or give way to others."""
        engine, replay, again = self._engine, self._engine.settings.replay, found.opened.again
        if engine.state.late.waiting:
            return True
        can_be_stale = replay.max_staleness is not None and "stale" in again
        if not can_be_stale and (replay.remover is None or "overflow" not in again):
            return False
        target = engine.settings.target
        can_train = engine.last_step >= engine.next_step or engine.state.held(target) >= target.amount
        return can_train and self._is_training()

    def waiting_for(self, found: PromptList) -> str:
        """Return why no task is handed out, or "" while there are some."""
        if found.evicted:
            return f"tenant {found.opened.tenant!r}, which was evicted"
        if found.num_to_come:
            room = self.room()
            return "" if room is None or room > 0 else f"training: {self._engine.settings.replay.limiter} has no room"
        if found.leased:
            return f"{len(found.leased)} open leases"
        if found.held and self._may_return(found):
            return f"{len(found.held)} groups to be trained: those that become too old are made again"
        return ""

    def _why_cancelled(self, lease: Lease) -> str:
        task, state = read_task(lease.key), self._engine.state
        found = None if task is None else self._lists.get(task.list)
        if task is None or found is None:
            return ""
        if found.evicted:
            return f"tenant {found.opened.tenant!r} was evicted"
        if not found.has(task.prompt):
            return "the prompt was removed from its list"
        if found.leased.get((task.epoch, task.prompt)) != task.attempt:
            return "another group completed the task"
        most, behind = self._engine.settings.replay.max_staleness, state.policy_version - lease.version
        if most is not None and behind > most:
            return f"too stale: leased at policy version {lease.version}, now {state.policy_version}, max {most}"
        return ""

    def _last_words(self, lost: Sequence[Lease]) -> list[GroupOutcome]:
        """Return the events of prompts that are given up because these leases run out."""
        state, log = self._engine.state, self._engine.log
        tasks = [task for lease in lost if (task := state.tasks.given_up(lease))]
        if not tasks:
            return []
        rows = [int(self._lists[task.list].rows[task.prompt]) for task in tasks]
        names = log.prompts_of(rows)
        about = [
            Unlisted(
                group=task.id,
                prompt=names[row][0] if row in names else "",
                summary=Summary(tenant=self._lists[task.list].opened.tenant),
            )
            for task, row in zip(tasks, rows, strict=True)
        ]
        return [
            GroupOutcome(
                outcome="dropped",
                reason=EXPIRED,
                policy_version=state.policy_version,
                unlisted=tuple(about[first : first + MAX_EVENTS]),
            )
            for first in range(0, len(about), MAX_EVENTS)
        ]

    def status(self) -> dict[str, dict[str, Any]]:
        """Return the numbers of each list, for `penstock top` and autoscalers."""
        room = self.room()
        return {name: self._numbers(found, room) for name, found in self._lists.items()}

    def _numbers(self, found: PromptList, room: int | None) -> dict[str, Any]:
        left = found.num_to_come
        return {
            "prompts": found.num_live,
            "order": found.opened.order or "Sequential",
            "epoch": max(found.order.epoch, 1),
            "epochs": found.opened.epochs,
            "left_in_epoch": found.order.left if found.order.epoch else found.num_live,
            "left": left,
            "returned": len(found.returned),
            "leased": len(found.leased),
            "held": len(found.held),
            "quarantined": len(found.aside),
            "trained": found.trained.total(),
            "dropped": dict(found.dropped),
            "again": dict(found.again),
            "room": room,
            "wanted": 0 if found.evicted else left if room is None else max(min(left, room), 0),
            "waiting_for": self.waiting_for(found),
            "ended": self.is_over(found),
        }
