"""`Source`, a rank's steps: requests them ahead of time, verifies them, and fills batches while the last one trains.

Three threads take part. The caller's takes and commits steps. The client loop's handles messages and heartbeats. The
filler's reads, verifies and fills steps, so that a slow read never delays a heartbeat. One lock protects the session.
The threads refer to the source weakly: one that is dropped without `close` leaves its session (`collected`).
"""

from __future__ import annotations

import logging
import operator
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Self, overload

import numpy as np

from penstock.arrays import MAX_VERSION, Samples, sample_digests, step_digest
from penstock.client.client_loop import ClientLoop
from penstock.client.collected import close_if_dropped, weakly
from penstock.client.handles import Handle, nowhere
from penstock.client.source_settings import SourceSettings
from penstock.client.storage_reader import Reach, Unreadable
from penstock.errors import Away, Closed, CorruptFrame, InvalidInput, StepAborted, WaitTimeout
from penstock.frames import ANY_SIZE, attach_late, decode, late_digests
from penstock.notebook import html_table
from penstock.packing import BlockPool, MicroBatch, RankPlan, StepOfRank, fill
from penstock.protocol import Arrived, Failed, Frames, FromPlane, Out, Ready, Released, StepDone, StepPicks, seconds_of
from penstock.protocol.rank_session import Event, RankSession
from penstock.transport import ClientTransport

logger = logging.getLogger("penstock.source")
_LOOK_S = 1.0
"""How often a waiting call checks that the client loop is still alive."""
UNCOMMITTED = 8
"""A source warns when more steps than this were taken and not committed."""
_LONG_S = 30.0
"""A source says once what it waits for this long: the groups may come from this very program, further down."""
_FRESH_S = 0.25
"""Time before the end of a wait at which the source asks what the plane waits for, for its error."""
AWAY_S = 60.0
"""How long a rank retries storage that does not answer before it reports the step to the plane."""
_AGAIN_S = 0.5
_LEAVE_S = 2.0
"""How long closing waits until a failure from before first contact is sent."""


class Step(StepOfRank):
    """One rank's micro-batches of one step, verified and filled.

    Iterate over it for the micro-batches. `loss_tokens` is the denominator over all ranks.
    """

    def __init__(
        self,
        number: int,
        digest: str,
        rank_plan: RankPlan,
        batches: list[MicroBatch],
        numbers: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(rank_plan)
        self.number = number
        """Steps are counted from 1."""
        self.digest = digest
        """Digest of the rank's plan and samples: equal digests, equal steps."""
        self.numbers = dict(numbers or {})
        """The plane's metrics up to planning the step: `gen/` what was put since the step before, `buffer/` what was
        held. Empty for a step that was planned before the plane restarted."""
        self._batches = batches

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self._batches)

    @overload
    def __getitem__(self, index: int) -> MicroBatch: ...
    @overload
    def __getitem__(self, index: slice) -> list[MicroBatch]: ...
    def __getitem__(self, index: int | slice) -> MicroBatch | list[MicroBatch]:
        return self._batches[index]

    def _shown(self) -> str:
        return f"{self.number}, {super()._shown()}"


class Source:
    """The steps of one rank, in order. Use it from one thread.

    The next call raises any failure, here or on another rank, as `StepAborted` with the same text on every rank.
    """

    def __init__(self, transport: ClientTransport, settings: SourceSettings, *, handle: Handle | None = None) -> None:
        """`handle` is for pickling: how another process connects to the plane."""
        self.settings, self._handle_of_plane = settings, handle
        self.plane: object = None
        """A plane in this process that it takes steps from. The reference keeps the plane open."""
        self.rank, self.timeouts = settings.rank, settings.timeouts
        self._next = settings.resume_step or 0
        """The step to return next, or 0 until the plane has sent the first one."""
        self._first = self._next
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._reach, self._pool = Reach(), BlockPool()
        self._session = settings.new_session(self._reach.find)
        self._arrived: dict[int, Step] = {}
        self._released: set[int] = set()
        self._has_told = False
        self._asked = self._committed = self._next - 1
        self._error: BaseException | None = None  # the first one stays: every later call raises it
        self._received: SimpleQueue[Arrived | None] = SimpleQueue()
        """Steps to verify and fill. None ends the filler."""
        filling = partial(_fill_all, self._received, weakly(self._receive, _nothing))
        self._filler = threading.Thread(target=filling, name=f"penstock-fill-{self.rank}", daemon=True)
        self._filler.start()
        self._loop = ClientLoop(
            transport,
            on_message=weakly(self._on_message, _nothing),
            on_tick=weakly(self._on_tick, _nothing),
            on_end=weakly(self._on_end, _nothing),
            tick_s=settings.tick_s,
            name=f"source-{self.rank}",
        )
        self._collected = close_if_dropped(self, partial(_leave, self._session, self._loop, self._received))
        with self._lock:
            self._handle(self._session.start(time.monotonic()))
            if self._next:
                self._ask_ahead(self._next)
        self._loop.start()

    def __reduce__(self) -> tuple[Callable[[], Source], tuple[()]]:
        """Pickle it as an address. It arrives as a source of the same rank, which continues after the last step
        committed here. A rank is one process, so close this source."""
        if self._handle_of_plane is None:
            raise nowhere("source")
        resume, had = self._committed + 1 if self._next else None, self.settings
        of_rank = {"rank": had.rank, "world": had.world, "replica": had.replica, "replicas": had.replicas}
        return partial(self._handle_of_plane.source, **of_rank, prefetch=had.prefetch, resume_step=resume), ()

    # -------------------------------------------------------------- the rank's side

    def step(self, number: int | None = None, *, timeout: float | None = None) -> Step:
        """Return the next step. `number`, if given, must be the number of the next step.

        A step is returned once every rank has it and verified it. Waits for generation as long as the plane is alive.
        Raises `WaitTimeout` after `timeout` seconds, and `StepAborted`, the same on every rank, as soon as one rank or
        the plane has failed, or a rank has left.
        """
        self._loop.check_process()
        with self._lock:
            if number is not None and self._next and number != self._next:
                raise _out_of_order(number, self._next)
            self._raise_error()
            if self._next:
                self._ask(self._next)
            self._await_step(timeout)
            want = self._next
            if number is not None and number != want:  # known only now, if the plane chose the first step
                raise _out_of_order(number, want)
            self._next = want + 1
            self._released.discard(want)
            got = self._arrived.pop(want)
            if want - self._committed == UNCOMMITTED + 1:  # `==` warns once, not at every further step
                logger.warning(
                    "rank %d: steps %d to %d were taken and not committed; call source.commit(step) after "
                    "each optimizer step, or a restart serves all of them again",
                    *(self.rank, self._committed + 1, want - 1),
                )
            self._ask_ahead(want + 1)
            return got

    def _await_step(self, timeout: float | None) -> None:
        """Wait until the next step is released. Raises the reason if that cannot happen, or not in time."""
        timeout = seconds_of(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        began = time.monotonic()
        fresh = _FRESH_S if timeout is None else min(_FRESH_S, timeout / 2)
        while not self._is_over and (deadline is None or time.monotonic() < deadline - fresh):
            self._changed.wait(_LOOK_S if deadline is None else min(_LOOK_S, deadline - fresh - time.monotonic()))
            self._check_loop()
            self._tell(began)
        if not self._is_over and timeout is not None and deadline is not None:
            # Ask now what the plane waits for: the error should not quote an answer that is a heartbeat old.
            self._handle(self._session.beat_now(time.monotonic()))
            self._changed.wait_for(lambda: self._is_over, max(deadline - time.monotonic(), 0.0))
        self._raise_error()
        if self._next in self._released:
            return
        if self._is_alone:
            rank = self._session.left
            raise StepAborted(f"step {self._next}: rank {rank}: left before this step", self._next, rank)
        step = f"step {self._next}" if self._next else "the first step"
        raise WaitTimeout(
            f"rank {self.rank}: {step}: not here after {timeout:g} s; waited for: {self._session.waiting_for}"
        )

    def _tell(self, began: float) -> None:
        if not self._has_told and not self._is_over and time.monotonic() - began >= _LONG_S and self.waiting_for:
            self._has_told = True
            step = f"step {self._next}" if self._next else "the first step"
            logger.warning(
                "rank %d: %s waits for %s; step(timeout=SECONDS) limits the wait (said once)",
                *(self.rank, step, self.waiting_for),
            )

    @property
    def _is_over(self) -> bool:
        """Whether the wait for the next step has ended, by success or failure."""
        return self._error is not None or self._next in self._released or self._is_alone

    def steps(self, *, timeout: float | None = None) -> Iterator[Step]:
        """Yield all further steps. Commit each one after its optimizer step."""
        while True:
            yield self.step(timeout=timeout)

    def commit(self, step: Step | int, *, policy_version: int | None = None) -> None:
        """Commit a trained step. `policy_version` publishes the version of the weights it produced.

        Does not wait: a lost message is repeated in the background. After a restart the step number in your checkpoint
        decides: resume with `resume_step` one above it.
        """
        number = _number_of(step, "commit")
        version = None if policy_version is None else _version(policy_version)
        self._loop.check_process()
        with self._lock:
            self._raise_error()
            if number != self._committed + 1 or number >= self._next:
                committed, taken = max(self._committed, 0), max(self._next - 1, 0)
                raise InvalidInput(
                    f"commit of step {number}: the last one committed is {committed}, the last one taken is {taken}; "
                    "commit each step once, in order, after training it"
                )
            self._committed = number
            self._handle(self._session.commit(number, version, time.monotonic()))

    def report(
        self,
        step: Step | int,
        *,
        priorities: Mapping[str, float] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Send new replay priorities of groups and metrics of samples, by id."""
        number = _number_of(step, "report")
        found = _numbers("priorities", priorities), _numbers("metrics", metrics)
        self._loop.check_process()
        with self._lock:
            self._raise_error()
            now = time.monotonic()
            self._handle(self._session.report(number, *found, now))

    def fail(self, reason: str | BaseException) -> None:
        """Report a failure of this rank, so that every rank stops now and not after a time-out."""
        self._loop.check_process()
        reason = reason if isinstance(reason, str) else repr(reason)
        with self._lock:
            step = max(self._next - 1, self._first, 1)  # the one being trained, or the first if none was taken yet
            self._handle(self._session.fail(step, reason, time.monotonic()))

    def __repr__(self) -> str:
        steps = f"next step {self._next or 'not known yet'}, committed {max(self._committed, 0)}"
        return f"Source(rank {self.rank} of {self.settings.world}, {steps}{', closed' if self._error else ''})"

    def _repr_html_(self) -> str:
        return html_table(self, [("waiting for", self.waiting_for or "nothing")])

    @property
    def waiting_for(self) -> str:
        """What the plane waits for, as it reports it."""
        return self._session.waiting_for

    def flush(self, timeout: float | None = 30.0) -> None:
        """Wait until the plane has confirmed every commit. All ranks must have committed."""
        self._loop.check_process()
        timeout = seconds_of(timeout)
        with self._lock:
            done = self._changed.wait_for(lambda: not self._session.uncommitted or self._error is not None, timeout)
            self._raise_error()
            if not done and timeout is not None:
                raise WaitTimeout(
                    f"rank {self.rank}: commits of steps {self._session.uncommitted}: not confirmed after "
                    f"{timeout:g} s; waited for: the other ranks to commit them too"
                )

    def close(self) -> None:
        """Leave the session. Sends pending commits first. Steps taken and not committed will be served again."""
        if not self._loop.is_mine:
            return  # in a forked process there is nothing to close
        self._collected.detach()
        with self._lock:
            self._handle(self._session.leave())
            self._changed.wait_for(lambda: self._session.has_left or self._error is not None, _LEAVE_S)
            if self._error is None:
                self._error = Closed("this source was closed")
            self._changed.notify_all()
        self._received.put(None)
        self._loop.stop()
        self._filler.join(_LEAVE_S)  # it refers to this source, and through it to a plane in this process

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and error is not self._error:
            self.fail(f"{type(error).__name__}: {error}")
        self.close()

    # -------------------------------------------------------------- the client loop's side

    def _on_message(self, message: FromPlane, frames: Frames, now: float) -> None:
        with self._lock:
            events = self._session.on_message(message, frames, now)
            if self._is_alone or self._session.has_left:
                self._changed.notify_all()
        for event in events:
            if isinstance(event, Arrived):  # to the filler: verifying takes too long for this thread
                self._received.put(event)
            else:
                with self._lock:
                    self._handle([event])

    def _on_tick(self, now: float) -> None:
        with self._lock:
            self._handle(self._session.on_tick(now))

    def _on_end(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
            self._changed.notify_all()

    def _receive(self, arrived: Arrived) -> None:
        """Verify a step and fill its micro-batches, on the filler's thread. A failure here must stop every rank before
        it trains."""
        message = arrived.deliver
        try:
            samples, digests = self._read(arrived)
            is_intact = step_digest(message.plan, digests) == message.digest
        except Unreadable as error:
            self._damaged(message.step, error)
            return
        except CorruptFrame:
            is_intact = False
        except BaseException as error:  # noqa: BLE001 - whatever it is, the other ranks must not wait for this one
            self._fail(message.step, f"{type(error).__name__}: {error}")
            return
        if not is_intact:
            logger.warning("step %d: not the bytes that were sent; requesting it again", message.step)
            with self._lock:
                self._handle(self._session.altered(message.step, time.monotonic()))
            return
        try:
            rank_plan = RankPlan.from_bytes(message.plan)
            batches = fill(samples, rank_plan, pool=self._pool)
            step = Step(message.step, message.digest, rank_plan, batches, message.numbers)
        except BaseException as error:  # noqa: BLE001 - the same
            self._fail(message.step, f"{type(error).__name__}: {error}")
            return
        with self._lock:
            self._arrived[message.step] = step
            self._handle(self._session.received(message.step, step.digest, time.monotonic()))

    def _read(self, arrived: Arrived) -> tuple[Samples, list[bytes]]:
        """Call `_samples`, and retry while storage does not answer. Heartbeats continue meanwhile and report that the
        step is being filled. After `AWAY_S` the plane is asked to check it."""
        until = time.monotonic() + AWAY_S
        while True:
            try:
                return self._samples(arrived)
            except Away as error:
                if time.monotonic() > until or self._error is not None:
                    group = StepPicks.from_bytes(arrived.deliver.picks).groups[0].group
                    raise Unreadable(group, str(error)) from None
                logger.warning("step %d: %s; trying again", arrived.deliver.step, error)
            time.sleep(_AGAIN_S)

    def _samples(self, arrived: Arrived) -> tuple[Samples, list[bytes]]:
        """Return the samples of a step and their digests, from its payload or from storage. Raises Unreadable."""
        reader = self._reach.reader
        if reader is None or any(len(frame) for frame in arrived.frames):
            samples = _samples(arrived.frames)
            data = arrived.deliver.picks
            return _with_late(samples, sample_digests(samples), StepPicks.from_bytes(data) if data else _NO_PICKS)
        picks = StepPicks.from_bytes(arrived.deliver.picks)
        samples = reader.samples(picks)
        digests = sample_digests(samples)
        for k, (found, wanted) in enumerate(zip(digests, picks.digests, strict=True)):
            if found != wanted:
                raise Unreadable(picks.group_of(k), "storage returned other bytes than were put")
        return _with_late(samples, digests, picks)

    def _damaged(self, step: int, error: Unreadable) -> None:
        """Report an unreadable group. The plane checks it and then sends the samples, or plans without the group."""
        logger.warning("step %d: %s", step, error)
        with self._lock:
            self._handle(self._session.damaged(step, error.group, error.reason, time.monotonic()))

    def _fail(self, step: int, reason: str) -> None:
        with self._lock:
            self._handle(self._session.fail(step, reason, time.monotonic()))

    def _ask_ahead(self, step: int) -> None:
        for ahead in range(step, step + self.settings.prefetch):
            self._ask(ahead)

    def _begin_at(self, step: int) -> None:
        """Learn the first step from the plane and request it."""
        if self._next == 0:
            self._first = self._next = step
            self._asked = self._committed = step - 1
            self._ask_ahead(step)
            self._ask(step)  # with prefetch 0 the line above requests nothing, and a call to `step` may wait for it
            self._changed.notify_all()

    def _ask(self, step: int) -> None:
        if step > self._asked:
            self._asked = step
            self._handle(self._session.request(step, time.monotonic()))

    def _handle(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Out):
                self._loop.send(event.message, event.frames, self._session.run_id)
            elif isinstance(event, Ready):
                self._begin_at(event.step)
            elif isinstance(event, Failed):
                self._error = self._error or self._loop.explained(event.error)
                self._changed.notify_all()
            elif isinstance(event, Released):
                self._released.add(event.step)
                self._changed.notify_all()
            elif isinstance(event, StepDone):
                self._changed.notify_all()

    @property
    def _is_alone(self) -> bool:
        return self._session.left >= 0

    def _check_loop(self) -> None:
        if not self._loop.is_alive and self._error is None:
            self._error = Closed(f"rank {self.rank}: the source's thread has ended")

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def _fill_all(received: SimpleQueue[Arrived | None], receive: Callable[[Arrived], None]) -> None:
    """Verify and fill steps that arrive. Runs on the filler's thread."""
    while (arrived := received.get()) is not None:
        receive(arrived)
        del arrived  # frees its payload before the next step arrives


def _leave(session: RankSession, loop: ClientLoop, received: SimpleQueue[Arrived | None]) -> None:
    """Close what is left of a source that was garbage-collected. Nothing else uses its session any longer."""
    if not loop.is_mine:
        return
    for event in session.leave():
        if isinstance(event, Out):
            loop.send(event.message, event.frames, session.run_id)
    received.put(None)
    loop.stop()


def _nothing() -> None:
    """Called instead of a method of a source that is gone."""


def _out_of_order(number: object, want: int) -> InvalidInput:
    return InvalidInput(
        f"step({number!r:.60}): the next step is {want}, and steps come in order; for a limit of time write "
        "step(timeout=SECONDS)"
    )


def _number_of(step: object, what: str) -> int:
    if isinstance(step, Step):
        return step.number
    if not isinstance(step, int) or isinstance(step, bool):
        raise InvalidInput(
            f"{what}: {type(step).__name__} {str(step)[:40]!r}; pass the step that source.step() returned"
        )
    return step


def _version(version: object) -> int:
    """Return a version as an int. Integers of numpy and torch are accepted. Raises InvalidInput."""
    try:
        found = operator.index(version)  # type: ignore[arg-type]
    except TypeError:
        found = -1
    if not 0 <= found <= MAX_VERSION:
        raise InvalidInput(f"policy_version: {version!r:.80}; must be a whole number from 0 to 2**53")
    return found


def _numbers(what: str, given: Mapping[str, float] | None) -> dict[str, float]:
    """Return numbers by id, as floats. Those of numpy and torch are accepted. Raises InvalidInput."""
    found: dict[str, float] = {}
    if given is None:
        return found
    if not isinstance(given, Mapping):
        raise InvalidInput(f"report: {what}: a {type(given).__name__}; give a mapping of ids to numbers")
    for name, value in given.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError, OverflowError):
            raise InvalidInput(f"report: {what} of {name!r:.80}: {value!r:.60}; give a number") from None
        if not isinstance(name, str):
            raise InvalidInput(f"report: {what} of {name!r:.80}; give them by id")
    return found


_NO_PICKS = StepPicks(groups=())


def _with_late(samples: Samples, digests: list[bytes], picks: StepPicks) -> tuple[Samples, list[bytes]]:
    """Give samples the values that were attached after their group was put."""
    late = {name: np.frombuffer(data, "<f4") for name, data in picks.late().items()}
    if not late:
        return samples, digests
    if any(len(values) != len(samples) for values in late.values()):
        raise CorruptFrame(f"late values of {len(next(iter(late.values())))} samples for {len(samples)}")
    return attach_late(samples, late), late_digests(digests, late)


def _samples(frames: Frames) -> Samples:
    """Decode the samples of a payload, which is one frame unless it is very large."""
    data = frames[0] if len(frames) == 1 else b"".join(frames)
    return decode(data, limits=ANY_SIZE) if len(data) else Samples.of([])
