"""Keepers, and those who talk to them, as parts of a simulated run: the real state machines, no disks, no threads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from penstock.arrays.digests import step_digest
from penstock.errors import DiskFull, PenstockError, PlaneLost
from penstock.send.carrier import Peer
from penstock.send.keeper_events import (
    CheckFrame,
    Event,
    ForgetNumbers,
    Joined,
    KeepFrame,
    TakeFrame,
    ToClient,
    ToPeer,
    ToPlane,
)
from penstock.send.keeper_messages import Copied, Enlist, KeeperAt, Taken, Taking
from penstock.send.keeper_protocol import KeeperProtocol
from penstock.send.keeper_session import KeeperSession
from penstock.send.message_header import pack_message, read_from_client, read_from_plane, run_of
from penstock.send.messages import Buffer, Frames, FromClient, Rejected
from penstock.send.picks import StepPicks
from penstock.send.producer import Answered, ProducerSession
from penstock.send.rank_session import Arrived
from penstock.send.taking import Say, TakeSession
from penstock.serve.decisions.evaluations import EvalFacts
from penstock.testing.plain_groups import plain_facts
from penstock.testing.simulated import Process, Producer, Rank

if TYPE_CHECKING:
    from penstock.testing.keeper_simulation import KeeperSimulation


class SimulatedDisk:
    """The frames of one node: they outlive the keeper's process, and go with the node."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.last = self.life = 0
        self.frames: dict[int, tuple[str, bytes]] = {}
        """Number -> (group, frame)."""

    def keep(self, group: str, frame: Buffer) -> int:
        self.last += 1
        self.frames[self.last] = (group, bytes(frame))
        return self.last

    @property
    def numbers(self) -> list[int]:
        return list(self.frames)

    @property
    def num_bytes(self) -> int:
        return sum(len(frame) for _, frame in self.frames.values())

    def __len__(self) -> int:
        return len(self.frames)


class SimulatedKeeper(Process):
    """A keeper: its process may crash, and its node may be lost with all that is on it."""

    def __init__(self, world: KeeperSimulation, number: int) -> None:
        super().__init__(world, f"keeper{number}")
        self.cluster, self.node, self._count = world, f"node{number}", 0
        self.disk = self._new_disk()
        self.session: KeeperSession

    def _new_disk(self) -> SimulatedDisk:
        self._count += 1
        return SimulatedDisk(f"{self.node}.{self._count}")

    @property
    def url(self) -> str:
        return f"simulated://{self.peer}"

    def start(self) -> None:
        self.up, self.life = True, self.life + 1
        self.disk.life += 1
        about = Enlist(
            name=self.disk.name,
            node=self.node,
            url=self.url,
            key=b"",
            incarnation=self.peer,
            last=0,
            life=self.disk.life,
            quota_bytes=self.cluster.quota_bytes,
        )
        self.protocol = KeeperProtocol(about, self.disk, timeouts=self.world.timeouts)
        self.session = self.protocol.session
        self.do(self.protocol.start(self.world.clock.now))
        self.tick()

    def tick(self) -> None:
        life = self.life

        def look() -> None:
            if self.life == life:
                self.do(self.protocol.on_tick(self.world.clock.now))
                self.world.clock.after(self.world.timeouts.resend_s / 2, lambda: self.hears(look))

        self.hears(look)

    # -------------------------------------------------------------- messages

    def receive(self, header: bytes, frames: Frames) -> None:
        """From the plane, or an answer of a peer."""
        message, now = read_from_plane(header), self.world.clock.now
        if isinstance(message, Copied):
            self.do(self.protocol.on_peer(message, now))
        else:
            self.do(self.protocol.on_plane(message, frames, now))
            assert self.session.failure is None, self.session.failure

    def listen(self, peer: Peer, header: bytes, frames: Frames) -> None:
        """From somebody who connected here."""
        message, run_id, now = read_from_client(header), run_of(header), self.world.clock.now
        self.do(self.protocol.on_client(peer, message, frames, now, run_id=run_id, is_keeper=True))

    # -------------------------------------------------------------- events

    def do(self, events: Iterable[Event]) -> None:
        for event in events:
            if not self.up:
                return
            if isinstance(event, ToClient):
                answer = pack_message(event.message, self.session.run_id)
                self.cluster.answer(self, event.peer, answer, event.frames)
            elif isinstance(event, ToPlane):
                self.say(event.message, event.frames, self.session.run_id)
            elif isinstance(event, ToPeer):
                at = next((at for at in self.session.peers if at.name == event.name), None)
                if at is not None:
                    self.cluster.call(self, at.url, pack_message(event.message, self.session.run_id), event.frames)
            elif isinstance(event, ForgetNumbers):
                for number in event.numbers:
                    self.disk.frames.pop(number, None)
            elif not isinstance(event, Joined):
                self._work(event)

    def _work(self, event: CheckFrame | KeepFrame | TakeFrame) -> None:
        """Done after a while, unless the process is gone by then."""
        life = self.life

        def done() -> None:
            if self.life != life:
                return
            if isinstance(event, CheckFrame):
                self._check(event)
            elif isinstance(event, KeepFrame):
                self._keep(event)
            else:
                self._take(event)

        self.world.clock.after(self.world.rng.random() * 0.01, lambda: self.hears(done))

    def _check(self, asked: CheckFrame) -> None:
        shown = EvalFacts().to_bytes() if asked.is_evaluation else b""
        facts = plain_facts(asked.group, asked.frame).to_bytes()
        self.do(self.protocol.puts.checked(asked.work, facts, shown, self.world.clock.now))

    def _keep(self, asked: KeepFrame) -> None:
        full = self.world.happens(self.world.faults.disk_full)
        found = DiskFull("simulated: no room") if full else self.disk.keep(asked.group, asked.frame)
        self.do(self.protocol.kept(asked, found, self.world.clock.now))

    def _take(self, asked: TakeFrame) -> None:
        given, missing, damaged = [], {}, []
        for i, (number, group, _) in enumerate(asked.picks):
            known = self.disk.frames.get(number)
            if known is None or known[0] != group:
                missing[i] = f"no frame {number}"
                damaged.append(number)
            else:
                given.append(known[1])
        frames = [msgspec.msgpack.encode(given)]
        self.do(self.protocol.taken(asked, frames, missing, damaged, self.world.clock.now))

    # -------------------------------------------------------------- trouble

    def crash(self) -> None:
        self.stop()
        self.world.clock.after(0.05 + self.world.rng.random(), self.start)

    def lose_disk(self) -> str:
        """The node is lost for good: what comes back in its place is another keeper. The name of the one that went."""
        gone, self.disk = self.disk.name, self._new_disk()
        return gone


class KeeperProducer(Producer):
    """Puts to its node's keeper, or to another one while that is away."""

    def __init__(
        self, world: KeeperSimulation, number: int, node: str, groups: Iterator[int], *, evaluation: bool = False
    ) -> None:
        super().__init__(world, number, groups, evaluation=evaluation)
        self.cluster, self.node = world, node
        self._at: KeeperAt | None = None

    def start(self) -> None:
        self._at = None
        super().start()

    def _new_session(self) -> ProducerSession:
        timeouts = self.world.timeouts
        return ProducerSession(run="simulated", asks_first=True, timeouts=replace(timeouts, plane_s=timeouts.peer_s))

    def say(self, message: FromClient, frames: Frames, run_id: bytes) -> None:
        if self._at is None:
            self._at = self.cluster.find_keeper(self.node)
        if self._at is not None:
            self.cluster.call(self, self._at.url, pack_message(message, run_id), frames)

    def answered(self, event: Answered) -> None:
        if isinstance(event.answer, Rejected) and event.answer.kind == "PlaneLost":
            self.again()
        else:
            super().answered(event)

    def failed(self, error: PenstockError) -> None:
        """The keeper fell silent: another one, and a line of its own."""
        assert isinstance(error, PlaneLost), error
        self.up = False
        self.start()


class KeeperRank(Rank):
    """Takes its samples from keepers."""

    def __init__(self, world: KeeperSimulation, rank: int) -> None:
        super().__init__(world, rank)
        self.cluster = world
        self._takes: dict[int, tuple[TakeSession, StepPicks, dict[str, str], Arrived]] = {}

    def start(self) -> None:
        self._takes = {}
        super().start()

    def receive(self, header: bytes, frames: Frames) -> None:
        message = read_from_plane(header)
        if isinstance(message, (Taken, Taking)):
            for step in list(self._takes):
                session, _, urls, _ = self._takes[step]
                self._say(session.on_message(message, frames, self.world.clock.now), urls)
                self._look(step)
        else:
            super().receive(header, frames)

    def unpack(self, event: Arrived) -> None:
        step, now = event.deliver.step, self.world.clock.now
        assert event.deliver.keepers is not None
        picks = StepPicks.from_frames(event.frames)
        session = TakeSession(picks, event.deliver.keepers, node=f"node{self.rank}", timeouts=self.world.timeouts)
        urls = {at.name: at.url for at in event.deliver.keepers}
        self._takes[step] = (session, picks, urls, event)
        self._say(session.start(now), urls)
        self._look(step)
        self._tick(step, session, self.life)

    def _tick(self, step: int, session: TakeSession, life: int) -> None:
        def look() -> None:
            if self.life == life and step in self._takes and self._takes[step][0] is session:
                self._say(session.on_tick(self.world.clock.now), self._takes[step][2])
                self._look(step)
                self._tick(step, session, life)

        self.world.clock.after(self.world.timeouts.resend_s / 2, lambda: self.hears(look))

    def _say(self, says: list[Say], urls: dict[str, str]) -> None:
        for say in says:
            self.cluster.call(self, urls[say.keeper], pack_message(say.message, self.rank_session.run_id), ())

    def _look(self, step: int) -> None:
        """Whether all was had, or something cannot be."""
        found = self._takes.get(step)
        if found is None or not found[0].is_over:
            return
        del self._takes[step]
        session, picks, _, event = found
        if session.missing:
            life = self.life

            def again() -> None:
                if self.life == life:
                    self.handle(self.rank_session.altered(step, self.world.clock.now))

            self.world.clock.after(self.world.timeouts.resend_s, lambda: self.hears(again))
            return
        frames: list[bytes] = [b""] * len(picks.groups)
        for part in session.parts:
            for i, frame in zip(part.groups, msgspec.msgpack.decode(part.frame[0], type=list[bytes]), strict=True):
                frames[i] = frame
        digest = step_digest(event.deliver.plan, self.world.digests(frames))
        self.world.oracle.check(digest == event.deliver.digest, f"step {step}: keepers gave other bytes")
        self.fill(step, digest)
