"""`Plane`, what `open` returns: a plane in this process or a connection to one elsewhere, with the same methods.

With a folder (or "memory:") the plane runs in a thread of this process and may also listen for other processes. With an
address it is a connection to a plane that `penstock serve` runs.

A plane in this process is closed when its last `Plane` is garbage-collected, so that its folder can be opened again.
The collector may run in any thread, also in one that holds a lock which closing needs. So closing runs in its own
thread, and `open` waits for it (`await_closing`).
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeAlias, TypeVar

import msgspec

from penstock.arrays import Own, Sample, check_count, own_of
from penstock.client.async_puts import AsyncPuts
from penstock.client.direct import Direct, DirectPut
from penstock.client.encoded_group import EncodedGroup, samples_of
from penstock.client.group_builder import AsyncGroupBuilder, GroupBuilder, builder_fields
from penstock.client.handles import Handle, nowhere
from penstock.client.producer_connection import ProducerConnection, Question, error_of
from penstock.client.put_counts import PutCounts
from penstock.convert import Advantage, Filter, Group, grpo
from penstock.errors import Away, Closed, DiskFull, InvalidInput, StorageError
from penstock.frames import Buffer
from penstock.notebook import html_table
from penstock.protocol import (
    Accepted,
    Answer,
    Ask,
    Attach,
    Attached,
    Discard,
    FromClient,
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
)

if TYPE_CHECKING:
    from penstock.client.source import Source
    from penstock.plane import Ledger, PlaneLoop
    from penstock.transport import ClientTransport

P = ParamSpec("P")
T = TypeVar("T")
Connect: TypeAlias = "Callable[[], ClientTransport]"
_CLOSING_S = 20.0
_SHOWN = {"run": "run", "next step": "next_step", "policy version": "policy_version", "waiting for": "waiting_for"}
_closing: set[threading.Thread] = set()
"""Threads that close planes whose `Plane` was garbage-collected."""


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
        self._direct = Direct(_weakly(self._attached), _weakly(self._open_segment), _weakly(self._sign_urls))
        self._collected: weakref.finalize[..., object] | None = None
        if server is not None:
            # The callback must not refer to `self`, or the plane would never be collected.
            close = partial(_close, self._connection, self._async, server, thread)
            self._collected = weakref.finalize(self, _start_closing, close)
            self._collected.atexit = False  # at exit the process ends anyway; closing then would wait for nothing

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
        advantage: Advantage | None = grpo,
        filters: Iterable[Filter] = (),
        evaluation: bool = False,
        priority: float = 1.0,
        timeout: float | None = None,
    ) -> GroupBuilder:
        """Collect the rollouts of one prompt in a `with` block. Leaving the block puts them, an exception cancels them.

        `prompt` is the prompt's name, which repeats as often as the prompt is sampled. `id` is this group's id, unique
        by default. A producer that may restart should pass it, so that a group it puts twice is recognised.
        `evaluation` groups are recorded and shown but never trained. They get no advantages and take no filters.
        `priority` is for samplers that use priorities, until ranks report another.
        """
        return GroupBuilder(
            **builder_fields(self, prompt, id, policy_version, advantage, tuple(filters), evaluation, priority, timeout)
        )

    def agroup(
        self,
        prompt: str,
        *,
        id: str | None = None,  # noqa: A002 - the field's own name
        policy_version: int | None = None,
        advantage: Advantage | None = grpo,
        filters: Iterable[Filter] = (),
        evaluation: bool = False,
        priority: float = 1.0,
        timeout: float | None = None,
    ) -> AsyncGroupBuilder:
        """`group` for asyncio: `async with plane.agroup("prompt-1") as group`."""
        return AsyncGroupBuilder(
            **builder_fields(self, prompt, id, policy_version, advantage, tuple(filters), evaluation, priority, timeout)
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
        encoded = EncodedGroup.of(group, evaluation=evaluation, priority=priority, columns=lambda: self.columns)
        return not self.deliver(encoded, timeout).duplicate

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
        samples = samples_of(group)
        async with self._async.place(samples[0].run if samples else "", timeout, evaluation=evaluation) as left:
            encode = partial(
                EncodedGroup.of, group, evaluation=evaluation, priority=priority, columns=lambda: self.columns
            )
            return not (await self.adeliver(await self.acompute(encode), left)).duplicate

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
        async with self._async.place(encoded.run(), timeout, evaluation=evaluation) as left:
            return not (await self.adeliver(encoded, left)).duplicate

    async def acompute(self, act: Callable[[], T]) -> T:
        """Run a function on one of the two threads that encode groups, and return its result."""
        self._raise_ended()
        return await self._async.compute(act)

    def deliver(self, group: EncodedGroup, timeout: float | None) -> Accepted:
        """Put an encoded group and return the plane's answer."""
        self._raise_ended()
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        through_plane = False
        # Usually one turn. Further ones when storage fails here (the frame is sent to the plane), when storage is away
        # for the plane too (wait and repeat), or when the segment was sealed meanwhile (write to a new one).
        while True:
            put, question = self._begin_put(group, timeout, deadline, through_plane=through_plane)
            try:
                answer = self._connection.ask(question, deadline - time.monotonic(), None if put is None else put.write)
            except StorageError as error:
                self._storage_failed(put, error, deadline)
                through_plane = True
                continue
            through_plane = False
            if wait := self._direct.wait_for(answer, deadline):
                time.sleep(wait)
            elif put is None or not put.should_repeat(answer):
                return self._taken(group, answer)

    async def adeliver(self, group: EncodedGroup, timeout: float | None) -> Accepted:
        """`deliver`, without blocking the thread."""
        self._raise_ended()
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        through_plane = False
        while True:
            begin = partial(self._begin_put, group, timeout, deadline, through_plane=through_plane)
            put, question = await self._async.compute(begin)
            write = None if put is None else partial(self._async.compute, put.write)
            try:
                answer = await self._connection.aask(question, deadline - time.monotonic(), write)
            except StorageError as error:
                self._storage_failed(put, error, deadline)
                through_plane = True
                continue
            through_plane = False
            if wait := self._direct.wait_for(answer, deadline):
                import asyncio  # 20 ms, and few producers use it

                await asyncio.sleep(wait)
            elif put is None or not put.should_repeat(answer):
                return self._taken(group, answer)

    def _begin_put(
        self, group: EncodedGroup, timeout: float | None, deadline: float, *, through_plane: bool
    ) -> tuple[DirectPut | None, Question]:
        """Choose the path of a group: directly to storage, or as bytes through the plane."""
        put = None if through_plane else DirectPut.of(self._direct, group, deadline)
        return put, group.question(self._connection.session, timeout, direct=put is not None)

    def _storage_failed(self, put: DirectPut | None, error: StorageError, deadline: float) -> None:
        """Switch to sending frames through the plane, because one could not be written from here.

        If the disk is full, the plane may free something. If storage is away from here, it may be reachable for the
        plane. So groups go through the plane for a second. After any other error they all do.
        """
        if put is None or (isinstance(error, Away) and time.monotonic() > deadline):
            raise error
        if isinstance(error, (DiskFull, Away)):
            self._direct.pause()
        else:
            self._direct.turn_off(error)

    def _open_segment(self) -> str:
        answer = self._call(lambda ticket: OpenSegment(ticket=ticket))
        if isinstance(answer, Rejected):
            raise error_of(answer)
        assert isinstance(answer, SegmentOpened)
        return answer.segment

    async def _sign_urls(self, method: str, names: tuple[str, ...]) -> tuple[Sequence[str], float]:
        """Signed URLs of objects of this process's segments, and for how many seconds they are valid."""
        question = self._question(lambda ticket: SignUrls(ticket=ticket, method=method, names=names))
        answer = await self._connection.aask(question)
        if isinstance(answer, Rejected):
            raise _sealed(answer) if answer.kind == "Sealed" else error_of(answer)
        assert isinstance(answer, SignedUrls)
        return answer.urls, answer.seconds

    def _attached(self) -> Attached:
        answer = self._call(lambda ticket: Attach(ticket=ticket, run=self._connection.session.run))
        assert isinstance(answer, Attached)
        return answer

    def _taken(self, group: EncodedGroup, answer: Answer) -> Accepted:
        """Count what became of a group. Raises the plane's error if it was rejected."""
        if isinstance(answer, Rejected):
            raise error_of(answer)
        assert isinstance(answer, Accepted)
        if answer.stale:
            self.counts.on_stale(group.name, answer.policy_version)
        if not answer.duplicate and group.group is not None:
            self.counts.on_put(group.group)
        if any(answer.over_length):
            self.counts.on_over_length(group.name, answer.over_length)
        return answer

    @property
    def num_stale(self) -> int:
        """Groups put here that were dropped at once, because they were too old for `max_staleness`."""
        return self.counts.stale

    def discard(self, reason: str, samples: int, *, key: str = "") -> None:
        """Count samples that were filtered out before they became a group. A key is counted once."""
        count = check_count(samples, f"discard of {reason!r}")
        self._decide(lambda ticket: Discard(ticket=ticket, reason=reason, samples=count, key=key))

    async def adiscard(self, reason: str, samples: int, *, key: str = "") -> None:
        """`discard` for asyncio."""
        self._raise_ended()
        message = Discard(ticket=0, reason=reason, samples=check_count(samples, f"discard of {reason!r}"), key=key)
        check_decision(message)
        answer = await self._connection.aask(
            self._question(lambda ticket: msgspec.structs.replace(message, ticket=ticket))
        )
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
        if not weight > 0:
            raise InvalidInput(
                f"share of tenant {tenant!r}: {weight}; must be a positive number; use evict to take it away"
            )
        self._decide(lambda ticket: SetWeight(ticket=ticket, tenant=tenant, weight=weight))

    def evict(self, tenant: str, reason: str) -> None:
        """Remove a tenant's share. Its waiting groups are dropped and counted, its puts raise `Evicted`."""
        self._decide(lambda ticket: SetWeight(ticket=ticket, tenant=tenant, weight=0.0, reason=reason))

    def _decide(self, make: Callable[[int], Discard | SettleGroup | SetWeight]) -> None:
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
        settings = SourceSettings(
            rank=rank,
            world=int(self.status()["ranks"]) if world is None else world,
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
        answer = self._call(lambda ticket: Ask(ticket=ticket))
        assert isinstance(answer, Status)
        found: dict[str, Any] = msgspec.json.decode(answer.text)
        return found

    @property
    def columns(self) -> Own:
        """The plane's own columns, beside those that Penstock defines."""
        if self._columns is None:
            self._columns = own_of(self.status()["columns"])
        return self._columns

    @property
    def policy_version(self) -> int:
        """The version of the weights that the trainer published last. 0 before the first."""
        return self._attached().policy_version or 0

    @property
    def ledger(self) -> Ledger:
        """The state of every accepted sample."""
        from penstock.plane import Ledger

        return Ledger.from_dict(self.status()["ledger"])

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

    def _question(self, make: Callable[[int], FromClient]) -> Question:
        return lambda now: self._connection.session.ask(make, now)

    def _call(self, make: Callable[[int], FromClient]) -> Answer:
        """Send a small request and wait for the answer, or until the plane has been silent too long."""
        return self._ask(self._question(make))

    def _ask(self, question: Question, timeout: float = math.inf) -> Answer:
        self._raise_ended()
        return self._connection.ask(question, timeout)

    def _raise_ended(self) -> None:
        if self._server is not None and self._server.failure is not None and self._connection.is_mine:
            raise Closed(f"the plane in this process ended: {self._server.failure}") from self._server.failure
        self._connection.check_open()


def _sealed(answer: Rejected) -> Exception:
    from penstock.storage import SegmentSealed

    return SegmentSealed(answer.reason)


def _weakly(method: Callable[P, T]) -> Callable[P, T]:
    """Return a callable that does not keep its plane alive, so that the plane can be garbage-collected and closed."""
    found = weakref.WeakMethod(method)

    def call(*words: P.args, **named: P.kwargs) -> T:
        bound = found()
        if bound is None:
            raise Closed("this plane was closed")
        return bound(*words, **named)

    return call


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
        thread.join(10)


def _start_closing(close: Callable[[], None]) -> None:
    def work() -> None:
        try:
            close()
        finally:
            _closing.discard(thread)

    thread = threading.Thread(target=work, name="penstock-closing", daemon=True)
    _closing.add(thread)
    thread.start()


def await_closing() -> None:
    """Wait until collected planes are closed, so that their folders can be opened again."""
    for thread in list(_closing):
        thread.join(_CLOSING_S)
