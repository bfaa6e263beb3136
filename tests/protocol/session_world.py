"""Both sides of the protocol without a network: ranks, a plane, and a clock that tests move."""

from __future__ import annotations

from collections import deque

from penstock.errors import PenstockError
from penstock.protocol.coordinator import Coordinator
from penstock.protocol.effects import Effect, MemberLeft, Send, StepCommitted
from penstock.protocol.members import Place
from penstock.protocol.message_header import pack_message, read_from_client, read_from_plane
from penstock.protocol.messages import Attach, Attached, Frames, FromClient, FromPlane
from penstock.protocol.rank_session import Arrived, Event, RankSession, Released
from penstock.protocol.retry import Failed, Out
from penstock.protocol.steps import Staged
from penstock.protocol.timeouts import Timeouts

TIMES = Timeouts(heartbeat_s=0.2, peer_s=1.0, delivery_s=3.0, plane_s=5.0, resend_s=0.2)


class Rank:
    """A rank session, and what came of it."""

    def __init__(self, world: World, rank: int, *, life: str = "", step: int = 1) -> None:
        self.world, self.name = world, f"rank{rank}{life}"
        self.rank_session = RankSession(
            run="r", rank=rank, world=world.ranks, step=step, incarnation=self.name, timeouts=TIMES
        )
        self.arrived: list[int] = []
        self.fills = True
        """Whether it acknowledges what arrives at once."""
        self.released: list[int] = []
        self.error: PenstockError | None = None
        self.do(self.rank_session.start(world.now))

    def do(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Out):
                self.world.up.append((self.name, event.message))
            elif isinstance(event, Arrived):
                self.arrived.append(event.deliver.step)
                if self.fills:
                    self.do(self.rank_session.received(event.deliver.step, event.deliver.digest, self.world.now))
            elif isinstance(event, Released):
                self.released.append(event.step)
            elif isinstance(event, Failed):
                self.error = event.error


class World:
    """A coordinator and ranks. Messages arrive at once, in order, unless a test holds them."""

    def __init__(self, ranks: int = 2) -> None:
        self.now, self.ranks, self.epoch = 100.0, ranks, 0
        self.up: deque[tuple[object, FromClient]] = deque()
        self.down: deque[tuple[object, FromPlane, Frames]] = deque()
        self.left: dict[Place, int] = {}
        self.session, self.next_step, self.last_step = 0, 1, 0
        self.cut: set[object] = set()
        """Who is not reached by the plane."""
        self.held: list[tuple[object, FromPlane, Frames]] = []
        """Payloads, and what follows them, on a slow link."""
        self.slow: set[object] = set()
        self.gone = False
        """Whether processes are known to have ended."""
        self.start_plane()
        self.members = [Rank(self, rank) for rank in range(ranks)]
        self.settle()

    def start_plane(self) -> None:
        self.epoch += 1
        self.plane = Coordinator(
            run="r",
            ranks=self.ranks,
            epoch=self.epoch,
            session=self.session,
            next_step=self.next_step,
            last_step=self.last_step,
            left=self.left,
            timeouts=TIMES,
            is_gone=lambda _space, _pid: self.gone,
        )

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self.down.append((effect.peer, effect.message, effect.frames))
            elif isinstance(effect, MemberLeft):
                self.left[effect.rank, effect.replica] = effect.step
            elif isinstance(effect, StepCommitted):
                self.next_step = effect.step + 1
                self.do(self.plane.committed(effect.session, effect.step))

    def settle(self) -> None:
        """Until nobody has anything to say."""
        while self.up or self.down:
            if self.up:
                peer, message = self.up.popleft()
                said = read_from_client(pack_message(message))
                if isinstance(said, Attach):
                    attached = Attached(ticket=0, run_id=bytes(range(16)), run="r", epoch=self.epoch, ranks=self.ranks)
                    self.down.append((peer, attached, ()))
                    continue
                self.do(self.plane.on_message(peer, said, self.now))  # type: ignore[arg-type]
                self.session = self.plane.session
                continue
            to, answer, frames = self.down.popleft()
            if to in self.slow and frames:
                self.held.append((to, answer, frames))
            elif to not in self.cut:
                self.hand_over(to, answer, frames)

    def hand_over(self, to: object, answer: FromPlane, frames: Frames) -> None:
        rank = next(member for member in self.members if member.name == to)
        rank.do(rank.rank_session.on_message(read_from_plane(pack_message(answer)), frames, self.now))

    def stage(self, step: int) -> None:
        self.last_step = step
        frames = [[b"payload"] for _ in range(self.ranks)]
        plans = [b"plan"] * self.ranks
        staged = Staged(step=step, plans=plans, payloads=list(frames), digests=[f"{step}"] * self.ranks)
        self.do(self.plane.stage(staged, self.now))
        self.settle()

    def take(self, step: int) -> None:
        """Every rank asks for a step, and gets it."""
        for member in self.members:
            member.do(member.rank_session.request(step, self.now))
        self.settle()
        self.stage(step)

    def commit(self, rank: int, step: int) -> None:
        self.members[rank].do(self.members[rank].rank_session.commit(step, None, self.now))
        self.settle()

    def leave(self, rank: int) -> None:
        self.members[rank].do(self.members[rank].rank_session.leave())
        self.settle()

    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += 0.05
            for member in self.members:
                member.do(member.rank_session.on_tick(self.now))
            self.do(self.plane.on_tick(self.now))
            self.settle()
