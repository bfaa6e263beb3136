"""What users hold: a plane in this process, or a line to one elsewhere, with the same methods.

`open` gives a `Plane`. With a folder (or "memory:") the plane runs in a thread of this process and may listen for
others as well; with an address it is a line to a plane that `penstock serve` runs.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import msgspec
import xxhash

from penstock import errors
from penstock.arrays import Sample
from penstock.capture import Trajectory
from penstock.convert import Group, grpo, make_group, unique_id
from penstock.convert.advantages import Advantage
from penstock.convert.filters import Filter
from penstock.encode import encode
from penstock.errors import Closed, InvalidInput, Overloaded, PenstockError, PlaneLost
from penstock.send.carrier import ClientCarrier
from penstock.send.messages import (
    BEHIND,
    Accepted,
    Ask,
    Discard,
    Frames,
    FromClient,
    FromPlane,
    Missing,
    Put,
    Rejected,
    SetWeight,
    Status,
    Trace,
)
from penstock.send.timeouts import Timeouts
from penstock.serve.clients.client_loop import ClientLoop
from penstock.serve.clients.source import Source
from penstock.serve.decisions.ledger import Ledger
from penstock.serve.process.server import Server

Connect = Callable[[], ClientCarrier]
_LARGE_S = 3600.0 * 24 * 365


class Plane:
    """Put groups in, take steps out, look at the ledger. Safe to use from many threads."""

    def __init__(
        self,
        connect: Connect,
        *,
        url: str,
        timeouts: Timeouts | None = None,
        server: Server | None = None,
        thread: threading.Thread | None = None,
    ) -> None:
        self.url = url
        """Where it is."""
        self.timeouts = timeouts or Timeouts()
        self._connect, self._server, self._thread = connect, server, thread
        self._tickets = itertools.count(1)
        self._open: dict[int, _Question] = {}
        self._lock = threading.Lock()
        self._heard = time.monotonic()
        self._closed: BaseException | None = None
        self._loop = ClientLoop(
            connect(),
            on_message=self._on_message,
            on_tick=self._on_tick,
            on_end=self._on_end,
            tick_s=min(self.timeouts.resend_s, 0.5),
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
        timeout: float | None = None,
    ) -> GroupBuilder:
        """Collect the rollouts of one prompt; leaving the block puts them, an exception in it cancels them.

        `prompt` is the prompt's name, which comes back as often as it is sampled. `id` is this group's own: made
        unique unless given. A producer that may restart gives it, so that a group it puts twice is recognised.
        """
        name = unique_id(prompt) if id is None else id
        return GroupBuilder(self, prompt, name, policy_version, advantage, tuple(filters), timeout)

    def put(self, group: Group | Sequence[Sample], *, timeout: float | None = None) -> bool:
        """Hand a group over; it is durable when this returns. False if this very group was there already.

        When the plane holds as much as it may, waits up to `timeout` seconds (None: as long as it takes, 0: not at
        all) and then raises `Overloaded`.
        """
        samples: Sequence[Sample] = group.samples if isinstance(group, Group) else group
        if not samples:
            raise InvalidInput("put: no samples; a group has at least one")
        name = group.id if isinstance(group, Group) else samples[0].group
        return self.put_frame(name, encode(samples), timeout=timeout)

    def put_frame(self, group: str, frame: bytes, *, timeout: float | None = None) -> bool:
        """`put` for a group that is encoded already."""
        deadline = time.monotonic() + (_LARGE_S if timeout is None else timeout)
        digest = xxhash.xxh3_128_digest(frame)
        while True:
            answer = self._call(lambda ticket: Put(ticket=ticket, run="", group=group, digest=digest), [frame])
            if isinstance(answer, Accepted):
                return not answer.duplicate
            assert isinstance(answer, Rejected)
            error = _error_of(answer)
            left = deadline - time.monotonic()
            if not isinstance(error, Overloaded) or left <= 0:
                raise error
            time.sleep(min(left, max(answer.retry_after_s, 0.01)))

    def discard(self, reason: str, samples: int) -> None:
        """Count samples that were generated and filtered out before they became a group."""
        self._decide(lambda ticket: Discard(ticket=ticket, reason=reason, samples=samples))

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
        answer = self._call(make, [])
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
        state = self.status() if world is None or resume_step is None else {}
        return Source(
            self._connect(),
            rank=rank,
            world=int(state["ranks"]) if world is None else world,
            replica=replica,
            replicas=replicas,
            resume_step=int(state["next_step"]) if resume_step is None else resume_step,
            prefetch=prefetch,
            timeouts=self.timeouts,
        )

    # -------------------------------------------------------------- onlookers

    def status(self) -> dict[str, Any]:
        """Where everything is: phase, steps, ledger, counts, who waits for whom."""
        answer = self._call(lambda ticket: Ask(ticket=ticket), [])
        assert isinstance(answer, Status)
        found: dict[str, Any] = msgspec.json.decode(answer.text)
        return found

    @property
    def ledger(self) -> Ledger:
        """What became of every sample that was accepted."""
        return Ledger.from_dict(self.status()["ledger"])

    def close(self) -> None:
        """Let go. A plane in this process ends too; what it accepted is in its folder."""
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

    def _call(self, make: Callable[[int], FromClient], frames: Frames) -> FromPlane:
        """Ask, and ask again, until there is an answer or the plane has been silent too long."""
        ticket = next(self._tickets)
        message, future = make(ticket), Future[FromPlane]()
        with self._lock:
            self._raise_closed()
            now = time.monotonic()
            if not self._open:
                self._heard = now
            self._open[ticket] = _Question(message, frames, future, now, self.timeouts.resend_s)
        self._loop.send(message, frames)
        return future.result()

    def _on_message(self, message: FromPlane, _frames: Frames, now: float) -> None:
        self._heard = now
        if isinstance(message, Missing):
            self._send_again(message.put)
            return
        ticket = getattr(message, "ticket", None)
        if ticket is not None:
            with self._lock:
                entry = self._open.pop(ticket, None)
            if entry is not None:
                entry.future.set_result(message)

    def _send_again(self, ticket: int) -> None:
        """The plane did not get a group that somebody still waits for."""
        with self._lock:
            question = self._open.get(ticket)
        if question is not None:
            self._loop.send(question.message, question.frames)

    def _on_tick(self, now: float) -> None:
        with self._lock:
            if not self._open:
                return
            silent = now - self._heard
            late = [question for question in self._open.values() if now - question.sent > question.patience]
            for question in late:
                question.sent, question.patience = now, min(question.patience * 2, self.timeouts.plane_s / 4)
        if silent > self.timeouts.plane_s:
            self._give_up(PlaneLost(f"{self.url}: no answer for {silent:.1f} s; is the plane running?"))
            return
        for question in late:
            for message, frames in question.reminders():
                self._loop.send(message, frames)

    def _on_end(self, error: BaseException) -> None:
        self._closed = self._closed or error
        self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        with self._lock:
            lost, self._open = self._open, {}
        for question in lost.values():
            question.future.set_exception(error)

    def _raise_closed(self) -> None:
        if self._server is not None and self._server.failure is not None:
            raise Closed(f"the plane in this process ended: {self._server.failure}") from self._server.failure
        if self._closed is not None:
            raise Closed(str(self._closed))


@dataclass(slots=True, eq=False)
class _Question:
    """Something asked that was not answered yet."""

    message: FromClient
    frames: Frames
    future: Future[FromPlane]
    sent: float
    patience: float
    """Doubles each time: a large group may be on its way, or wait for a slow disk."""

    def reminders(self) -> list[tuple[FromClient, Frames]]:
        """What to say while there is no answer.

        A group is not sent again before the plane says that it did not come: on a slow link it may still be on its
        way, and a copy behind it would make every later one later still. What goes out is a question that takes the
        group's way and arrives after it, or instead of it; and one for a sign of life.
        """
        put = self.message
        if not isinstance(put, Put):
            return [(put, self.frames)]
        trace = Trace(ticket=put.ticket, group=put.group, digest=put.digest)
        return [(trace, BEHIND), (trace, ())]


class GroupBuilder:
    """Collects the rollouts of one prompt: all of them become the group, or none."""

    def __init__(
        self,
        plane: Plane,
        prompt: str,
        id: str,  # noqa: A002
        policy_version: int | None,
        advantage: Advantage | None,
        filters: tuple[Filter, ...],
        timeout: float | None,
    ) -> None:
        self.prompt, self.id = prompt, id
        self._plane, self._version, self._timeout = plane, policy_version, timeout
        self._advantage, self._filters = advantage, filters
        self._rollouts: list[Trajectory] = []

    def add(self, trajectory: Trajectory) -> None:
        self._rollouts.append(trajectory)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.put()

    def put(self) -> Group:
        """Make the group and hand it over; what filters dropped is counted at the plane."""
        group = make_group(
            self._rollouts,
            id=self.id,
            prompt=self.prompt,
            policy_version=self._version,
            advantage=self._advantage,
            filters=self._filters,
        )
        for reason, count in group.dropped.items():
            self._plane.discard(reason, count)
        if len(group):
            self._plane.put(group, timeout=self._timeout)
        return group


def _error_of(answer: Rejected) -> PenstockError:
    """The plane's error, as it would have been raised there."""
    if answer.kind == "Overloaded":
        return Overloaded(answer.reason, answer.retry_after_s)
    found = getattr(errors, answer.kind, None)
    if isinstance(found, type) and issubclass(found, PenstockError):
        return found(answer.reason)
    return PenstockError(f"{answer.kind}: {answer.reason}")
