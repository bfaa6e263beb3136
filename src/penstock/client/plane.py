"""`Plane`, what `open` returns: a plane in this process or a connection to one elsewhere, with the same methods.

With a folder (or "memory:") the plane runs in a thread of this process and may also listen for other processes. With an
address it is a connection to a plane that `penstock serve` runs.

A plane in this process is closed when its last `Plane` is garbage-collected (`collected`), so that its folder can be
opened again. Its sources and tasks refer to it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Never, Self, TypeAlias, TypeVar

import msgspec

from penstock.arrays import Own, Sample, own_of
from penstock.client.async_puts import AsyncPuts
from penstock.client.collected import close_if_dropped, weakly
from penstock.client.conversations import Conversation, arun, run
from penstock.client.deliveries import Deliveries, ManyPuts
from penstock.client.direct import Direct
from penstock.client.encoded_group import EncodedGroup, samples_of, waits_with
from penstock.client.feedback_reader import FeedbackReader, ask_page, discard_message
from penstock.client.group_builder import AsyncGroupBuilder, GroupBuilder, builder_fields
from penstock.client.group_states import GroupState, checked_ids
from penstock.client.handles import Handle, nowhere
from penstock.client.producer_connection import ProducerConnection, error_of, expected, reading_answer
from penstock.client.put_counts import PutCounts
from penstock.convert import Advantage, Filter, Group, grpo
from penstock.errors import Closed, InvalidInput, PeerError
from penstock.frames import Buffer
from penstock.notebook import html_table
from penstock.protocol import (
    MAX_ASKED,
    Accepted,
    Answer,
    Ask,
    AskGroups,
    Attach,
    Attached,
    Discard,
    FeedbackEvent,
    FromClient,
    GroupStates,
    OpenSegment,
    ProducerSession,
    Rejected,
    SegmentOpened,
    SettleGroup,
    SetWeight,
    SignedUrls,
    SignUrls,
    Status,
    Timeouts,
    check_decision,
    check_message,
    seconds_of,
)

if TYPE_CHECKING:
    from penstock.client.attaching import AttachResult, LateValue
    from penstock.client.column_lease import ColumnLease, LeaseRequest
    from penstock.client.prompt_lists import Prompt
    from penstock.client.source import Source
    from penstock.client.tasks import Tasks
    from penstock.plane import Ledger, PlaneLoop
    from penstock.replay import Curriculum
    from penstock.transport import ClientTransport

logger = logging.getLogger("penstock.plane")
T = TypeVar("T")
Connect: TypeAlias = "Callable[[], ClientTransport]"
_SHOWN = {"run": "run", "next step": "next_step", "policy version": "policy_version", "waiting for": "waiting_for"}

_CLOSING_S = 10.0
"""How long `close` waits for the thread of a plane in this process."""


class Plane:
    """A plane: put groups in, take steps out, read the ledger. Safe to use from many threads."""

    def __init__(
        self,
        connect: Connect,
        *,
        url: str,
        run: str = "",
        timeouts: Timeouts | None = None,
        handle: Handle | None = None,
        server: PlaneLoop | None = None,
        thread: threading.Thread | None = None,
    ) -> None:
        self.url = url
        """The address that other processes use, or the folder (or "memory:") of a plane that listens nowhere."""
        self.timeouts = timeouts or Timeouts()
        self._connect, self._handle, self._server, self._thread = connect, handle, server, thread
        self._columns: Own | None = None
        self.counts = PutCounts()
        """Counts of the groups put here: dropped as stale, branches by cause, routing left out."""
        self._async = AsyncPuts()
        self._connection = ProducerConnection(connect(), ProducerSession(run=run, where=url, timeouts=self.timeouts))
        self._direct = Direct(
            weakly(self._attached, _gone), weakly(self._open_segment, _gone), weakly(self._sign_urls, _gone)
        )
        self._deliveries = Deliveries(self._connection, self._direct, self.counts)
        self._collected: weakref.finalize[..., object] | None = None
        if server is not None:
            # The callback must not refer to `self`, or the plane would never be collected.
            close = partial(_close, self._connection, self._async, server, thread)
            self._collected = close_if_dropped(self, close)

    def __reduce__(self) -> tuple[Callable[[], Plane], tuple[()]]:
        """Pickle it as an address. It arrives as a connection to this plane."""
        if self._handle is None:
            raise nowhere(self.url)
        return self._handle.plane, ()

    # -------------------------------------------------------------- producers

    def group(
        self,
        prompt: str,
        *,
        id: str | None = None,  # noqa: A002 - the field's own name
        policy_version: int | None = None,
        advantage: Advantage | str | None = grpo,
        filters: Iterable[Filter | str] = (),
        evaluation: bool = False,
        priority: float = 1.0,
        timeout: float | None = None,
    ) -> GroupBuilder:
        """Collect the rollouts of one prompt in a `with` block. Leaving the block puts them, an exception cancels them.

        `prompt` is the prompt's name, which repeats as often as the prompt is sampled. `id` is this group's id, unique
        by default. A producer that may restart should pass it, so that a group it puts twice is recognised.
        `evaluation` groups are recorded and shown but never trained. They get no advantages and take no filters.
        `priority` is for samplers that use priorities, until ranks report another. Give `advantage` by name ("grpo") if
        rewards are attached later: the plane then computes it when they are there, and applies `filters` that have a
        name.
        """
        return GroupBuilder(
            **builder_fields(self, prompt, id, policy_version, advantage, filters, evaluation, priority, timeout)
        )

    def agroup(
        self,
        prompt: str,
        *,
        id: str | None = None,  # noqa: A002 - the field's own name
        policy_version: int | None = None,
        advantage: Advantage | str | None = grpo,
        filters: Iterable[Filter | str] = (),
        evaluation: bool = False,
        priority: float = 1.0,
        timeout: float | None = None,
    ) -> AsyncGroupBuilder:
        """`group` for asyncio: `async with plane.agroup("prompt-1") as group`."""
        return AsyncGroupBuilder(
            **builder_fields(self, prompt, id, policy_version, advantage, filters, evaluation, priority, timeout)
        )

    def put(
        self,
        group: Group | Sequence[Sample],
        *,
        evaluation: bool = False,
        priority: float = 1.0,
        timeout: float | None = None,
    ) -> bool:
        """Put a group. It is durable when this returns. Returns False if the plane already had this group.

        Large arrays (routed experts) are written without a copy: do not change them before this returns.

        While the plane has no room, waits up to `timeout` seconds (None: without limit, 0: not at all), then raises
        `Overloaded`.
        """
        return not self.deliver(self._encode(group, evaluation, priority), timeout).duplicate

    def put_many(
        self,
        groups: Iterable[Group | Sequence[Sample] | EncodedGroup],
        *,
        evaluation: bool = False,
        priority: float = 1.0,
        timeout: float | None = None,
    ) -> list[bool]:
        """Put many groups: one round trip, one sync and one transaction where one group at a time would take many.

        Returns for each group, in order, what `put` would return. If some groups fail, the others are put all the
        same, and `PutManyError` says what became of each. Groups are accepted in this order.

        Up to 64 groups are encoded and sent at once. While the plane has no room, those that fit are put and the
        others wait their turn, for up to `timeout` seconds in total.
        """
        many = self._many(groups, evaluation, priority)
        return self._run(many.deliver(self._deliveries, self._async, timeout, evaluation=evaluation))

    def put_frame(
        self,
        group: str,
        frame: Buffer,
        *,
        evaluation: bool = False,
        priority: float = 1.0,
        timeout: float | None = None,
    ) -> bool:
        """`put` for a group that is already encoded."""
        encoded = EncodedGroup.of_frame(group, frame, evaluation=evaluation, priority=priority)
        return not self.deliver(encoded, timeout).duplicate

    async def aput(
        self,
        group: Group | Sequence[Sample],
        *,
        evaluation: bool = False,
        priority: float = 1.0,
        timeout: float | None = None,
    ) -> bool:
        """`put` for asyncio, from any number of tasks at once.

        Up to 64 groups of a tenant are encoded and sent at once, and other tasks wait for their turn. A cancelled task
        leaves nothing waiting at the plane. Its group may or may not have arrived: putting it again tells. As with
        `put`, do not change large arrays before this returns.
        """
        samples_of(group)  # raises for what is no group
        encode = partial(self._encode, group, evaluation, priority)
        return await self._aput(group, encode, timeout, evaluation=evaluation)

    async def aput_many(
        self,
        groups: Iterable[Group | Sequence[Sample] | EncodedGroup],
        *,
        evaluation: bool = False,
        priority: float = 1.0,
        timeout: float | None = None,
    ) -> list[bool]:
        """`put_many` for asyncio. Shares the 64 places of `aput`: it takes those that are free, at least one."""
        await self._alearn_tables()
        many = self._many(groups, evaluation, priority)
        return await self._arun(many.deliver(self._deliveries, self._async, timeout, evaluation=evaluation))

    async def aput_frame(
        self,
        group: str,
        frame: Buffer,
        *,
        evaluation: bool = False,
        priority: float = 1.0,
        timeout: float | None = None,
    ) -> bool:
        """`aput` for a group that is already encoded."""
        encoded = EncodedGroup.of_frame(group, frame, evaluation=evaluation, priority=priority)
        return await self._aput(encoded, lambda: encoded, timeout, evaluation=evaluation)

    async def _alearn_tables(self) -> None:
        """Learn whether groups wait by environment. If so, each environment has its own places."""
        if not self._connection.session.is_attached:
            await self._arun(
                self._connection.ask(lambda ticket: Attach(ticket=ticket, run=self._connection.session.run))
            )

    async def _aput(
        self, group: object, encode: Callable[[], EncodedGroup], timeout: float | None, *, evaluation: bool
    ) -> bool:
        """Hold one of a tenant's places while a group is encoded and put."""
        timeout = seconds_of(timeout)
        began = time.monotonic()
        await self._alearn_tables()
        run = waits_with(group, by_env=self._connection.session.by_env)
        places = await self._async.places(run, timeout, evaluation=evaluation, most=1).suspend()
        try:
            left = None if timeout is None else max(timeout - (time.monotonic() - began), 0.0)
            return not (await self.adeliver(await self.acompute(encode), left)).duplicate
        finally:
            places.release()

    def _encode(
        self, group: Group | Sequence[Sample] | EncodedGroup, evaluation: bool, priority: float
    ) -> EncodedGroup:
        if isinstance(group, EncodedGroup):
            return group
        return EncodedGroup.of(group, evaluation=evaluation, priority=priority, columns=lambda: self.columns)

    def _many(
        self, groups: Iterable[Group | Sequence[Sample] | EncodedGroup], evaluation: bool, priority: float
    ) -> ManyPuts[Group | Sequence[Sample] | EncodedGroup]:
        session = self._connection.session
        where = partial(waits_with, by_env=session.by_env)
        return ManyPuts(groups, lambda group: self._encode(group, evaluation, priority), where)

    async def acompute(self, act: Callable[[], T]) -> T:
        """Run a function on one of the two threads that encode groups, and return its result."""
        self._raise_ended()
        return await self._async.compute(act)

    def deliver(self, group: EncodedGroup, timeout: float | None) -> Accepted:
        """Put an encoded group and return the plane's answer."""
        return self._run(self._deliveries.one(group, timeout))

    async def adeliver(self, group: EncodedGroup, timeout: float | None) -> Accepted:
        """`deliver`, without blocking the thread."""
        return await self._arun(self._deliveries.one(group, timeout))

    # -------------------------------------------------------------- tasks

    def tasks(
        self,
        prompts: str | os.PathLike[str] | Iterable[Prompt],
        *,
        name: str = "prompts",
        epochs: int = 1,
        seed: int = 0,
        order: Curriculum | None = None,
        batch: int = 1,
        lease_s: float = 60.0,
        attempts: int = 16,
        max_expiries: int | None = 5,
        again: Iterable[str] = ("stale", "lost", "rollout failed"),
        tenant: str = "",
    ) -> Tasks:
        """Lease prompts to this process, one after another: `for task in plane.tasks(prompts)`, or `async for`.

        Any number of processes may lease from one list. Every prompt is trained once per epoch, whatever process dies.
        `prompts` are names, or objects with a `name`, or a file with one of either in each line as JSON. `name` is the
        list's name: a run continues the list of an earlier start. `batch` tasks are leased at a time. A lease that is
        not renewed for `lease_s` seconds, because its process died, returns; after `max_expiries` times in a row the
        prompt is given up for this epoch. A group that is dropped for a reason in `again` is made again, up to
        `attempts` times. `tenant` is the `run` of the samples, where tenants share the plane.

        `order` is `Sequential()`, `Sequential(shuffle=False)`, or a curriculum that learns: `DifficultyPools(...)` or
        `Thompson(...)`. An epoch of a curriculum is as many tasks as there are prompts, chosen by what became of
        earlier groups.
        """
        from penstock.client.tasks import Tasks, TaskSettings

        if prompts is None:
            raise InvalidInput("tasks: prompts: None; give a list of prompts, or a file with one in each line")
        if isinstance(again, str):
            raise InvalidInput(f"tasks: again: {again!r:.80} is one reason; pass a list: again=[{again!r:.80}]")
        if not isinstance(again, Iterable):
            raise InvalidInput(f"tasks: again: {again!r:.80}; pass a list of reasons, or [] for none")
        settings = TaskSettings(
            name=name,
            epochs=epochs,
            seed=seed,
            order=order,
            batch=batch,
            lease_s=lease_s,
            attempts=attempts,
            max_expiries=max_expiries,
            again=tuple(again),
            tenant=tenant,
        )
        return Tasks(self, self._connection, prompts, settings)

    async def arequest(self, make: Callable[[int], FromClient]) -> Answer:
        """Send a message of the protocol and return the answer. Raises the error of a request that was rejected."""
        answer = await self._arun(self._connection.ask(make))
        if isinstance(answer, Rejected):
            raise error_of(answer)
        return answer

    def demand(self) -> dict[str, dict[str, Any]]:
        """Return the numbers of each list of tasks, for autoscalers.

        Among them `wanted`: tasks that more workers could lease now; `leased`: tasks under way; `left`: tasks that are
        still to be handed out; `room`: what the limiter allows, or None; `waiting_for`: why none is handed out."""
        found: dict[str, dict[str, Any]] = self.status()["tasks"]
        return found

    # -------------------------------------------------------------- what became of groups

    def has(self, groups: Iterable[str]) -> dict[str, GroupState]:
        """Return what became of groups, by id: what the plane's ledger says, or "unknown".

        A producer that restarts asks before it generates again. Up to 1,024 groups take one round trip. A group whose
        put was not answered yet may be unknown now and accepted a moment later: putting it again does no harm.
        """
        return self._run(self._ask_states(groups))

    async def ahas(self, groups: Iterable[str]) -> dict[str, GroupState]:
        """`has` for asyncio."""
        return await self._arun(self._ask_states(groups))

    def _ask_states(self, groups: Iterable[str]) -> Conversation[dict[str, GroupState]]:
        names, found = checked_ids(groups), dict[str, GroupState]()
        for start in range(0, len(names), MAX_ASKED):
            some = tuple(names[start : start + MAX_ASKED])
            answer = yield from self._connection.ask(partial(_ask_groups, some))
            if isinstance(answer, Rejected):
                raise error_of(answer)
            states = expected(answer, GroupStates).states
            with reading_answer("has"):
                found |= {name: GroupState(*state) for name, state in zip(some, states, strict=True)}
        return found

    # -------------------------------------------------------------- late columns

    def attach(
        self,
        column: str,
        values: Mapping[str, Mapping[str, LateValue]],
        *,
        errors: Mapping[str, Mapping[str, str]] | None = None,
    ) -> AttachResult:
        """Give samples of accepted groups a value that they lacked when they were put, by group and sample id: a
        number, or one value per token if the column has them.

        Durable when this returns, and never waits for room. The same value twice is no error: the result counts it as
        known. Another value for the same sample raises `Conflict`, and nothing of the call is attached. A sample in
        `errors` could not be scored: it is not trained, and its reward is part of no baseline.
        """
        from penstock.client.attaching import attach  # for judges: a rollout worker does without

        return self._run(attach(self._connection, column, values, errors or {}))

    async def aattach(
        self,
        column: str,
        values: Mapping[str, Mapping[str, LateValue]],
        *,
        errors: Mapping[str, Mapping[str, str]] | None = None,
    ) -> AttachResult:
        """`attach` for asyncio."""
        from penstock.client.attaching import attach

        return await self._arun(attach(self._connection, column, values, errors or {}))

    def lacking(
        self,
        column: str,
        *,
        groups: int = 8,
        tokenizer: Any = None,
        lease_s: float = 30.0,
        timeout: float | None = None,
    ) -> Iterator[ColumnLease]:
        """Lease groups that lack a column, up to `groups` at a time, and wait for more. `lease.attach` scores them.

        A lease is renewed while this process lives. If the process dies, or drops a lease without attaching, other
        workers get its groups after `lease_s` seconds at most. The loop ends after `timeout` seconds without any group
        (None: never). `tokenizer` needs a method `decode`, for `lease.text`.
        """
        from penstock.client.column_lease import LeaseRequest, lease_forever

        asking = LeaseRequest(column, groups, tokenizer, lease_s, timeout)
        return lease_forever(self._connection, asking, self._attached, self._direct, self._run)

    def alacking(
        self,
        column: str,
        *,
        groups: int = 8,
        tokenizer: Any = None,
        lease_s: float = 30.0,
        timeout: float | None = None,
    ) -> AsyncIterator[ColumnLease]:
        """`lacking` for asyncio: `async for lease in plane.alacking("rewards")`, then `await lease.aattach(...)`."""
        from penstock.client.column_lease import LeaseRequest, alease_forever

        asking = LeaseRequest(column, groups, tokenizer, lease_s, timeout)
        return alease_forever(self._connection, asking, self._attached, self._direct, self._arun)

    # -------------------------------------------------------------- feedback

    def feedback(self, after: str = "", *, follow: bool = False) -> Iterator[FeedbackEvent]:
        """Yield what became of each group, oldest event first, from the first event after the cursor `after`.

        Ends at the newest event. With `follow` it waits for further ones as long as the plane lives. Every event is
        durable and comes once, whoever is killed: keep `event.cursor` where you keep what you learned from the event,
        and pass it as `after` when you start again.
        """
        reader = FeedbackReader(self._connection, after, follow)
        while (events := self._run(reader.next_page())) is not None:
            yield from events

    async def afeedback(self, after: str = "", *, follow: bool = False) -> AsyncIterator[FeedbackEvent]:
        """`feedback` for asyncio: `async for event in plane.afeedback(after=cursor, follow=True)`."""
        reader = FeedbackReader(self._connection, after, follow)
        while (events := await self._arun(reader.next_page())) is not None:
            for event in events:
                yield event

    async def afeedback_page(self, after: str, most: int, wait_s: float) -> tuple[FeedbackEvent, ...]:
        """Return up to `most` events after a cursor. Waits up to `wait_s` seconds for the first."""
        return (await self._arun(ask_page(self._connection, after, most, wait_s))).events

    async def alease_once(self, asked: LeaseRequest) -> tuple[dict[str, int], list[Sample]]:
        """Lease groups without renewing them, for the HTTP API. Returns the lease of each group, and the samples."""
        from penstock.client.column_lease import lease_once

        return await self._arun(lease_once(self._connection, asked))

    def _open_segment(self) -> str:
        answer = self._call(lambda ticket: OpenSegment(ticket=ticket))
        if isinstance(answer, Rejected):
            raise error_of(answer)
        from penstock.storage import is_segment_name

        segment = expected(answer, SegmentOpened).segment
        if not is_segment_name(segment):  # it becomes a file's name: `../x` would lead out of the storage
            raise PeerError(f"{self.url}: opened segment {segment!r:.80}; a name has 16 hexadecimal digits")
        return segment

    async def _sign_urls(self, method: str, names: tuple[str, ...]) -> tuple[Sequence[str], float]:
        """Return signed URLs of objects of this process's segments, and for how many seconds they are valid."""
        answer = await self._arun(
            self._connection.ask(lambda ticket: SignUrls(ticket=ticket, method=method, names=names))
        )
        if isinstance(answer, Rejected):
            raise _sealed(answer) if answer.kind == "Sealed" else error_of(answer)
        signed = expected(answer, SignedUrls)
        return signed.urls, signed.seconds

    def _attached(self) -> Attached:
        return expected(self._call(lambda ticket: Attach(ticket=ticket, run=self._connection.session.run)), Attached)

    @property
    def num_stale(self) -> int:
        """Groups put here that were dropped at once, because they were too old for `max_staleness`."""
        return self.counts.stale

    def discard(
        self,
        reason: str,
        samples: int,
        *,
        key: str = "",
        group: str = "",
        prompt: str = "",
        env: str = "",
        tenant: str = "",
        rewards: Iterable[float | None] = (),
        lengths: Iterable[int] = (),
    ) -> None:
        """Count samples that were filtered out before they became a group. A key is counted once.

        The other arguments are for `feedback`: which group and prompt they belonged to, and the reward and the tokens
        of each sample. Of more than 256 samples the first are kept.
        """
        message = discard_message(reason, samples, key, group, prompt, env, tenant, rewards, lengths)
        self._decide(lambda ticket: msgspec.structs.replace(message, ticket=ticket))

    async def adiscard(
        self,
        reason: str,
        samples: int,
        *,
        key: str = "",
        group: str = "",
        prompt: str = "",
        env: str = "",
        tenant: str = "",
        rewards: Iterable[float | None] = (),
        lengths: Iterable[int] = (),
    ) -> None:
        """`discard` for asyncio."""
        self._raise_ended()
        message = discard_message(reason, samples, key, group, prompt, env, tenant, rewards, lengths)
        check_message(message)
        check_decision(message)
        answer = await self._arun(self._connection.ask(lambda ticket: msgspec.structs.replace(message, ticket=ticket)))
        if isinstance(answer, Rejected):
            raise error_of(answer)

    def settle(self, group: str, *, drop: bool) -> None:
        """Drop a group in quarantine, or release it so that it waits for training again."""
        self._decide(lambda ticket: SettleGroup(ticket=ticket, group=group, drop=drop))

    # -------------------------------------------------------------- tenants

    def share(self, tenant: str, weight: float = 1.0) -> None:
        """Give a tenant a share of the trainer, change it, or readmit an evicted tenant.

        From the first share on, groups are queued by tenant (the `run` of their samples), each step takes tokens from
        the tenants in proportion to their weights, and groups of a tenant without a share are rejected.
        """
        check_message(SetWeight(ticket=0, tenant=tenant, weight=weight))
        if not weight > 0:
            raise InvalidInput(
                f"share of tenant {tenant!r}: {weight}; must be a positive number; use evict to take it away"
            )
        self._decide(lambda ticket: SetWeight(ticket=ticket, tenant=tenant, weight=weight))

    def evict(self, tenant: str, reason: str) -> None:
        """Remove a tenant's share. Its waiting groups are dropped and counted, its puts raise `Evicted`."""
        self._decide(lambda ticket: SetWeight(ticket=ticket, tenant=tenant, weight=0.0, reason=reason))

    def _decide(self, make: Callable[[int], Discard | SettleGroup | SetWeight]) -> None:
        check_message(make(0))
        check_decision(make(0))
        answer = self._call(make)
        if isinstance(answer, Rejected):
            raise error_of(answer)

    # -------------------------------------------------------------- trainers

    def source(
        self,
        rank: int,
        *,
        world: int | None = None,
        replica: int = 0,
        replicas: int = 1,
        resume_step: int | None = None,
        prefetch: int = 1,
    ) -> Source:
        """Return the source of one rank's steps. `resume_step` is one above the last step of the checkpoint that is
        loaded. By default it continues at the first uncommitted step."""
        from penstock.client.source import Source
        from penstock.client.source_settings import SourceSettings

        self._connection.check_process()
        if world is None:
            found = self.status()
            with reading_answer("ranks"):
                world = int(found["ranks"])
        settings = SourceSettings(
            rank=rank,
            world=world,
            replica=replica,
            replicas=replicas,
            resume_step=resume_step,
            prefetch=prefetch,
            run=self._connection.session.run,
            timeouts=self.timeouts,
        )
        source = Source(self._connect(), settings, handle=self._handle)
        source.plane = self if self._server is not None else None
        return source

    # -------------------------------------------------------------- status

    def status(self) -> dict[str, Any]:
        """Return the plane's status: phase, steps, ledger, counts, what it waits for."""
        answer = expected(self._call(lambda ticket: Ask(ticket=ticket)), Status)
        with reading_answer("status"):
            return msgspec.json.decode(answer.text, type=dict[str, Any])

    @property
    def columns(self) -> Own:
        """The plane's own columns, beside those that Penstock defines."""
        if self._columns is None:
            found = self.status()
            with reading_answer("columns"):
                self._columns = own_of(found["columns"])
        return self._columns

    @property
    def policy_version(self) -> int:
        """The version of the weights that the trainer published last. 0 before the first."""
        return self._attached().policy_version or 0

    @property
    def ledger(self) -> Ledger:
        """The state of every accepted sample."""
        from penstock.plane import Ledger

        found = self.status()
        with reading_answer("ledger"):
            return Ledger.from_dict(found["ledger"])

    def __repr__(self) -> str:
        where = "in this process" if self._server is not None else "elsewhere"
        return f"Plane({self.url!r}, {where}{', closed' if self._connection.is_closed else ''})"

    def _repr_html_(self) -> str:
        """Show a plane in this process with its ledger. A plane elsewhere might not answer, so it is not asked."""
        if self._server is None or self._connection.is_closed:
            return html_table(self, [])
        now = self.status()
        rows = [(name, now[key]) for name, key in _SHOWN.items()]
        return html_table(self, [*rows, ("ledger", self.ledger)])

    def close(self) -> None:
        """Close the connection. A plane in this process ends too. What it accepted is in its folder."""
        if not self._connection.is_mine:
            return  # in a forked process there is nothing to close
        self._direct.close()
        if self._collected is not None:
            self._collected.detach()
        _close(self._connection, self._async, self._server, self._thread)

    def kill(self) -> None:
        """End a plane of a Ray cluster, for all its clients. Other planes end with their process."""
        raise InvalidInput(f"{self.url}: not a plane of a Ray cluster; `close` it, or end the process it runs in")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -------------------------------------------------------------- questions and answers

    def _call(self, make: Callable[[int], FromClient]) -> Answer:
        """Send a small request and wait for the answer, or until the plane has been silent too long."""
        return self._run(self._connection.ask(make))

    def _run(self, steps: Conversation[T]) -> T:
        self._raise_ended()
        return run(steps)

    async def _arun(self, steps: Conversation[T]) -> T:
        self._raise_ended()
        return await arun(steps, self._async.compute)

    def _raise_ended(self) -> None:
        if self._server is not None and self._server.failure is not None and self._connection.is_mine:
            raise Closed(f"the plane in this process ended: {self._server.failure}") from self._server.failure
        self._connection.check_open()


def _ask_groups(groups: tuple[str, ...], ticket: int) -> AskGroups:
    return AskGroups(ticket=ticket, groups=groups)


def _sealed(answer: Rejected) -> Exception:
    from penstock.storage import SegmentSealed

    return SegmentSealed(answer.reason)


def _gone() -> Never:
    raise Closed("this plane was closed")


# ------------------------------------------------------------------ closing


def _close(
    connection: ProducerConnection, puts: AsyncPuts, server: PlaneLoop | None, thread: threading.Thread | None
) -> None:
    """Close a connection, and end the plane behind it if that runs in this process."""
    if not connection.is_mine:
        return
    connection.close()
    puts.close()
    if server is not None and thread is not None:
        server.stop()
        thread.join(_CLOSING_S)
        if thread.is_alive():
            frame = sys._current_frames().get(thread.ident or 0)
            stack = "".join(traceback.format_stack(frame, limit=8)) if frame is not None else "its end"
            logger.warning(
                "%s: the plane's thread still runs %g s after close, and keeps its folder open; it is at\n%s",
                server.engine.log.where,
                _CLOSING_S,
                stack,
            )
