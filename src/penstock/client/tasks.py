"""Prompts that the plane leases to workers: `for task in plane.tasks(prompts)`, or `async for`.

A worker asks for a task, generates, and puts the group that `task.group()` makes. The put completes the task. The lease
on it is renewed in the background while this process lives. If the process dies, or returns the task, another worker
gets it. So every prompt is trained once per epoch.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.client.conversations import Call, Conversation, arun, run
from penstock.client.group_builder import FAILED, AsyncGroupBuilder, GroupBuilder, builder_fields
from penstock.client.producer_connection import ProducerConnection, error_of, expected, reading_answer
from penstock.client.prompt_lists import Prompt, order_fields, read_prompts
from penstock.client.renewals import Renewals, give_back
from penstock.convert import Advantage, Filter, Group, grpo
from penstock.errors import CallerError, InvalidInput
from penstock.protocol import (
    MAX_TASKS,
    AddPrompts,
    Answer,
    FromClient,
    LeasedTask,
    LeaseTasks,
    OfferPrompts,
    PromptChunk,
    PromptsOffered,
    Rejected,
    TasksLeased,
    chunk_prompts,
    list_digest,
)

if TYPE_CHECKING:
    import asyncio  # a worker of threads does without: it takes 20 ms to import

    from penstock.client.plane import Plane
    from penstock.replay import Curriculum

logger = logging.getLogger("penstock.producer")


class Cancelled:
    """Tells when the result of a task can no longer be used. Like `threading.Event`; also `await task.cancelled`."""

    def __init__(self) -> None:
        self._event, self._lock = threading.Event(), threading.Lock()
        self._wakes: list[Callable[[], object]] = []
        self.reason = ""
        """Why: too stale, completed by another worker, tenant evicted, prompt removed."""

    def is_set(self) -> bool:
        return self._event.is_set()

    __bool__ = is_set

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it is set. Returns False if `timeout` seconds passed first."""
        return self._event.wait(timeout)

    def __await__(self) -> Generator[Any, None, str]:
        """Wait in a task of asyncio. Returns the reason."""
        import asyncio  # a worker of threads does without: it takes 20 ms to import

        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def finish() -> None:
            if not done.done():
                done.set_result(None)

        with self._lock:
            if not self._event.is_set():
                self._wakes.append(partial(loop.call_soon_threadsafe, finish))
            else:
                done.set_result(None)
        yield from done
        return self.reason

    def fire(self, reason: str) -> None:
        """Set it. Called by the connection's thread."""
        with self._lock:
            self.reason = self.reason or reason
            self._event.set()
            wakes, self._wakes = self._wakes, []
        for wake in wakes:
            with suppress(RuntimeError):  # its event loop was closed meanwhile
                wake()


class Worker:
    """The asyncio task that iterates over tasks, if there is one. A cancelled worker did not fail."""

    def __init__(self) -> None:
        # Weakly: the frames of the asyncio task hold the tasks, and they could never be collected.
        self._running: Callable[[], asyncio.Task[Any] | None] = lambda: None
        self._was_cancelled = False
        if "asyncio" not in sys.modules:
            return
        import asyncio

        with suppress(RuntimeError):  # no event loop in this thread
            if (current := asyncio.current_task()) is not None:
                self._running = weakref.ref(current)
                current.add_done_callback(self._on_done)

    def _on_done(self, ended: asyncio.Task[Any]) -> None:
        self._was_cancelled = ended.cancelled()

    @property
    def is_cancelled(self) -> bool:
        running = self._running()
        return self._was_cancelled or (running is not None and running.cancelling() > 0)


def _abandon(renewals: Renewals, lease: int, worker: Worker) -> None:
    """Return the lease of a task that was dropped without a put: the work failed, unless the worker was cancelled."""
    renewals.abandon(lease, "" if worker.is_cancelled else FAILED)


class Task:
    """One prompt of one epoch, leased to this process. Put the group of `group()`, or call `give_back`."""

    def __init__(
        self, plane: Plane, connection: ProducerConnection, leased: LeasedTask, version: int | None, worker: Worker
    ) -> None:
        self._plane, self._connection = plane, connection
        self.lease = leased.lease
        self.id = leased.group
        """The id that the task's group must have."""
        self.prompt = leased.prompt
        """The prompt's name."""
        with reading_answer("task"):
            self.payload: dict[str, Any] | None = msgspec.json.decode(leased.payload) if leased.payload else None
        """The prompt's object as it was listed, or None for a prompt that is a name."""
        self.epoch, self.attempt = leased.epoch, leased.attempt
        self.policy_version = version
        """The version of the weights that was published when the task was leased."""
        self.cancelled = Cancelled()
        self.is_late = False
        """Whether another worker completed the task first. Then the group that was put here was not kept."""
        # Must not refer to `self`, or it would never be collected.
        self._abandoned = weakref.finalize(self, _abandon, connection.renewals, leased.lease, worker)
        self._abandoned.atexit = False

    def __repr__(self) -> str:
        return f"Task({self.prompt!r}, epoch={self.epoch}, attempt={self.attempt})"

    def group(
        self,
        *,
        policy_version: int | None = None,
        advantage: Advantage | str | None = grpo,
        filters: Iterable[Filter | str] = (),
        priority: float = 1.0,
        timeout: float | None = None,
    ) -> TaskGroup:
        """`plane.group` with id, prompt and policy version of the task. Leaving the block puts the group.

        An exception in the block, or filters that leave nothing, end this attempt: with a reason in `again` the prompt
        is leased again. If another worker was faster, the put is counted and not kept; `is_late` tells."""
        return TaskGroup(self, self._fields(policy_version, advantage, filters, priority, timeout))

    def agroup(
        self,
        *,
        policy_version: int | None = None,
        advantage: Advantage | str | None = grpo,
        filters: Iterable[Filter | str] = (),
        priority: float = 1.0,
        timeout: float | None = None,
    ) -> AsyncTaskGroup:
        """`group` for asyncio: `async with task.agroup() as group`."""
        return AsyncTaskGroup(self, self._fields(policy_version, advantage, filters, priority, timeout))

    def _fields(
        self,
        version: int | None,
        advantage: Advantage | str | None,
        filters: Iterable[Filter | str],
        priority: float,
        timeout: float | None,
    ) -> dict[str, Any]:
        version = self.policy_version if version is None else version
        return builder_fields(self._plane, self.prompt, self.id, version, advantage, filters, False, priority, timeout)

    def give_back(self, reason: str = "") -> None:
        """Return the task without a group, for another worker. With a reason, this attempt counts as failed."""
        if self._end():
            run(self._giving_back(reason))

    async def agive_back(self, reason: str = "") -> None:
        """`give_back` for asyncio."""
        if self._end():
            await arun(self._giving_back(reason), self._plane.acompute)

    def _giving_back(self, reason: str) -> Conversation[None]:
        _checked((yield from self._connection.ask(partial(give_back, (self.lease,), reason))))

    def _end(self) -> bool:
        """Stop renewing the lease. Returns False if that was done before."""
        self._connection.renewals.release(self.lease)
        return self._abandoned.detach() is not None

    # -------------------------------------------------------------- for its group

    def left(self, error: BaseException) -> None:
        """End the attempt because of an exception. Does not wait for the plane: the exception comes first."""
        # An interrupt or a cancelled task says nothing about the prompt, and neither does a plane that is full or away.
        is_failure = isinstance(error, Exception) and not self.cancelled.is_set()
        if self._end():
            self._connection.renewals.abandon(self.lease, FAILED if is_failure else "")

    def put_failed(self, error: BaseException) -> None:
        if self._end():
            self._connection.renewals.abandon(self.lease, FAILED if isinstance(error, CallerError) else "")

    def reason_of(self, group: Group, *, has_failed: bool) -> str:
        """Return why a group was not put, or "" if it was."""
        if len(group):
            return FAILED if has_failed else ""
        return max(group.dropped, key=lambda reason: group.dropped[reason], default=FAILED)

    @property
    def num_late(self) -> int:
        return self._plane.counts.late.count(self.id)

    def completed(self, late_before: int) -> None:
        """End the lease: the group was put."""
        self.is_late = self.num_late > late_before
        self._end()


class TaskGroup(GroupBuilder):
    """Collects the rollouts of a task in a `with` block."""

    def __init__(self, task: Task, fields: dict[str, Any]) -> None:
        super().__init__(**fields)
        self._task = task

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.put()
        else:
            self._task.left(error)

    def put(self) -> Group:
        """Make the group and put it, which completes the task."""
        before = self._task.num_late
        try:
            group = super().put()
        except BaseException as error:
            self._task.put_failed(error)
            raise
        if reason := self._task.reason_of(group, has_failed=self.has_failed(group)):
            self._task.give_back(reason)
        else:
            self._task.completed(before)
        return group


class AsyncTaskGroup(AsyncGroupBuilder):
    """Collects the rollouts of a task in an `async with` block."""

    def __init__(self, task: Task, fields: dict[str, Any]) -> None:
        super().__init__(**fields)
        self._task = task

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.put()
        else:
            self._task.left(error)

    async def put(self) -> Group:
        """Make the group and put it, which completes the task."""
        before = self._task.num_late
        try:
            group = await super().put()
        except BaseException as error:
            self._task.put_failed(error)
            raise
        if reason := self._task.reason_of(group, has_failed=self.has_failed(group)):
            await self._task.agive_back(reason)
        else:
            self._task.completed(before)
        return group


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """The arguments of `plane.tasks`."""

    name: str
    epochs: int
    seed: int
    order: Curriculum | None
    batch: int
    lease_s: float
    attempts: int
    max_expiries: int | None
    again: tuple[str, ...]
    tenant: str

    def __post_init__(self) -> None:
        if self.batch not in range(1, MAX_TASKS + 1):
            raise InvalidInput(f"tasks: batch: {self.batch!r}; give 1 to {MAX_TASKS}")


class Tasks:
    """The tasks of a list, to iterate over: `for task in tasks`, or `async for task in tasks`."""

    def __init__(
        self,
        plane: Plane,
        connection: ProducerConnection,
        prompts: str | os.PathLike[str] | Iterable[Prompt],
        settings: TaskSettings,
    ) -> None:
        self._plane, self._connection, self._settings = plane, connection, settings
        self._prompts: str | os.PathLike[str] | Iterable[Prompt] | None = prompts
        self._worker = f"{socket.gethostname()[:100]}:{os.getpid()}:{secrets.token_hex(4)}"
        self.waiting_for = ""
        """Why there is no task right now, as the plane says it."""

    def __iter__(self) -> Iterator[Task]:
        run(self._open())
        batch, worker = deque[Task](), Worker()
        try:
            while batch or (batch := run(self._lease(worker))):
                yield batch.popleft()
        finally:
            self._return(batch)

    async def __aiter__(self) -> AsyncIterator[Task]:
        await arun(self._open(), self._plane.acompute)
        batch, worker = deque[Task](), Worker()
        try:
            while batch or (batch := await arun(self._lease(worker), self._plane.acompute)):
                yield batch.popleft()
        finally:
            self._return(batch)

    def batches(self, count: int) -> Iterator[list[Task]]:
        """Iterate over lists of up to `count` tasks, for a worker that generates for many prompts at once. A list is
        shorter when fewer can be handed out now. Put all of its groups before the next."""
        self._settings = replace(self._settings, batch=count)
        run(self._open())
        worker = Worker()
        while batch := run(self._lease(worker)):
            tasks = list(batch)
            batch.clear()
            yield tasks
            del tasks

    def _return(self, batch: deque[Task]) -> None:
        """Return tasks that were leased ahead when the loop was left."""
        for task in batch:
            task.left(GeneratorExit())

    def _open(self) -> Conversation[None]:
        """Offer the list, and send what the plane lacks of it."""
        if self._prompts is None:
            return
        prompts = yield Call(partial(read_prompts, self._prompts))
        chunks: list[PromptChunk] = yield Call(lambda: list(chunk_prompts(prompts)))
        digests = tuple(chunk.digest for chunk in chunks)
        order = yield Call(lambda: order_fields(self._settings.order, [name for name, _ in prompts]))
        offer = partial(self._offer, digests, len(prompts), order)
        while True:
            answer = _checked((yield from self._connection.ask(offer)))
            answer = expected(answer, PromptsOffered)
            if not answer.missing:
                break
            for number in answer.missing:
                with reading_answer("prompts"):
                    chunk = chunks[number]
                sent = yield from self._connection.ask(partial(_add, list_digest(digests), number, chunk))
                if isinstance(sent, Rejected) and sent.kind == "UnknownKey":
                    break  # the plane restarted since: offer it again
                _checked(sent)
        # The plane has it: a second loop over these tasks need not read it again, and memory is free.
        self._prompts = None

    def _offer(self, digests: tuple[bytes, ...], count: int, order: dict[str, Any], ticket: int) -> OfferPrompts:
        settings = self._settings
        return OfferPrompts(
            ticket=ticket,
            list=settings.name,
            digest=list_digest(digests),
            count=count,
            chunks=digests,
            epochs=settings.epochs,
            seed=settings.seed,
            attempts=settings.attempts,
            again=settings.again,
            tenant=settings.tenant,
            max_expiries=settings.max_expiries,
            **order,
        )

    def _lease(self, worker: Worker) -> Conversation[deque[Task]]:
        """Return tasks, or none once every task of the list is completed."""
        while True:
            answer = _checked((yield from self._connection.ask(self._want)))
            answer = expected(answer, TasksLeased)
            if answer.waiting_for != self.waiting_for:
                self.waiting_for = answer.waiting_for
                if self.waiting_for:
                    mine = len(self._connection.renewals)
                    held = f"; this process has {mine} of them: put or return its tasks" if mine else ""
                    logger.info("tasks %r: waits for %s%s", self._settings.name, self.waiting_for, held)
            if answer.tasks or answer.ended:
                return deque(self._task(one, answer.policy_version, worker) for one in answer.tasks)

    def _want(self, ticket: int) -> LeaseTasks:
        settings = self._settings
        return LeaseTasks(
            ticket=ticket,
            list=settings.name,
            count=settings.batch,
            worker=self._worker,
            lease_s=settings.lease_s,
        )

    def _task(self, leased: LeasedTask, version: int | None, worker: Worker) -> Task:
        task = Task(self._plane, self._connection, leased, version, worker)
        self._connection.renewals.hold(leased.lease, self._settings.lease_s, time.monotonic(), task.cancelled.fire)
        return task


def _add(digest: bytes, number: int, chunk: PromptChunk, ticket: int) -> FromClient:
    return AddPrompts(
        ticket=ticket,
        digest=digest,
        chunk=number,
        first=chunk.first,
        names=chunk.names,
        payloads=chunk.payloads,
    )


def _checked(answer: Answer) -> Answer:
    if isinstance(answer, Rejected):
        raise error_of(answer)
    return answer
