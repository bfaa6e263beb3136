"""The simulation of a run whose producers write to storage, and whose ranks read it, while storage and log fail too.

Everything of `simulation.py`, and: writes that are slow, fail, succeed after their writer died or are seen late;
power cuts that lose what was not synced; outages; damaged frames; commits that may or may not have happened; a plane
that is replaced and wakes up; liars; minutes and weeks that pass for the plane while a producer stands still. Some
runs end with an operator who restores an older log, or an empty one: the plane refuses, or keeps everything.

    python -m tests.support.storage_simulation --seed 17
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from random import Random

from penstock.errors import Conflict, Fenced, PenstockError, StorageError
from penstock.plane.loop import PlaneLoop
from penstock.plane.segments import Outside
from penstock.protocol.messages import Frames
from penstock.storage import check_log
from tests.support.fault_rates import StorageFaults
from tests.support.plain_groups import plain_look
from tests.support.simulated import Crash, KeptLog, Process, Rank, Wire
from tests.support.simulated_direct import PASSING, DirectProducer, DirectRank, Liar
from tests.support.simulated_producer import Producer
from tests.support.simulated_storage import SimulatedStorage, SlowWorkers, StorageView
from tests.support.simulation import Simulation, run_seeds
from tests.support.storage_oracle import StorageOracle

_WEEK_S = 7 * 24 * 3600.0
_AGED_S = 700.0
"""Longer than a segment may be open."""
_RESTORED_S = 3.0
"""How long a plane with a restored log is watched."""


class StorageSimulation(Simulation):
    """One run."""

    storage: SimulatedStorage
    oracle: StorageOracle

    def __init__(self, seed: int, *, note: Callable[[str], None] = lambda _: None) -> None:
        super().__init__(seed, note=note)
        self._draws = draws = Random(f"storage of {seed}")
        self.lies = Random(f"lies of {seed}")
        self.storage = SimulatedStorage(lambda: self.clock.now, draws, StorageFaults.drawn(draws))
        faults = self.storage.faults
        self._loses_steps = bool(faults.full or faults.damage or faults.power_cut or self.faults.disk_full)
        self._loses_steps |= self.settings.retain_steps < self.last
        """Whether a committed step may be freed, or lose a frame. It cannot be served again then, so checkpoints must
        be as new as the last commit."""
        self.log.sync_fails = self._commit_fails
        self.lied: set[str] = set()
        """Groups with false metadata: nothing is promised about them."""
        self.damaged: set[str] = set()
        """Groups whose frames were altered, or had not come to disk when the power was cut."""
        self.told: list[str] = []
        """Locations that were accepted, of any writer."""
        self._skew_s = 0.0
        """What has passed for the plane beyond the simulation's time."""
        self._names = itertools.count(1)
        self._copies: deque[tuple[float, bytes]] = deque(maxlen=60)
        """The log as it was before the last turns of the plane."""
        self._old_copies: list[tuple[float, bytes]] = []
        """The same, every tenth of a second."""
        self._is_restored = False
        self.must_stay: dict[str, bytes] = {}
        """Groups that a restored log does not know: their bytes must stay."""
        self._ending = draws.choice(["", "", "", "restored", "restored", "empty"])
        ends = Random(f"ends of {seed}")
        self._ends_at = ends.choice([0.3 + draws.random(), 0.5 + draws.random() * 3.0])
        self._old_planes: list[tuple[PlaneLoop, Wire]] = []
        self.oracle = StorageOracle(self)
        self.settings = replace(self.settings, retain_steps=draws.choice([0, 1, 64]))
        self._make_members()

    def _make_members(self) -> None:
        draws = self._draws
        numbers = itertools.count()
        for rank in range(self.ranks):
            if draws.random() < 0.7:
                self.members[rank] = DirectRank(self, rank, is_bad=draws.random() < 0.2)
        producers: list[Process] = []
        for number in range(2):
            at_once = draws.choice([1, 1, 4])
            if draws.random() < 0.8:
                is_elsewhere = draws.random() < 0.15
                producers.append(DirectProducer(self, number, numbers, at_once=at_once, is_elsewhere=is_elsewhere))
            else:
                producers.append(Producer(self, number, numbers, at_once=at_once))
        if draws.random() < 0.3:
            producers.append(Liar(self, 3, itertools.count(1000)))
        evaluators = [m for m in self.members if isinstance(m, Producer) and m.name == "producer2"]
        self.members = [*self.members[: self.ranks], *producers, *evaluators]
        for member in self.members:
            if isinstance(member, Producer):
                member.passing = PASSING

    # -------------------------------------------------------------- the run

    def run(self) -> None:
        self.clock.after(0.1, self._watch)
        if self._ending:
            self.clock.after(self._ends_at, self._wait_for_deletion)
        with suppress(_OperatorEnds):
            super().run()

    def _watch(self) -> None:
        """Trouble of storage and log; and what must hold at any time."""
        if self.clock.now < 4.0:
            self._storage_trouble()
        self.oracle.check_storage()
        self.clock.after(0.05, self._watch)

    def _storage_trouble(self) -> None:
        storage, faults, now = self.storage, self.storage.faults, self.clock.now
        each = 0.05
        if storage.happens(faults.away * each):
            self.note("storage is away")
            storage.away_until = now + self._draws.random() * 0.5
        if storage.happens(faults.full * each):
            storage.full_until = now + self._draws.random() * 0.5
        if storage.happens(faults.damage * each) and not self._is_restored:
            self._damage_one()
        if storage.happens(faults.power_cut * each):
            self._cut_power()
        if storage.happens(faults.time_jumps * each):
            self._jump()
        if storage.happens(faults.two_planes * each) and self.plane.up and not self._is_restored:
            self._replace_plane()
        if storage.happens(0.5 * each) and self.faults.plane_crash and self.plane.up:
            self._view.fuse = self._draws.randrange(1, 6)

    def _damage_one(self) -> None:
        rows = [row for row in self.log.groups() if row.location and row.id not in self.lied]
        found = [row for row in rows if self.storage.peek(row.location) is not None]
        if found and len(self.damaged) < 3:
            row = self._draws.choice(found)
            self.note(f"the frame of {row.id} is altered")
            self.damaged.add(row.id)
            if self._draws.random() < 0.5:
                self.storage.replace(row.location, bytes(row.size))
            else:
                self.storage.delete([row.location])

    def _cut_power(self) -> None:
        self.note("the power is cut")
        self.storage.power_cut()
        for member in self.members:
            if isinstance(member, Producer) and member.up:
                member.crash()
        if self.plane.up:
            self._crash_plane()
        self.oracle.check_storage()

    def _jump(self) -> None:
        """Let a pause pass for the plane while a producer stands still."""
        jump = self._draws.choice([_AGED_S, _AGED_S, _WEEK_S])
        if self._is_restored:
            jump = _AGED_S  # what a restored log does not know is kept for a day
        self.note(f"{jump:.0f} s pass for the plane")
        self._skew_s += jump
        for member in self.members:
            if isinstance(member, Producer) and self._draws.random() < 0.5:
                member.paused_until = self.clock.now + self._draws.random()

    def _commit_fails(self) -> bool:
        return self.plane.up and self.storage.happens(self.storage.faults.commit_fails * 0.05)

    def _end_faults(self) -> None:
        super()._end_faults()
        self.storage.end_faults()
        self._view.fuse = None
        self._old_planes.clear()
        self._ending = ""

    def write_s(self) -> float:
        """How long a producer's write takes."""
        return self._draws.random() if self.storage.happens(self.storage.faults.slow) else 0.0

    # -------------------------------------------------------------- planes

    def _start_plane(self) -> None:
        if self.plane.up:
            return
        try:
            self._open_plane()
        except Crash:
            self._start_again("crashes while it starts")
        except (Conflict, Fenced) as error:
            if not self._is_restored:
                self.oracle.check(False, f"the plane refuses its own log: {error}")
            self.note(f"the plane refuses: {error}")
            raise _OperatorEnds from None
        except StorageError as error:
            self._start_again(f"cannot start: {error}")

    def _open_plane(self) -> None:
        self.wire, self._view = Wire(self), StorageView(self.storage, late=True)
        self.log = self.log.successor(resurrects=self._draws.random() < 0.5, guard=partial(check_log, self._view))
        self.log.sync_fails = self._commit_fails
        self.server = self._new_server()
        self.plane.up, self.plane.life = True, self.plane.life + 1
        self.note(f"the plane starts, epoch {self.log.epoch}")
        self._tick_plane(self.plane.life)

    def _start_again(self, why: str) -> None:
        self.note(f"the plane {why}")
        self.clock.after(0.1 + self._draws.random() * 0.3, self._start_plane)

    def _new_server(self) -> PlaneLoop:
        outside = Outside(
            wall=lambda: 1e9 + self.clock.now + self._skew_s,
            steady=lambda: self.clock.now + self._skew_s,
            new_name=lambda: f"{next(self._names):016x}",
        )
        workers = SlowWorkers(lambda: self.clock.now, self._draws, lambda: self.storage.faults.slow)
        return PlaneLoop(
            self.settings,
            self.log,
            [self.wire],
            storage=self._view,
            workers=workers,
            pipeline=self._pipeline,
            outside=outside,
            look=plain_look,
        )

    def _turn(self) -> None:
        if not self._is_restored and self._ending == "restored":
            self._copies.append((self.clock.now, self.log.saved()))
            if not self._old_copies or self.clock.now > self._old_copies[-1][0] + 0.1:
                self._old_copies.append(self._copies[-1])
        try:
            super()._turn()
        except Fenced as error:
            self.oracle.check(False, f"the only plane is fenced: {error}")
        except PenstockError as error:
            self.note(f"the plane ends: {type(error).__name__}: {error}")
            self._crash_plane()

    def _replace_plane(self) -> None:
        """The plane is taken for dead, and another one started; it wakes up later."""
        self.note("the plane is replaced")
        old = (self.server, self.wire)
        self._old_planes.append(old)
        self.plane.stop()
        self.plane.life += 1
        self._start_plane()
        for _ in range(3):
            self.clock.after(self._draws.random(), lambda: self._wake(old))

    def _wake(self, old: tuple[PlaneLoop, Wire]) -> None:
        if old not in self._old_planes:
            return
        try:
            old[0].turn(self.clock.now)
        except (Crash, PenstockError) as error:
            self.note(f"an old plane ends: {type(error).__name__}")
            self._old_planes.remove(old)
        self.oracle.check_storage()

    def arrive(self, peer: str, header: bytes, frames: Frames) -> None:
        if self._old_planes and self._draws.random() < 0.3:
            old = self._draws.choice(self._old_planes)
            old[1].inbox.append((peer, header, frames))
            self._wake(old)
        else:
            super().arrive(peer, header, frames)

    # -------------------------------------------------------------- the trainer

    def trained(self, rank: Rank, step: int) -> None:
        super().trained(rank, step)
        if self._loses_steps:
            everyone = [self._session_steps.get((rank.rank_session.session, r), 0) for r in range(self.ranks)]
            self.checkpoint = max(self.checkpoint, min(everyone))

    # -------------------------------------------------------------- the operator

    def _chosen_copy(self) -> tuple[float, bytes]:
        if self._draws.random() < 0.3:
            return self._draws.choice(self._old_copies)
        copies = list(self._copies)
        if self._draws.random() < 0.7:  # from just before something was deleted
            copies = [one for one in copies if one[0] <= self.storage.deleted_at] or copies
        back = int(self._draws.expovariate(self._draws.choice([2.0, 0.1])))
        return copies[-1 - min(back, len(copies) - 1)]

    def _wait_for_deletion(self) -> None:
        """A log is lost at any time; the worst is right after something was deleted."""
        seen, until = self.storage.deletions, self._draws.choice([0.0, 3.9])

        def look() -> None:
            if self.storage.deletions == seen and self.clock.now < until:
                self.clock.after(0.01, look)
            else:
                self._restore()

        look()

    def _restore(self) -> None:
        """The log is lost, and the operator puts back what there is."""
        if not self._ending:
            return
        for process in [*self.members, self.plane]:
            process.stop()
            process.life += 1
        self._old_planes.clear()
        newest = {row.id: row for row in self.log.groups() if row.location}
        if self._ending == "empty":
            self.note("the operator starts with an empty log")
            self.log = KeptLog()
        else:
            at, data = self._chosen_copy()
            self.note(f"the operator restores the log of {at:.2f} s")
            self.log.put_back(data)
        self.log.now = lambda: self.clock.now
        self._is_restored = True
        known = {row.id for row in self.log.groups()}
        self.must_stay = {
            group: newest[group].digest
            for group in sorted(self.oracle.acked & newest.keys() - known - self.lied - self.damaged)
        }
        self.oracle.acked &= known
        self.oracle.digests.clear()
        self._last_seen = (0, 1)
        self.checkpoint = self.log.meta("next_step", 1) - 1
        self._session_steps = {}
        self.clock.after(_RESTORED_S, self._end_restored)
        self._start_plane()
        for member in self.members:
            self.clock.after(self._draws.random(), member.start)

    def _end_restored(self) -> None:
        self.oracle.check_storage()
        raise _OperatorEnds

    # -------------------------------------------------------------- the end

    def _check_groups(self) -> None:
        self.oracle.check_storage()
        trained = [group for step in range(1, self.last + 1) for group in self._groups_of(step)]
        if self.is_queue:
            twice = sorted({group for group in trained if trained.count(group) > 1})
            self.oracle.check(not twice, f"trained twice: {twice}")

    def _check_end(self) -> None:
        if self._is_restored:
            self.oracle.check_storage()
            return
        super()._check_end()
        self._check_leaks()

    def _check_leaks(self) -> None:
        """Days pass, and another plane starts."""
        for member in self.members:
            member.stop()
            member.may_start = False
        self._crash_plane()  # the next one deletes again what was created too late
        for _ in range(4):
            self._skew_s += _WEEK_S
            until = self.clock.now + 2.0
            while self.clock.now < until:
                self.clock.step()
            with self.server.engine.recorder.transaction():
                pass
        self.oracle.check_leaks()


class _OperatorEnds(Exception):
    """The run ends here."""


def main(argv: list[str] | None = None) -> int:
    return run_seeds(StorageSimulation, argv)


if __name__ == "__main__":
    sys.exit(main())
