"""What users hold: a plane in this process, or a line to one elsewhere, with the same methods.

`open` gives a `Plane`. With a folder (or "memory:") the plane runs in a thread of this process and may listen for
others as well; with an address it is a line to a plane that `penstock serve` runs.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, Self

import msgspec
import xxhash

from penstock import errors
from penstock.arrays import Sample
from penstock.arrays.own_columns import Own, own_of
from penstock.convert import Group, grpo, unique_id
from penstock.convert.advantages import Advantage
from penstock.convert.filters import Filter
from penstock.encode import read_head
from penstock.encode.layout import Buffer
from penstock.encode.writing import encode_to_send
from penstock.errors import Closed, InvalidInput, Overloaded, PenstockError
from penstock.send.carrier import ClientCarrier
from penstock.send.messages import (
    Accepted,
    Ask,
    Attach,
    Discard,
    Frames,
    FromClient,
    FromPlane,
    Rejected,
    SettleGroup,
    SetWeight,
    Status,
)
from penstock.send.producer import Answer, Answered, Event, ProducerSession
from penstock.send.retry import Out
from penstock.send.timeouts import Timeouts
from penstock.serve.clients.client_loop import ClientLoop
from penstock.serve.clients.group_builder import GroupBuilder
from penstock.serve.clients.put_counts import PutCounts
from penstock.serve.clients.source import Source
from penstock.serve.decisions.ledger import Ledger
from penstock.serve.process.server import Server

Connect = Callable[[], ClientCarrier]
_LOOK_S = 1.0
"""How often a call that waits looks whether anybody could still answer it."""


class Plane:
    """Put groups in, take steps out, look at the ledger. Safe to use from many threads."""

    def __init__(
        self,
        connect: Connect,
        *,
        url: str,
        run: str = "",
        timeouts: Timeouts | None = None,
        server: Server | None = None,
        thread: threading.Thread | None = None,
    ) -> None:
        self.url = url
        """Where it is."""
        self.timeouts = timeouts or Timeouts()
        self._connect, self._server, self._thread = connect, server, thread
        self._session = ProducerSession(run=run, where=url, timeouts=self.timeouts)
        self._futures: dict[int, Future[Answer]] = {}
        self._lock = threading.Lock()
        self._closed: BaseException | None = None
        self._columns: Own | None = None
        self.counts = PutCounts()
        """What was noticed of the groups put here: dropped as stale, forks by cause, routing left out."""
        self._loop = ClientLoop(
            connect(),
            on_message=self._on_message,
            on_tick=self._on_tick,
            on_end=self._on_end,
            # Well below what counts as standing still (`ProducerSession`), or silence would never add up.
            tick_s=min(self.timeouts.resend_s / 2, self.timeouts.plane_s / 8, 0.5),
            name="plane-line",
        )
        self._loop.start()

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
        timeout: float | None = None,
    ) -> GroupBuilder:
        """Collect the rollouts of one prompt; leaving the block puts them, an exception in it cancels them.

        `prompt` is the prompt's name, which comes back as often as it is sampled. `id` is this group's own: made
        unique unless given. A producer that may restart gives it, so that a group it puts twice is recognised.
        `evaluation`: it is recorded and shown, and never trained; so it gets no advantages, and no filter may drop any.
        """
        dropping = tuple(filters)
        if evaluation and dropping:
            raise InvalidInput(f"group of {prompt!r}: {len(dropping)} filters; leave them out, evaluation keeps all")
        name, rule = unique_id(prompt) if id is None else id, None if evaluation else advantage
        return GroupBuilder(self, prompt, name, policy_version, rule, dropping, timeout, evaluation)

    def put(self, group: Group | Sequence[Sample], *, evaluation: bool = False, timeout: float | None = None) -> bool:
        """Hand a group over; it is durable when this returns. False if this very group was there already.

        When the plane holds as much as it may, waits up to `timeout` seconds (None: as long as it takes, 0: not at
        all) and then raises `Overloaded`.
        """
        samples: Sequence[Sample] = group.samples if isinstance(group, Group) else group
        if not samples:
            raise InvalidInput("put: no samples; a group has at least one")
        if any(sample.own for sample in samples):
            samples = [sample.conformed(self.columns) for sample in samples]
        name = group.id if isinstance(group, Group) else samples[0].group
        run = samples[0].run
        is_new = self._put(name, encode_to_send(samples), lambda: run, timeout, evaluation)
        if is_new and isinstance(group, Group):
            self.counts.on_put(group)
        return is_new

    def put_frame(self, group: str, frame: Buffer, *, evaluation: bool = False, timeout: float | None = None) -> bool:
        """`put` for a group that is encoded already."""
        return self._put(group, frame, partial(_run_of, frame), timeout, evaluation)

    def _put(self, group: str, frame: Buffer, run: Callable[[], str], timeout: float | None, evaluation: bool) -> bool:
        digest = xxhash.xxh3_128_digest(frame)
        waits = timeout is None or timeout > 0
        answer = self._ask(
            lambda now: self._session.put(group, frame, digest, now, run=run, waits=waits, evaluation=evaluation),
            math.inf if timeout is None else timeout,
        )
        if isinstance(answer, Rejected):
            raise _error_of(answer)
        assert isinstance(answer, Accepted)
        if answer.stale:
            self.counts.on_stale(group, answer.policy_version)
        return not answer.duplicate

    @property
    def num_stale(self) -> int:
        """Groups that were put here and dropped at once, because they were too old for `max_staleness`."""
        return self.counts.stale

    def discard(self, reason: str, samples: int, *, key: str = "") -> None:
        """Count samples that were generated and filtered out before they became a group; what has a key, once."""
        self._decide(lambda ticket: Discard(ticket=ticket, reason=reason, samples=samples, key=key))

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
            raise _error_of(answer)

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
        self._loop.check_process()
        return Source(
            self._connect(),
            rank=rank,
            world=int(self.status()["ranks"]) if world is None else world,
            run=self._session.run,
            replica=replica,
            replicas=replicas,
            resume_step=resume_step,
            prefetch=prefetch,
            timeouts=self.timeouts,
        )

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
    def policy_version(self) -> int | None:
        """The version of the weights that the trainer published last; None while it has published none."""
        self._call(lambda ticket: Attach(ticket=ticket, run=self._session.run))
        return self._session.policy_version

    @property
    def ledger(self) -> Ledger:
        """What became of every sample that was accepted."""
        return Ledger.from_dict(self.status()["ledger"])

    def close(self) -> None:
        """Let go. A plane in this process ends too; what it accepted is in its folder."""
        if not self._loop.is_mine:
            return  # in a forked process there is nothing to close
        with self._lock:
            self._closed = self._closed or Closed("this plane was closed")
            self._give_up(self._closed)
        self._loop.stop()
        if self._server is not None and self._thread is not None:
            self._server.stop()
            self._thread.join(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -------------------------------------------------------------- questions and answers

    def _call(self, make: Callable[[int], FromClient]) -> Answer:
        """Ask something small, until there is an answer or the plane has been silent too long."""
        return self._ask(lambda now: self._session.ask(make, now), math.inf)

    def _ask(self, ask: Callable[[float], tuple[int, list[Event]]], timeout: float) -> Answer:
        self._loop.check_process()
        with self._lock:
            self._raise_closed()
            ticket, events = ask(time.monotonic())
            future = self._futures[ticket] = Future()
            self._handle(events)
        try:
            return self._wait(ticket, future, time.monotonic() + timeout)
        finally:
            with self._lock:
                self._session.drop(ticket)
                self._futures.pop(ticket, None)

    def _wait(self, ticket: int, future: Future[Answer], deadline: float) -> Answer:
        """The answer. After the deadline it no longer waits for room; for the answer itself it waits while the plane
        gives signs of life."""
        while True:
            left = deadline - time.monotonic()
            try:
                return future.result(min(max(left, 0.0), _LOOK_S))
            except TimeoutError:
                if future.done():
                    continue
            self._loop.check_process()
            if not self._loop.is_alive:
                raise Closed(f"{self.url}: nobody listens for answers any more")
            if left <= 0:
                deadline = math.inf
                with self._lock:
                    refused, events = self._session.stop_waiting(ticket)
                    self._handle(events)
                if refused is not None:
                    return refused

    def _on_message(self, message: FromPlane, _frames: Frames, now: float) -> None:
        with self._lock:
            self._handle(self._session.on_message(message, now))

    def _on_tick(self, now: float) -> None:
        with self._lock:
            self._handle(self._session.on_tick(now))

    def _handle(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Out):
                self._loop.send(event.message, event.frames, self._session.run_id)
            elif isinstance(event, Answered):
                future = self._futures.pop(event.ticket, None)
                if future is not None:
                    future.set_result(event.answer)
            else:
                self._give_up(event.error)

    def _on_end(self, error: BaseException) -> None:
        with self._lock:
            self._closed = self._closed or error
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        lost, self._futures = self._futures, {}
        for future in lost.values():
            future.set_exception(error)

    def _raise_closed(self) -> None:
        if self._server is not None and self._server.failure is not None:
            raise Closed(f"the plane in this process ended: {self._server.failure}") from self._server.failure
        if self._closed is not None:
            raise Closed(str(self._closed))


def _run_of(frame: Buffer) -> str:
    """The run a group's samples belong to, as its frame says."""
    try:
        return read_head(frame).text.get("run", ("",))[0]
    except PenstockError:
        return ""  # the plane will say what is wrong with it


def _error_of(answer: Rejected) -> PenstockError:
    """The plane's error, as it would have been raised there."""
    if answer.kind == "Overloaded":
        return Overloaded(answer.reason, answer.retry_after_s)
    found = getattr(errors, answer.kind, None)
    if isinstance(found, type) and issubclass(found, PenstockError):
        return found(answer.reason)
    return PenstockError(f"{answer.kind}: {answer.reason}")
