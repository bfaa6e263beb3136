"""What users hold: a plane in this process, or a line to one elsewhere, with the same methods.

`open` gives a `Plane`. With a folder (or "memory:") the plane runs in a thread of this process and may listen for
others as well; with an address it is a line to a plane that `penstock serve` runs.
"""

from __future__ import annotations

import asyncio
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
from penstock.client.closing import close_when_collected, end
from penstock.client.direct import Direct, DirectPut
from penstock.client.encoded_group import EncodedGroup, samples_of
from penstock.client.group_builder import AsyncGroupBuilder, GroupBuilder, builder_fields
from penstock.client.handles import Handle, nowhere
from penstock.client.producer_connection import ProducerConnection, Question, error_of
from penstock.client.put_counts import PutCounts
from penstock.convert import Advantage, Filter, Group, grpo
from penstock.errors import Away, Closed, DiskFull, InvalidInput, StorageError
from penstock.frames import Buffer
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


class Plane:
    """Put groups in, take steps out, look at the ledger. Safe to use from many threads."""

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
        """Where it is: the address that other processes use, or the folder (or "memory:") of one that listens
        nowhere."""
        self.timeouts = timeouts or Timeouts()
        self._connect, self._handle, self._server, self._thread = connect, handle, server, thread
        self._columns: Own | None = None
        self.counts = PutCounts()
        """What was noticed of the groups put here: dropped as stale, branches by cause, routing left out."""
        self._async = AsyncPuts()
        self._connection = ProducerConnection(connect(), ProducerSession(run=run, where=url, timeouts=self.timeouts))
        self._direct = Direct(_weakly(self._attached), _weakly(self._open_segment), _weakly(self._sign_urls))
        self._collected: weakref.finalize[..., object] | None = None
        if server is not None:
            self._collected = close_when_collected(self, partial(end, self._connection, self._async, server, thread))

    def __reduce__(self) -> tuple[Callable[[], Plane], tuple[()]]:
        """For frameworks that ship objects between processes: it arrives as a line to this plane."""
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
        """Collect the rollouts of one prompt; leaving the block puts them, an exception in it cancels them.

        `prompt` is the prompt's name, which comes back as often as it is sampled. `id` is this group's own: made
        unique unless given. A producer that may restart gives it, so that a group it puts twice is recognised.
        `evaluation`: it is recorded and shown, and never trained; so it gets no advantages, and no filter may drop any.
        `priority` is for samplers that go by it, until ranks report another.
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
        """Hand a group over; it is durable when this returns. False if this very group was there already.

        Large arrays (routed experts) are written from where they lie: do not change them before this returns.

        When the plane holds as much as it may, waits up to `timeout` seconds (None: as long as it takes, 0: not at
        all) and then raises `Overloaded`.
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
        """`put` for a group that is encoded already."""
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

        Up to 64 groups of a run are under way, the other tasks wait for their turn. A task that is cancelled leaves
        nothing waiting; its group may be at the plane or not, and putting it again says which. As with `put`, do not
        change large arrays before this returns.
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
        """`aput` for a group that is encoded already."""
        encoded = EncodedGroup.of_frame(group, frame, evaluation=evaluation, priority=priority)
        async with self._async.place(encoded.run(), timeout, evaluation=evaluation) as left:
            return not (await self.adeliver(encoded, left)).duplicate

    async def acompute(self, act: Callable[[], T]) -> T:
        """What a function returns, from one of the two threads that encode groups of tasks."""
        self._raise_ended()
        return await self._async.compute(act)

    def deliver(self, group: EncodedGroup, timeout: float | None) -> Accepted:
        """Put a group that is encoded, and return what the plane answered."""
        self._raise_ended()
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        passes_plane = False
        while True:
            put, question = self._begin_put(group, timeout, deadline, passes_plane=passes_plane)
            try:
                answer = self._connection.ask(question, deadline - time.monotonic(), None if put is None else put.write)
            except StorageError as error:
                self._storage_failed(put, error, deadline)
                passes_plane = True
                continue
            passes_plane = False
            if wait := self._direct.wait_for(answer, deadline):
                time.sleep(wait)
            elif put is None or not put.should_repeat(answer):
                return self._taken(group, answer)

    async def adeliver(self, group: EncodedGroup, timeout: float | None) -> Accepted:
        """`deliver`, without blocking the thread."""
        self._raise_ended()
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        passes_plane = False
        while True:
            begin = partial(self._begin_put, group, timeout, deadline, passes_plane=passes_plane)
            put, question = await self._async.compute(begin)
            write = None if put is None else partial(self._async.compute, put.write)
            try:
                answer = await self._connection.aask(question, deadline - time.monotonic(), write)
            except StorageError as error:
                self._storage_failed(put, error, deadline)
                passes_plane = True
                continue
            passes_plane = False
            if wait := self._direct.wait_for(answer, deadline):
                await asyncio.sleep(wait)
            elif put is None or not put.should_repeat(answer):
                return self._taken(group, answer)

    def _begin_put(
        self, group: EncodedGroup, timeout: float | None, deadline: float, *, passes_plane: bool
    ) -> tuple[DirectPut | None, Question]:
        """How a group goes: straight to storage, or as bytes to the plane."""
        put = None if passes_plane else DirectPut.of(self._direct, group, deadline)
        return put, group.question(self._connection.session, timeout, direct=put is not None)

    def _storage_failed(self, put: DirectPut | None, error: StorageError, deadline: float) -> None:
        """A frame could not be written from here: the plane gets it. Where the disk is full, it frees what it may and
        answers; where storage is away from here, it may not be for the plane. Groups pass it for a second. After any
        other error all of them do."""
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
        """Note what became of a group; raises what the plane refused it with."""
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
        """Groups that were put here and dropped at once, because they were too old for `max_staleness`."""
        return self.counts.stale

    def discard(self, reason: str, samples: int, *, key: str = "") -> None:
        """Count samples that were generated and filtered out before they became a group; what has a key, once."""
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
        """Decide on a group in quarantine: give it up, or let it wait for training again."""
        self._decide(lambda ticket: SettleGroup(ticket=ticket, group=group, drop=drop))

    # -------------------------------------------------------------- runs that share the trainer

    def share(self, run: str, weight: float = 1.0) -> None:
        """Give a run a share of the trainer, or another one, or let it in again after it was evicted.

        From the first share on, groups wait by run (the `run` of their samples), each step takes tokens from the
        runs in proportion to their weights, and groups of a run without a share are refused.
        """
        if not weight > 0:
            raise InvalidInput(f"share of run {run!r}: {weight}; must be a positive number; use evict to take it away")
        self._decide(lambda ticket: SetWeight(ticket=ticket, run=run, weight=weight))

    def evict(self, run: str, reason: str) -> None:
        """Take a run's share away: what it has waiting is dropped and counted, its puts raise `Evicted`."""
        self._decide(lambda ticket: SetWeight(ticket=ticket, run=run, weight=0.0, reason=reason))

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
        """The steps of one rank. `resume_step` is one above the last step of the checkpoint that is loaded; by
        default the first step that is not committed."""
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

    # -------------------------------------------------------------- onlookers

    def status(self) -> dict[str, Any]:
        """Where everything is: phase, steps, ledger, counts, who waits for whom."""
        answer = self._call(lambda ticket: Ask(ticket=ticket))
        assert isinstance(answer, Status)
        found: dict[str, Any] = msgspec.json.decode(answer.text)
        return found

    @property
    def columns(self) -> Own:
        """The columns that the plane was told of, beside those that Penstock knows."""
        if self._columns is None:
            self._columns = own_of(self.status()["columns"])
        return self._columns

    @property
    def policy_version(self) -> int:
        """The version of the weights that the trainer published last; 0, its first, while it has published none."""
        return self._attached().policy_version or 0

    @property
    def ledger(self) -> Ledger:
        """What became of every sample that was accepted."""
        from penstock.plane import Ledger

        return Ledger.from_dict(self.status()["ledger"])

    def close(self) -> None:
        """Let go. A plane in this process ends too; what it accepted is in its folder."""
        if not self._connection.is_mine:
            return  # in a forked process there is nothing to close
        self._direct.close()
        if self._collected is not None:
            self._collected.detach()
        end(self._connection, self._async, self._server, self._thread)

    def kill(self) -> None:
        """End a plane of a Ray cluster, for everybody; other planes end with their process."""
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
        """Ask something small, until there is an answer or the plane has been silent too long."""
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
    """A method that does not keep its plane alive: one whose last reference is gone is closed."""
    found = weakref.WeakMethod(method)

    def call(*words: P.args, **named: P.kwargs) -> T:
        bound = found()
        if bound is None:
            raise Closed("this plane was closed")
        return bound(*words, **named)

    return call
