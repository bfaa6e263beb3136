"""Hands out tasks in the plane's loop: takes lists of prompts, answers workers that want tasks.

All hand-outs of a turn are written in one transaction. A worker that asks while there is nothing to hand out is
answered when there is, or after a heartbeat with the reason, and asks again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from penstock.arrays import MAX_TEXT, run_name_problem
from penstock.errors import CorruptFile, InvalidInput, PenstockError, UnknownKey
from penstock.log import HandOut, OpenList
from penstock.plane.engine import Engine
from penstock.plane.lease_book import Lease
from penstock.plane.leases import MAX_LEASE_S, MIN_LEASE_S, Leases
from penstock.plane.recorder import ends_plane
from penstock.plane.task_book import PROMPT, PromptList, Task, read_task
from penstock.protocol import (
    MAX_NAME,
    MAX_PROMPTS,
    MAX_TASKS,
    AddPrompts,
    FromPlane,
    GiveBack,
    LeasedTask,
    LeaseTasks,
    OfferPrompts,
    Peer,
    PromptChunk,
    PromptsOffered,
    Renew,
    TasksLeased,
    check_prompt,
    list_digest,
)

MAX_LISTS = 256
MAX_LIST_NAME = 100
_MAX_EPOCHS = _MAX_ATTEMPTS = 1_000_000
_MAX_REASONS = 64
_MAX_ROWS = 1 << 40
_MISSING = 64
"""Chunks that a client is asked for at a time."""
_UPLOADS = 16
"""Lists that may be on their way at the same time."""
_REMEMBERED = 4096
"""Answers whose leases are remembered, for a worker whose answer was lost."""
Ticket: TypeAlias = tuple[Peer, int]
Reply: TypeAlias = Callable[[Ticket, FromPlane | PenstockError | None], None]
"""Answers a client: with a message, with an error, or that its request is done."""
AboutTasks: TypeAlias = Renew | GiveBack | OfferPrompts | AddPrompts | LeaseTasks


@dataclass(slots=True, eq=False)
class _Upload:
    """A list whose prompts are arriving."""

    base: int
    offer: OfferPrompts
    have: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Chunk -> place of its first prompt, and number of prompts."""
    opening: list[Ticket] = field(default_factory=list)
    """Clients to answer once the list is open."""


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
        self._uploads: dict[bytes, _Upload] = {}
        self._waiting: dict[Ticket, _Wanted] = {}
        """In the order in which they asked."""
        self._granted: dict[Ticket, tuple[int, ...]] = {}
        leases.cancels[PROMPT] = self._why_cancelled

    @property
    def _lists(self) -> dict[str, PromptList]:
        return self._engine.state.tasks.lists

    def on_message(self, peer: Peer, message: AboutTasks, now: float) -> None:
        """Handle a message. The answer may follow at the end of the turn, or later."""
        ticket = (peer, message.ticket)
        try:
            if isinstance(message, Renew):
                self._reply(ticket, self._leases.on_renew(message, now))
            elif isinstance(message, GiveBack):
                self._leases.on_give_back(message, partial(self._reply, ticket))
            elif isinstance(message, OfferPrompts):
                self._offer(ticket, message)
            elif isinstance(message, AddPrompts):
                self._add(message)
                self._reply(ticket, None)
            else:
                self._want(ticket, message, now)
        except PenstockError as error:
            if ends_plane(error):
                raise
            self._reply(ticket, error)

    # -------------------------------------------------------------- lists

    def _offer(self, ticket: Ticket, offer: OfferPrompts) -> None:
        _check_offer(offer)
        current = self._lists.get(offer.list)
        if current is None and len(self._lists) >= MAX_LISTS:
            raise InvalidInput(f"list {offer.list!r}: this run has {MAX_LISTS} lists; use one of them again")
        if current is not None and current.opened.digest == offer.digest:
            opened = _opened(offer, current.opened.base, current.opened.places)
            if opened == current.opened:
                self._reply(ticket, PromptsOffered(ticket=offer.ticket))
            else:
                self._leases.decide(opened, partial(self._when_open, [ticket]))
            return
        upload = self._uploads.get(offer.digest) or self._begin(offer)
        if upload.opening:
            upload.opening.append(ticket)
            return
        missing = tuple(islice((n for n in range(len(offer.chunks)) if n not in upload.have), _MISSING))
        if missing:
            self._reply(ticket, PromptsOffered(ticket=offer.ticket, missing=missing))
            return
        _check_tiled(upload)
        upload.offer = offer
        upload.opening.append(ticket)
        record = _opened(offer, upload.base, b"" if current is None else self._places(current, upload))
        self._leases.decide(record, partial(self._opened, upload))

    def _begin(self, offer: OfferPrompts) -> _Upload:
        """Reserve rows for a list. Rows behind the last open list are of uploads that an earlier plane did not
        finish."""
        first = max((base + count for one in self._lists.values() for base, count, _ in one.versions), default=1)
        log = self._engine.log
        if not self._uploads:
            with log.transaction():
                log.remove_prompts(first)
        while len(self._uploads) >= _UPLOADS:
            self._uploads.pop(next(iter(self._uploads)))
        ends = [upload.base + upload.offer.count for upload in self._uploads.values()]
        base = max([first, *ends])
        if base + offer.count > _MAX_ROWS:
            raise InvalidInput(f"list {offer.list!r}: this run has no room for {offer.count:,} more prompts")
        upload = self._uploads[offer.digest] = _Upload(base, offer)
        return upload

    def _add(self, message: AddPrompts) -> None:
        upload = self._uploads.get(message.digest)
        if upload is None:
            raise UnknownKey("prompts: of a list that was not offered to this plane; offer it first")
        chunks, chunk = upload.offer.chunks, PromptChunk(message.first, message.names, message.payloads)
        count = len(chunk.names)
        if not 0 <= message.chunk < len(chunks) or not 0 <= chunk.first <= upload.offer.count - count:
            raise InvalidInput(f"prompts: chunk {message.chunk} from {chunk.first} on is outside the list")
        if not count or len(chunk.payloads) != count or chunk.digest != chunks[message.chunk]:
            raise InvalidInput(f"prompts: chunk {message.chunk} is not the one that was offered")
        for name, payload in zip(chunk.names, chunk.payloads, strict=True):
            check_prompt(name, payload)
        log = self._engine.log
        size = sum(map(len, chunk.payloads)) + sum(map(len, chunk.names))
        log.disk.check(size, lambda: log.used_bytes + self._engine.segments.num_bytes)
        with log.transaction():
            log.add_prompts(upload.base + chunk.first, list(zip(chunk.names, chunk.payloads, strict=True)))
        upload.have[message.chunk] = (chunk.first, count)

    def _places(self, current: PromptList, upload: _Upload) -> bytes:
        """Number the prompts of a changed list: known names keep their number."""
        log, numbers = self._engine.log, dict[str, int]()
        for base, count, places in current.versions:
            known = np.frombuffer(places, "<u4").tolist() if places else range(count)
            numbers |= dict(zip(log.prompt_names(base, count), known, strict=True))
        new = iter(range(current.known, MAX_PROMPTS + current.known))
        names = log.prompt_names(upload.base, upload.offer.count)
        found = [numbers[name] if name in numbers else next(new) for name in names]
        if len(set(found)) < len(found):
            raise InvalidInput(f"list {upload.offer.list!r}: two prompts have the same name")
        return np.array(found, "<u4").tobytes()

    def _opened(self, upload: _Upload, error: PenstockError | None) -> None:
        tickets, upload.opening = upload.opening, []
        if error is None:
            self._uploads.pop(upload.offer.digest, None)
        self._when_open(tickets, error)

    def _when_open(self, tickets: list[Ticket], error: PenstockError | None) -> None:
        for ticket in tickets:
            self._reply(ticket, PromptsOffered(ticket=ticket[1]) if error is None else error)

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
        if not self._waiting:
            return
        room = self.room()
        left = MAX_TASKS * len(self._waiting) if room is None else room
        pickers = {name: found.next_tasks() for name, found in self._lists.items() if found.num_to_come}
        if not pickers or left <= 0:
            return
        for ticket, (message, _) in list(self._waiting.items()):
            tasks = list(islice(pickers.get(message.list, iter(())), min(message.count, left)))
            if tasks:
                left -= len(tasks)
                del self._waiting[ticket]
                keys = tuple(task.id for task in tasks)
                record = HandOut(kind=PROMPT, keys=keys, worker=message.worker, lease_s=message.lease_s)
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

    def status(self) -> dict[str, dict[str, Any]]:
        """Return the numbers of each list, for `penstock top` and autoscalers."""
        room = self.room()
        return {name: self._numbers(found, room) for name, found in self._lists.items()}

    def _numbers(self, found: PromptList, room: int | None) -> dict[str, Any]:
        left = found.num_to_come
        return {
            "prompts": found.num_live,
            "epoch": max(found.epoch, 1),
            "epochs": found.opened.epochs,
            "left_in_epoch": len(found.order) - found.cursor if found.epoch else found.num_live,
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


def _opened(offer: OfferPrompts, base: int, places: bytes) -> OpenList:
    return OpenList(
        list=offer.list,
        digest=offer.digest,
        base=base,
        count=offer.count,
        epochs=offer.epochs,
        seed=offer.seed,
        shuffle=offer.shuffle,
        attempts=offer.attempts,
        again=offer.again,
        tenant=offer.tenant,
        places=places,
    )


def _check_tiled(upload: _Upload) -> None:
    """Raise unless the chunks of a list follow one another."""
    at = 0
    for first, count in (upload.have[number] for number in range(len(upload.offer.chunks))):
        if first != at:
            raise InvalidInput(f"list {upload.offer.list!r}: a chunk begins at {first}, must begin at {at}")
        at += count
    if at != upload.offer.count:
        raise InvalidInput(f"list {upload.offer.list!r}: {at} prompts in its chunks, {upload.offer.count} offered")


def _check_offer(offer: OfferPrompts) -> None:
    """Raise InvalidInput for a list that the plane does not take."""
    name = offer.list
    if not 0 < len(name) <= MAX_LIST_NAME or not name.isprintable():
        raise InvalidInput(f"list {name[:40]!r}: give it a printable name of 1 to {MAX_LIST_NAME} characters")
    if offer.tenant and (problem := run_name_problem(offer.tenant)):
        raise InvalidInput(f"list {name!r}: tenant: {problem}")
    for field_name, value, least, most in (
        ("count", offer.count, 1, MAX_PROMPTS),
        ("epochs", offer.epochs, 1, _MAX_EPOCHS),
        ("seed", offer.seed, 0, (1 << 63) - 1),
        ("attempts", offer.attempts, 1, _MAX_ATTEMPTS),
        ("chunks", len(offer.chunks), 1, offer.count),
        ("again", len(offer.again), 0, _MAX_REASONS),
    ):
        if not least <= value <= most:
            raise InvalidInput(f"list {name!r}: {field_name}: {value:,}; give from {least:,} to {most:,}")
    if any(len(reason) > MAX_NAME for reason in offer.again):
        raise InvalidInput(f"list {name!r}: again: a reason has at most {MAX_NAME} characters")
    if any(len(digest) != 16 for digest in offer.chunks) or list_digest(offer.chunks) != offer.digest:
        raise InvalidInput(f"list {name!r}: its digest does not follow from those of its chunks")
