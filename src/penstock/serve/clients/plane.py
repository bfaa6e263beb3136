"""What users hold: a plane in this process, or a line to one elsewhere, with the same methods.

`open` gives a `Plane`. With a folder (or "memory:") the plane runs in a thread of this process and may listen for
others as well; with an address it is a line to a plane that `penstock serve` runs.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from penstock.arrays import Sample
from penstock.arrays.own_columns import Own, own_of
from penstock.convert import Group, grpo
from penstock.convert.advantages import Advantage
from penstock.convert.filters import Filter
from penstock.encode.layout import Buffer
from penstock.errors import Closed, InvalidInput
from penstock.send.carrier import ClientCarrier, keys_of
from penstock.send.keys import ClientKeys
from penstock.send.messages import (
    Accepted,
    Ask,
    Attach,
    Attached,
    Discard,
    FromClient,
    Rejected,
    SettleGroup,
    SetWeight,
    Status,
)
from penstock.send.producer import Answer, ProducerSession
from penstock.send.timeouts import Timeouts
from penstock.serve.clients.async_puts import AsyncPuts
from penstock.serve.clients.encoded_group import EncodedGroup
from penstock.serve.clients.group_builder import AsyncGroupBuilder, GroupBuilder, builder_fields
from penstock.serve.clients.handles import Handle, nowhere
from penstock.serve.clients.keeper_puts import KeeperPuts
from penstock.serve.clients.producer_line import ProducerLine, Question, error_of
from penstock.serve.clients.put_counts import PutCounts
from penstock.serve.clients.source import Source
from penstock.serve.clients.source_settings import SourceSettings
from penstock.serve.decisions.ledger import Ledger
from penstock.serve.keepers.keeper_settings import this_node
from penstock.serve.process.server import Server

T = TypeVar("T")
Connect = Callable[[], ClientCarrier]


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
        keys: ClientKeys | None = None,
        node: str = "",
        server: Server | None = None,
        thread: threading.Thread | None = None,
    ) -> None:
        """`node` is where this process runs, and whose keeper is its own; `keys` are for lines to keepers, where the
        line to the plane has none."""
        self.url = url
        """Where it is: the address that other processes use, or the folder (or "memory:") of one that listens
        nowhere."""
        self.timeouts = timeouts or Timeouts()
        self._connect, self._handle, self._server, self._thread = connect, handle, server, thread
        self._columns: Own | None = None
        self.counts = PutCounts()
        """What was noticed of the groups put here: dropped as stale, forks by cause, routing left out."""
        self._async = AsyncPuts()
        self._keys, self._node = keys, node or this_node()
        session = ProducerSession(run=run, where=url, node=self._node, timeouts=self.timeouts)
        self._carrier = connect()
        self._line = ProducerLine(self._carrier, session)
        self._keepers: KeeperPuts | None = None
        """Through whom groups are put, where the plane has keepers."""
        self._knows_keepers = False

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
        nothing waiting; its group may be at the plane or not, and putting it again says which.
        """
        samples = group.samples if isinstance(group, Group) else group
        async with self._async.place(samples[0].run if samples else "", timeout, evaluation=evaluation) as left:
            encode = partial(
                EncodedGroup.of, group, evaluation=evaluation, priority=priority, columns=lambda: self.columns
            )
            return await self._aput(await self.acompute(encode), left)

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
            return await self._aput(encoded, left)

    async def acompute(self, act: Callable[[], T]) -> T:
        """What a function returns, from one of the two threads that encode groups of tasks."""
        self._raise_ended()
        return await self._async.compute(act)

    def deliver(self, group: EncodedGroup, timeout: float | None) -> Accepted:
        """Put a group that is encoded, and return what the plane answered."""
        keepers = self._through()
        if keepers is not None:
            return self._taken(group, keepers.put(group, timeout))
        question = group.question(self._line.session, timeout)
        return self._taken(group, self._ask(question, math.inf if timeout is None else timeout))

    async def _aput(self, group: EncodedGroup, timeout: float | None) -> bool:
        self._raise_ended()
        keepers = self._keepers if self._knows_keepers else await self._async.compute(self._through)
        if keepers is not None:
            return not self._taken(group, await keepers.aput(group, timeout)).duplicate
        question = group.question(self._line.session, timeout)
        answer = await self._line.aask(question, math.inf if timeout is None else timeout)
        return not self._taken(group, answer).duplicate

    def _through(self) -> KeeperPuts | None:
        """Through whom groups are put; None: to the plane itself. It is asked once."""
        if not self._knows_keepers:
            if self._attached().copies:
                self._keepers = KeeperPuts(
                    self._attached, self._line_keys, run=self._line.session.run, timeouts=self.timeouts
                )
            self._knows_keepers = True
        return self._keepers

    def _attached(self) -> Attached:
        answer = self._call(lambda ticket: Attach(ticket=ticket, run=self._line.session.run, node=self._node))
        assert isinstance(answer, Attached)
        return answer

    def _line_keys(self) -> ClientKeys | None:
        """What a line to a keeper is opened with; a plane that moved may have handed out other keys."""
        return self._keys or keys_of(self._carrier)

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
        self._decide(lambda ticket: Discard(ticket=ticket, reason=reason, samples=samples, key=key))

    async def adiscard(self, reason: str, samples: int, *, key: str = "") -> None:
        """`discard` for asyncio."""
        self._raise_ended()
        answer = await self._line.aask(
            self._question(lambda ticket: Discard(ticket=ticket, reason=reason, samples=samples, key=key))
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

    def _decide(self, make: Callable[[int], FromClient]) -> None:
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
        self._line.check_process()
        settings = SourceSettings(
            rank=rank,
            world=int(self.status()["ranks"]) if world is None else world,
            replica=replica,
            replicas=replicas,
            resume_step=resume_step,
            prefetch=prefetch,
            run=self._line.session.run,
            node=self._node,
            timeouts=self.timeouts,
        )
        return Source(self._connect(), settings, handle=self._handle, keys=self._keys)

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
        return Ledger.from_dict(self.status()["ledger"])

    def close(self) -> None:
        """Let go. A plane in this process ends too; what it accepted is in its folder."""
        if not self._line.is_mine:
            return  # in a forked process there is nothing to close
        if self._keepers is not None:
            self._keepers.close()
        self._line.close()
        self._async.close()
        if self._server is not None and self._thread is not None:
            self._server.stop()
            self._thread.join(10)

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
        return lambda now: self._line.session.ask(make, now)

    def _call(self, make: Callable[[int], FromClient]) -> Answer:
        """Ask something small, until there is an answer or the plane has been silent too long."""
        return self._ask(self._question(make))

    def _ask(self, question: Question, timeout: float = math.inf) -> Answer:
        self._raise_ended()
        return self._line.ask(question, timeout)

    def _raise_ended(self) -> None:
        if self._server is not None and self._server.failure is not None and self._line.is_mine:
            raise Closed(f"the plane in this process ended: {self._server.failure}") from self._server.failure
        self._line.check_open()
