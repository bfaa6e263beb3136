"""The parts of a simulated run: a network that loses messages, a log that survives crashes, ranks and producers.

Protocol, engine, books and log are the real ones; threads, sockets, disks and clocks are not there. See
`simulation.py` for what is done with them.
"""

from __future__ import annotations

import copy
import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from penstock.arrays.digests import step_digest
from penstock.errors import DiskFull, PenstockError, StorageError
from penstock.log import GroupRow, Guard, SqliteLog
from penstock.protocol.message_header import pack_message, read_from_plane
from penstock.protocol.messages import Buffer, Frames, FromClient, Peer
from penstock.protocol.rank_session import Arrived, Event, RankSession, Ready, Released, Standing, StepDone
from penstock.protocol.retry import Failed, Out

if TYPE_CHECKING:
    from tests.support.simulation import Simulation


class Crash(BaseException):
    """The process ends here, whatever it was doing."""


class Clock:
    """Simulated time: what is to happen, in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._numbers), act))

    def step(self) -> None:
        """Let the next thing happen."""
        self.now, _, act = heapq.heappop(self._queue)
        act()


class KeptLog(SqliteLog):
    """A log in memory that outlives its plane, and can fail in the middle of a transaction."""

    def __init__(self) -> None:
        super().__init__(None)
        self.full_until = -1.0
        self.fuse: int | None = None
        """Transactions until the plane crashes: odd numbers before they are written, even ones after."""
        self.now: Callable[[], float] = lambda: 0.0
        self.sync_fails: Callable[[], bool] = lambda: False
        self.ghost: bytes | None = None
        """The database with the transaction whose sync failed last; a restart may find it so."""
        self.placed: dict[str, str] = {}
        """Where the frame of each group was kept when it was accepted."""

    def add_groups(self, rows: Sequence[tuple[GroupRow, bytes]]) -> None:
        super().add_groups(rows)
        self.placed |= {row.id: row.location for row, _ in rows}

    def restart(self) -> None:
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")
        self.fuse = None
        self.take_over()

    def successor(self, *, resurrects: bool, guard: Guard) -> KeptLog:
        """The same database as a plane opens that starts now; the one before may wake up and still have its own.
        `resurrects`: a transaction whose sync failed is found on disk."""
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")
        if self.ghost is not None and resurrects:
            self._db.deserialize(self.ghost)
        found = copy.copy(self)
        found.ghost, found.sync_fails, found._guard = None, lambda: False, guard
        found.commits = found.meta("commits", 0)
        found.restart()
        return found

    def saved(self) -> bytes:
        """A copy, as an operator makes one."""
        return bytes(self._db.serialize())

    def put_back(self, copied: bytes) -> None:
        """The operator restores a copy."""
        self._db.deserialize(copied)
        self.ghost = None

    @contextmanager
    def transaction(self) -> Iterator[None]:
        if self.now() < self.full_until:
            raise DiskFull("simulated: no room; nothing was written")
        if self.fuse is not None:
            self.fuse -= 1
        before = self.saved() if self.sync_fails() else None
        with super().transaction():
            yield
            if self.fuse is not None and self.fuse <= 0 and self.fuse % 2:
                raise Crash
        self.ghost = None  # what follows is written over it
        if before is not None:
            self.ghost = self.saved()
            self._db.deserialize(before)
            self.commits -= 1
            raise StorageError("simulated: the sync of a commit failed; it may or may not be on disk")
        if self.fuse is not None and self.fuse <= 0:
            raise Crash


class Wire:
    """The plane's end of the simulated network; it is there while the plane is."""

    poll_s: float | None = None
    url = "simulated:"

    def __init__(self, world: Simulation) -> None:
        self._world = world
        self.inbox: list[tuple[Peer, Buffer, Frames]] = []
        self.fuse: int | None = None
        """Messages until the plane crashes."""

    def pollable(self) -> None:
        return None

    def receive(self) -> list[tuple[Peer, Buffer, Frames]]:
        got, self.inbox = self.inbox, []
        return got

    def send(self, peer: Peer, header: bytes, frames: Frames = ()) -> bool:
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse <= 0:
                raise Crash
        self._world.travel(lambda: self._world.deliver(peer, header, frames))
        return True  # it cannot be told from outside

    def is_writer(self, peer: Peer) -> bool:
        return True

    def forget(self, peer: Peer) -> None:
        pass

    def close(self) -> None:
        pass


class Process:
    """Something that can crash, be paused and be started again."""

    def __init__(self, world: Simulation, name: str) -> None:
        self.world, self.name = world, name
        self.up = False
        self.paused_until = -1.0
        self.life = 0
        """Number of starts. A message for an earlier start is not delivered."""
        self.may_start = True
        """Whether it begins again after a crash."""

    @property
    def peer(self) -> str:
        return f"{self.name}.{self.life}"

    def hears(self, act: Callable[[], None], life: int | None = None) -> None:
        """Do something now, or when the pause is over, unless it has died until then."""
        life = self.life if life is None else life
        if self.world.clock.now < self.paused_until:
            self.world.clock.after(self.paused_until - self.world.clock.now, lambda: self.hears(act, life))
        elif self.up and self.life == life:
            act()

    def say(self, message: FromClient, frames: Frames, run_id: bytes) -> None:
        peer, header = self.peer, pack_message(message, run_id)
        self.world.travel(lambda: self.world.arrive(peer, header, frames))

    def stop(self) -> None:
        self.up = False

    def start(self) -> None:
        """Start."""
        raise NotImplementedError

    def receive(self, header: bytes, frames: Frames) -> None:
        """Handle a message."""
        raise NotImplementedError


class Rank(Process):
    """A trainer's process: asks one step ahead, trains, commits, and restarts when something fails."""

    def __init__(self, world: Simulation, rank: int) -> None:
        super().__init__(world, f"rank{rank}")
        self.rank = rank
        self.can_read = False
        """Whether it reads storage itself."""
        self.next = 0
        self.rank_session: RankSession

    def start(self) -> None:
        if not self.may_start:
            return
        self.up, self.life = True, self.life + 1
        self.next = self.first = self.world.checkpoint + 1
        self.busy = False
        self.arrived: dict[int, str] = {}
        self.released: set[int] = set()
        self.rank_session = self._new_session()
        now = self.world.clock.now
        self.handle([*self.rank_session.start(now), *self.rank_session.request(self.next, now)])
        self.tick()

    def _new_session(self) -> RankSession:
        return RankSession(
            run="simulated",
            rank=self.rank,
            world=self.world.ranks,
            step=self.next,
            incarnation=self.peer,
            timeouts=self.world.timeouts,
            can_read=lambda _attached: self.can_read,
        )

    def tick(self) -> None:
        life = self.life

        def beat() -> None:
            if self.life == life:
                self.handle(self.rank_session.on_tick(self.world.clock.now))
                self.world.clock.after(self.world.timeouts.heartbeat_s / 2, lambda: self.hears(beat))

        self.hears(beat)

    def receive(self, header: bytes, frames: Frames) -> None:
        self.handle(self.rank_session.on_message(read_from_plane(header), frames, self.world.clock.now))

    def handle(self, events: list[Event]) -> None:
        for event in events:
            if not self.up:
                return
            if isinstance(event, Out):
                self.say(event.message, event.frames, self.rank_session.run_id)
            elif isinstance(event, Arrived):
                self.unpack(event)
            elif isinstance(event, Released):
                self.released.add(event.step)
            elif isinstance(event, Failed):
                self.fail(event.error)
            else:
                assert isinstance(event, (Ready, StepDone))
        self.go_on()

    def unpack(self, event: Arrived) -> None:
        step = event.deliver.step
        digest = step_digest(event.deliver.plan, self.world.digests(event.frames))
        assert digest == event.deliver.digest, "the network altered a payload"
        self.fill(step, digest)

    def fill(self, step: int, digest: str) -> None:
        """What came is what was sent: fill it."""
        if self.world.happens(self.world.faults.fill_failure):
            self.handle(self.rank_session.fail(step, "cannot unpack", self.world.clock.now))
            return
        filled, takes_s = partial(self.filled, step, digest, self.life), self.world.fill_s()
        if takes_s:
            self.world.clock.after(takes_s, lambda: self.hears(filled))
        else:
            filled()

    def filled(self, step: int, digest: str, life: int) -> None:
        if self.life != life:
            return
        self.arrived[step] = digest
        self.world.oracle.received(self, step)
        self.handle(self.rank_session.received(step, digest, self.world.clock.now))

    def go_on(self) -> None:
        """Take the next step if it may be trained; leave when all are done."""
        if not self.up or self.busy:
            return
        if self.next > self.world.last:
            if self.rank_session.standing is Standing.READY and self.rank_session.done >= self.world.last:
                self.up = False
                self.say_goodbye()
        elif self.next in self.released:
            step = self.next
            self.world.oracle.returned(self, step, self.arrived.pop(step))
            self.busy, self.next = True, step + 1
            if self.next <= self.world.last:
                self.handle(self.rank_session.request(self.next, self.world.clock.now))
            life = self.life
            self.world.clock.after(self.world.rng.random() * 0.2, lambda: self.hears(lambda: self.trained(step, life)))

    def trained(self, step: int, life: int) -> None:
        if self.life != life:
            return
        self.busy = False
        self.world.trained(self, step)
        now = self.world.clock.now
        if self.world.rng.random() < 0.3:
            groups = {f"g{self.world.rng.randrange(40)}": self.world.rng.random() for _ in range(2)}
            self.handle(self.rank_session.report(step, groups, {"loss": 1.0}, now))
        self.handle(self.rank_session.commit(step, step, now))

    def fail(self, error: PenstockError) -> None:
        self.world.oracle.raised(self, error)
        self.crash()

    def depart(self) -> None:
        """Shut down cleanly, as a trainer that is asked to; another one starts later."""
        self.say_goodbye()
        self.crash()

    def say_goodbye(self) -> None:
        for event in self.rank_session.leave():
            assert isinstance(event, Out)
            self.say(event.message, event.frames, self.rank_session.run_id)

    def crash(self) -> None:
        self.stop()
        self.world.clock.after(0.05 + self.world.rng.random(), self.start)
