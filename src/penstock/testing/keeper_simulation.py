"""Deterministic simulation of a run whose frames are with keepers, on nodes that are lost with all they have.

As `simulation.py`: the real coordinator, roster, engine and log, and the real state machines of keepers, producers and
ranks. Keepers crash and come back on their disks; nodes are lost for good, with their keeper, their producers and their
disk. What was acknowledged must be there as long as one of its keepers' disks is, to the byte; what is not must be
counted as lost.

    python -m penstock.testing.keeper_simulation --seed 17        one seed, with what happened
    python -m penstock.testing.keeper_simulation --seeds 10000    many, until one fails
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Literal

from penstock.send.copies import copies_of
from penstock.send.keeper_messages import KeeperAt
from penstock.send.messages import Frames
from penstock.serve.decisions.log import GroupRow, State
from penstock.serve.process.server import Server
from penstock.serve.process.workers import Inline
from penstock.testing.plain_groups import plain_keeper_pipeline
from penstock.testing.simulated import Process
from penstock.testing.simulated_keepers import KeeperProducer, KeeperRank, SimulatedKeeper
from penstock.testing.simulation import Simulation, run_seeds

_KEEPER_S = 6.0
"""Longer than all faults: only a disk that is lost takes groups with it."""
_COPIES: tuple[Literal[1, 2, 3], ...] = (1, 1, 2, 2, 3)


class KeeperSimulation(Simulation):
    """One run with keepers."""

    def __init__(self, seed: int, *, note: Callable[[str], None] = lambda _: None) -> None:
        super().__init__(seed, pipeline=plain_keeper_pipeline, note=note)
        more = Random(f"keepers of {seed}")  # noqa: S311 - a simulation, not a secret
        self.timeouts = replace(self.timeouts, keeper_s=_KEEPER_S)
        copies: Literal[1, 2, 3] = more.choice(_COPIES)
        self.settings = replace(self.settings, copies=copies, timeouts=self.timeouts)
        self.quota_bytes = more.choice([None, None, 400])
        self.faults = replace(
            self.faults,
            disk_full=self.faults.disk_full * 0.3,
            keeper_crash=more.random() * 0.6 if more.random() < 0.5 else 0.0,
            node_loss=more.random() * 0.6 if more.random() < 0.5 else 0.0,
        )
        self.keepers = [SimulatedKeeper(self, number) for number in range(copies + more.choice([0, 1, 1]))]
        self.lost_disks: set[str] = set()
        """Keepers whose disks are gone for good."""
        self._num_lost = 0
        every = itertools.count()  # what is lost must be made up for
        self.members = [KeeperRank(self, rank) for rank in range(self.ranks)]
        self.members += [
            KeeperProducer(self, number, self.keepers[number % len(self.keepers)].node, every) for number in range(2)
        ]
        if more.random() < 0.3:
            self.members.append(KeeperProducer(self, 2, self.keepers[0].node, iter(range(9)), evaluation=True))
        self.members += self.keepers

    # -------------------------------------------------------------- the plane

    def _new_server(self) -> Server:
        return Server(self.settings, self.log, [self.wire], workers=Inline(), pipeline=plain_keeper_pipeline)

    def find_keeper(self, node: str) -> KeeperAt | None:
        """Whom a producer of a node puts to, as the plane says it; None while that is away."""
        roster = self.server.roster if self.plane.up else None
        told = roster.told_to(node) if roster is not None else ()
        return told[0] if told else None

    def _turn(self) -> None:
        super()._turn()
        engine, before = self.server.engine, self._num_lost
        self._num_lost = engine.counts["groups_lost"]
        if self._num_lost > before:  # steps that need one are planned anew
            first = engine.next_step
            self.oracle.digests = {key: found for key, found in self.oracle.digests.items() if key[0] < first}
            oldest = min(engine.state.oldest_step, first)
            if oldest > self.checkpoint + 1:
                self.note(f"the checkpoint of step {self.checkpoint} is of no use; the trainer takes {oldest - 1}")
                self.checkpoint = oldest - 1

    # -------------------------------------------------------------- the network

    def call(self, sender: Process, url: str, header: bytes, frames: Frames) -> None:
        """Somebody says something to a keeper; at an address where nobody listens any more, nothing happens."""
        peer = sender.peer
        for keeper in self.keepers:
            if keeper.url == url:
                self.travel(partial(self._arrive_at, keeper, keeper.life, peer, header, frames))

    def _arrive_at(self, keeper: SimulatedKeeper, life: int, peer: str, header: bytes, frames: Frames) -> None:
        keeper.hears(partial(keeper.listen, peer, header, frames), life)

    def answer(self, _keeper: SimulatedKeeper, peer: object, header: bytes, frames: Frames) -> None:
        self.travel(lambda: self.deliver(peer, header, frames))

    # -------------------------------------------------------------- trouble

    def _trouble(self, process: Process) -> None:
        super()._trouble(process)
        if not isinstance(process, SimulatedKeeper) or not process.up:
            return
        if self.happens(self.faults.keeper_crash * 0.2):
            self.note(f"{process.name} crashes")
            process.crash()
        elif self.happens(self.faults.node_loss * 0.2):
            self.lose_node(process)

    def lose_node(self, keeper: SimulatedKeeper) -> None:
        gone = keeper.lose_disk()
        self.lost_disks.add(gone)
        self.note(f"{keeper.node} is lost, with keeper {gone}")
        keeper.crash()
        for member in self.members:
            if isinstance(member, KeeperProducer) and member.node == keeper.node and member.up:
                member.crash()

    # -------------------------------------------------------------- the end

    def _check_groups(self) -> None:
        """Acknowledged, and one of its disks is left: there, to the byte, or trained once. Else counted as lost."""
        check = self.oracle.check
        rows = {row.id: row for row in self.log.groups()}
        missing = self.oracle.acked - rows.keys()
        check(not missing, f"acknowledged and lost: {missing}")
        state = self.server.engine.state
        for name, row in rows.items():
            if row.state is State.DROPPED and row.reason == "lost":
                check(self._is_lost(name), f"group {name} was given up, and one of its disks is left")
            elif row.id in state.by_id and row.state is State.HELD:
                self._check_kept(row)
        trained = [group for step in range(1, self.last + 1) for group in self._groups_of(step)]
        if self.is_queue:
            check(len(trained) == len(set(trained)), f"trained twice: {sorted(trained)}")
        self._check_ledger(rows)

    def _check_ledger(self, rows: dict[str, GroupRow]) -> None:
        ledger = self.server.engine.ledger
        lost = sum(row.samples for row in rows.values() if row.state is State.DROPPED and row.reason == "lost")
        unwritten = ledger.dropped["lost"] - lost
        self.oracle.check(unwritten >= 0, f"{lost} samples are written down as lost, counted are {ledger.dropped}")

    def _is_lost(self, group: str) -> bool:
        return all(name in self.lost_disks for name, _ in copies_of(self.log.placed[group]))

    def _check_kept(self, row: GroupRow) -> None:
        disks = {keeper.disk.name: keeper.disk for keeper in self.keepers}
        left = [(name, number) for name, number in copies_of(row.location) if name not in self.lost_disks]
        for name, number in left:
            found = disks[name].frames.get(number)
            self.oracle.check(
                found is not None and found[0] == row.id, f"group {row.id}: keeper {name} has not its frame {number}"
            )


def main(argv: list[str] | None = None) -> int:
    return run_seeds(KeeperSimulation, argv)


if __name__ == "__main__":
    sys.exit(main())
