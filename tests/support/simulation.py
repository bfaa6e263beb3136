"""Deterministic simulation of a run: plane, ranks and producers, while everything that can go wrong does.

The real coordinator, rank session, server, engine and log are driven by simulated time over a network that drops,
doubles, delays and reorders; ranks and plane crash at any point, also in the middle of a transaction, or stand still
for a while; the disk fills up. One seed is one run, always the same. Then the faults stop, and the run must finish.

    python -m tests.support.simulation --seed 17        one seed, with what happened
    python -m tests.support.simulation --seeds 10000    many, until one fails
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random

import msgspec

from penstock.log import State
from penstock.packing import Packing
from penstock.plane.engine import Engine
from penstock.plane.loop import PlaneLoop
from penstock.plane.manifest import Manifest
from penstock.plane.outcomes import page
from penstock.plane.pipeline import Pipeline
from penstock.plane.recorder import rebuild
from penstock.plane.settings import PlaneSettings, Replay, Target
from penstock.plane.workers import Inline, Workers
from penstock.protocol.feedback_event import FeedbackEvent
from penstock.protocol.messages import Frames
from penstock.protocol.timeouts import Timeouts
from penstock.replay import Fifo, Prioritized, Uniform
from penstock.storage import MemoryStorage
from tests.support.fault_rates import Faults
from tests.support.oracle import Oracle
from tests.support.oracle import Violated as Violated
from tests.support.plain_groups import plain_digests, plain_pipeline
from tests.support.simulated import Clock, Crash, KeptLog, Process, Rank, Wire
from tests.support.simulated_producer import Producer

TIMEOUTS = Timeouts(heartbeat_s=0.2, peer_s=1.0, delivery_s=3.0, plane_s=5.0, resend_s=0.2)
_FAULTS_END_S = 4.0
_DEADLINE_S = 90.0
_PER_STEP = 2


class Simulation:
    """One run."""

    def __init__(
        self,
        seed: int,
        *,
        pipeline: Callable[[Engine, Workers], Pipeline] = plain_pipeline,
        digests: Callable[[Frames], list[bytes]] = plain_digests,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`pipeline` takes groups in and makes steps; `digests` are those of what a rank was sent."""
        self.seed, self._note = seed, note
        self.rng = rng = Random(seed)
        self.clock = Clock()
        self.timeouts = TIMEOUTS
        self._more = Random(f"fills of {seed}")
        self.faults = replace(Faults.drawn(rng), slow_fill=self._more.choice([0.0, 0.0, 0.0, 0.2]))
        self.ranks = rng.choice([1, 2, 3])
        self.last = rng.choice([3, 6])
        """Steps to train."""
        self.checkpoint = 0
        """The last step whose weights were saved; where a trainer that restarts begins."""
        self.published = 0
        """The version of the weights that generation uses."""
        self.settings = _settings(rng, self.ranks)
        self.is_queue = self.settings.replay.max_times_sampled == 1 and self.settings.replay.max_staleness is None
        self.oracle = Oracle(self)
        self._pipeline, self.digests = pipeline, digests
        self.storage = MemoryStorage()
        self._trained: dict[int, set[int]] = {}
        self._session_steps: dict[tuple[int, int], int] = {}
        self.log = KeptLog()
        self.log.now = lambda: self.clock.now
        self.plane = Process(self, "plane")
        self._last_seen = (0, 1)
        every = iter(range(self.last * _PER_STEP)) if self.is_queue else itertools.count()
        self.members: list[Process] = [Rank(self, rank) for rank in range(self.ranks)]
        self._waits = Random(f"waits of {seed}")
        self._cancels = self._waits.choice([0.0, 0.3])
        at_once = self._waits.choice([1, 1, 6])
        self.members += [Producer(self, number, every, at_once=at_once) for number in range(2)]
        if self._more.random() < 0.3:
            self.members.append(Producer(self, 2, iter(range(9)), evaluation=True))

    # -------------------------------------------------------------- the run

    def run(self) -> None:
        """Until all is trained; raises Violated if anything went wrong, or if it takes too long."""
        self.note(f"{self.faults}, {self.ranks} ranks, {self.last} steps, {self.settings.replay.sampler}")
        self._start_plane()
        for member in self.members:
            self.clock.after(self.rng.random(), member.start)
        self.clock.after(_FAULTS_END_S, self._end_faults)
        for process in [self.plane, *self.members]:
            self._schedule_trouble(process)
        while not self._is_done():
            self.clock.step()
            if self.clock.now > _DEADLINE_S:
                self.oracle.check(False, f"not done: {self._state()}")
        self._check_end()

    def _is_done(self) -> bool:
        if not self.plane.up or self.clock.now <= _FAULTS_END_S:
            return False
        engine = self.server.engine  # a step that is drawn and not written down yet is not in the log
        return engine.next_step > self.last and not engine.state.is_drawing

    def _end_faults(self) -> None:
        self.note("the faults end")
        self.faults = replace(Faults(), delay_s=self.faults.delay_s)
        self.wire.fuse = self.log.fuse = None
        self.log.full_until = -1.0

    def _state(self) -> str:
        if not self.plane.up:
            return "the plane is down"
        c, e = self.server.coordinator, self.server.engine
        ranks = [f"{m.name} {'up' if m.up else 'down'} at {m.next}" for m in self.members if isinstance(m, Rank)]
        return f"{c.phase}, next {e.next_step}, planned {e.last_step}, waiting for {c.waiting_for}; {'; '.join(ranks)}"

    # -------------------------------------------------------------- trouble

    def happens(self, probability: float) -> bool:
        return probability > 0 and self.rng.random() < probability

    def _schedule_trouble(self, process: Process) -> None:
        def look() -> None:
            if self.clock.now < _FAULTS_END_S:
                self._trouble(process)
                self.clock.after(0.2, look)

        self.clock.after(self.rng.random() * 0.2, look)

    def _trouble(self, process: Process) -> None:
        faults = self.faults
        if not process.up:
            return
        if self.happens(faults.pause * 0.2):
            pause = self.rng.choice([0.3, 0.9, 2.0])
            self.note(f"{process.name} stands still for {pause} s")
            process.paused_until = self.clock.now + pause
        if process is self.plane:
            if self.happens(faults.plane_crash * 0.2):
                kind = self.rng.randrange(3)
                if kind == 0:
                    self._crash_plane()
                elif kind == 1:
                    self.wire.fuse = self.rng.randrange(1, 6)
                else:
                    self.log.fuse = self.rng.randrange(0, 4)
            if self.happens(faults.disk_full * 0.2):
                self.note("the disk is full")
                self.log.full_until = self.clock.now + self.rng.random()
        elif isinstance(process, Rank) and self.happens(faults.rank_crash * 0.2):
            leaves = self.rng.random() < 0.5
            self.note(f"{process.name} {'leaves' if leaves else 'crashes'}")
            (process.depart if leaves else process.crash)()
        elif isinstance(process, Producer) and self.happens(faults.producer_crash * 0.2):
            self.note(f"{process.name} crashes")
            process.crash()

    def fill_s(self) -> float:
        """How long a rank needs to fill the step at hand."""
        slow = self._more.random() < self.faults.slow_fill
        return self.timeouts.delivery_s * (1.0 + self._more.random()) if slow else 0.0

    def cancels(self) -> bool:
        """Whether the put at hand will be cancelled."""
        return self.clock.now < _FAULTS_END_S and self._waits.random() < self._cancels

    def cancel_s(self) -> float:
        """How long after it began."""
        return self._waits.choice([0.0, 0.01, 0.2, 0.4]) * (0.5 + self._waits.random())

    # -------------------------------------------------------------- the plane

    def _start_plane(self) -> None:
        self.log.restart()
        self.wire = Wire(self)
        self.server = self._new_server()
        self.plane.up, self.plane.life = True, self.plane.life + 1
        self.note(f"the plane starts, epoch {self.log.epoch}")
        self._tick_plane(self.plane.life)

    def _new_server(self) -> PlaneLoop:
        return PlaneLoop(
            self.settings, self.log, [self.wire], storage=self.storage, workers=Inline(), pipeline=self._pipeline
        )

    def _tick_plane(self, life: int) -> None:
        if self.plane.life == life:
            self.plane.hears(self._turn)
            self.clock.after(self.timeouts.heartbeat_s / 4, lambda: self._tick_plane(life))

    def _turn(self) -> None:
        try:
            self.server.turn(self.clock.now)
        except Crash:
            self._crash_plane()
            return
        ledger, engine = self.server.engine.ledger, self.server.engine
        parts = (ledger.held, ledger.scheduled, ledger.delivered, ledger.committed, engine.held_bytes)
        if not ledger.balanced or min(parts) < 0:
            self.oracle.check(False, f"the ledger does not balance: {ledger}, {engine.held_bytes} bytes")
        self.oracle.waiting(self.server.admission.rooms.tickets)
        session, step = self.log.meta("session", 0), engine.next_step
        back = step < self._last_seen[1] and session == self._last_seen[0]
        self.oracle.check(not back, f"step {step} is next after {self._last_seen[1]}, without a new session")
        self._last_seen = (session, step)

    def _crash_plane(self) -> None:
        self.note("the plane crashes")
        self.plane.stop()
        self.plane.life += 1
        self.clock.after(0.05 + self.rng.random() * 0.5, self._start_plane)

    # -------------------------------------------------------------- the network

    def travel(self, arrive: Callable[[], None]) -> None:
        """A message leaves; it arrives later, twice, or not at all."""
        for _ in range(1 + self.happens(self.faults.duplicate)):
            if not self.happens(self.faults.drop):
                self.clock.after(self.rng.expovariate(1 / self.faults.delay_s), arrive)

    def arrive(self, peer: str, header: bytes, frames: Frames) -> None:
        """A message reaches the plane."""

        def hear() -> None:
            self.wire.inbox.append((peer, header, frames))
            self._turn()

        self.plane.hears(hear)

    def deliver(self, peer: object, header: bytes, frames: Frames) -> None:
        """Deliver a message to a client, if it was not restarted meanwhile."""
        for member in self.members:
            if member.peer == peer:
                if isinstance(member, Producer):
                    self.oracle.asked(peer, header)
                member.hears(partial(member.receive, header, frames))

    # -------------------------------------------------------------- the trainer

    def trained(self, rank: Rank, step: int) -> None:
        """When all ranks of a session have trained a step, the weights may be saved."""
        session = rank.rank_session.session
        steps = self._session_steps
        steps[session, rank.rank] = step
        everyone = [steps.get((session, other), 0) for other in range(self.ranks)]
        if min(everyone) == step:
            self.published = max(self.published, step)
            if step > self.checkpoint and (self.rng.random() < 0.5 or step == self.last):
                self.checkpoint = step

    def note(self, what: str) -> None:
        self._note(f"{self.clock.now:8.3f}  {what}")

    # -------------------------------------------------------------- the end

    def _check_end(self) -> None:
        engine, check = self.server.engine, self.oracle.check
        self._check_groups()
        twin = rebuild(self.log, self.settings.replay, retain_steps=self.settings.retain_steps)
        for name in ("ledger", "held_bytes", "held_tokens", "next_step", "last_step", "policy_version", "oldest_step"):
            mine, theirs = getattr(engine.state, name), getattr(twin, name)
            check(mine == theirs, f"{name} is {mine}, made again from the log {theirs}")
        # A full disk frees the oldest of them.
        evaluated = [row.id for row in self.log.groups_in(State.EVALUATION) if row.location]
        kept = [state.evaluations.kept for state in (engine.state, twin)]
        check(kept[0] == kept[1] == evaluated, f"evaluation groups: {kept}, {evaluated}")
        same = [list(tenant_tables) for tenant_tables in (engine.tenant_tables, twin.tenant_tables)]
        check(same[0] == same[1], "the tables differ from those made again from the log")
        check(
            engine.tenant_tables.shares.owed == twin.tenant_tables.shares.owed,
            "what runs are owed differs after a restart",
        )
        self._check_events()
        for table_name, table in twin.tenant_tables.tables.items():
            if len(table):
                check(
                    twin.draw(1 << 40, 1 << 40, {table_name: 1})
                    == engine.state.draw(1 << 40, 1 << 40, {table_name: 1}),
                    "the next draw differs after a restart",
                )

    def _check_events(self) -> None:
        """Every end of a group is one event, whatever was killed: rewinds take back what was trained."""
        check, log = self.oracle.check, self.log
        with self.server.engine.recorder.transaction():
            pass
        events: list[FeedbackEvent] = []
        while more := page(log, len(events), 7):
            events += more
        check([event.number for event in events] == list(range(1, log.num_events + 1)), "events are missing or doubled")
        trained: dict[int, list[str]] = {}
        for event in events:
            if event.outcome == "rewound":
                trained = {step: groups for step, groups in trained.items() if step < (event.step or 0)}
            elif event.outcome == "trained":
                trained.setdefault(event.step or 0, []).append(event.group)
        wanted = {step: self._groups_of(step) for step in range(1, self.server.engine.next_step)}
        check(trained == wanted, f"trained by the events {trained}, by the log {wanted}")
        for state, outcome in ((State.DROPPED, "dropped"), (State.EVALUATION, "evaluation")):
            told = sorted(event.group for event in events if event.outcome == outcome)
            known = sorted(row.id for row in log.groups_in(state))
            check(told == known, f"{outcome} by the events {told}, by the log {known}")

    def _check_groups(self) -> None:
        """Nothing that was acknowledged is lost, and what was accepted is trained."""
        check = self.oracle.check
        evaluated = {row.id for row in self.log.groups_in(State.EVALUATION)}
        known = {row.id for row in self.log.groups()} - evaluated
        lost = self.oracle.acked - known - evaluated
        check(not lost, f"acknowledged and lost: {lost}")
        trained = [group for step in range(1, self.last + 1) for group in self._groups_of(step)]
        if self.is_queue:
            check(sorted(trained) == sorted(known), f"not each group once: {sorted(trained)}, accepted {sorted(known)}")

    def _groups_of(self, step: int) -> list[str]:
        names = {row.op: row.id for row in self.log.groups()}
        manifest = next(m for s, _, m, _ in self.log.steps() if s == step)
        return [names[op] for op in msgspec.msgpack.decode(manifest, type=Manifest).groups]


def _settings(rng: Random, ranks: int) -> PlaneSettings:
    replay = rng.choice(
        [
            Replay(capacity=64),
            Replay(capacity=64),
            Replay(capacity=8, remover=Fifo(), sampler=Uniform(), max_times_sampled=2),
            Replay(capacity=8, remover=Fifo(), sampler=Prioritized(0.6), max_times_sampled=None),
            Replay(capacity=64, max_staleness=2),
        ]
    )
    max_held_bytes = rng.choice([1 << 20, 60])
    return PlaneSettings(
        packing=Packing(ranks=ranks, seq_len=64),
        target=Target(groups=_PER_STEP),
        run="simulated",
        replay=replay,
        retain_steps=64,
        max_held_bytes=max_held_bytes,
        snapshot_every=rng.choice([1, 1 << 20]),
        shares={"a": 1.0, "b": 2.0} if max_held_bytes > 60 and rng.random() < 0.5 else {},
        timeouts=TIMEOUTS,
    )


def run_seeds(kind: type[Simulation], argv: list[str] | None) -> int:
    """Run simulations as the command line says."""
    parser = argparse.ArgumentParser(description="Simulate runs under faults.")
    parser.add_argument("--seed", type=int, help="one run, with what happened in it")
    parser.add_argument("--seeds", type=int, default=1000, help="number of runs")
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args(argv)
    if arguments.seed is not None:
        kind(arguments.seed, note=lambda line: print(line)).run()
        return 0
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        kind(seed).run()
    return 0


def main(argv: list[str] | None = None) -> int:
    return run_seeds(Simulation, argv)


if __name__ == "__main__":
    sys.exit(main())
