"""Watches a simulated storage from outside: acknowledged groups are there, and dead bytes are freed."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import xxhash

from penstock.log import GroupRow, State
from penstock.plane.segments import OWN
from penstock.storage import parse_location
from tests.support.oracle import Oracle

if TYPE_CHECKING:
    from tests.support.simulated import Rank
    from tests.support.storage_simulation import StorageSimulation


class StorageOracle(Oracle):
    """Knows what must hold at any time, and what at the end."""

    _world: StorageSimulation

    def returned(self, rank: Rank, step: int, digest: str) -> None:
        if self._world.damaged or self._world.lied:  # a step that is served again may lack what was damaged
            self.digests.pop((step, rank.rank), None)
        super().returned(rank, step, digest)

    def check_storage(self) -> None:
        """Every group that the log holds is in storage as it was sent, and everything acknowledged is in the log."""
        world = self._world
        if not world.plane.up:
            return  # what the log holds is known when a plane has opened it
        rows = {row.id: row for row in world.log.groups()}
        self._check_places([row for row in rows.values() if row.location])
        lost = self.acked - rows.keys()
        self.check(not lost, f"acknowledged, and not in the log: {sorted(lost)}")
        for group in self.acked - world.lied - world.damaged:
            row = rows[group]
            is_dropped = row.state is State.DROPPED and row.reason != "lost"
            may_go = row.state in (State.COMMITTED, State.EVALUATION) or is_dropped
            self.check(bool(row.location) or may_go, f"{group} is {row.state.name} {row.reason} and has no frame")
        if world.must_stay:
            there = {xxhash.xxh3_128_digest(frame) for frame in world.storage.all_frames()}
            gone = [group for group, digest in world.must_stay.items() if digest not in there]
            self.check(not gone, f"acknowledged, not in the log that was restored, and deleted: {gone}")

    def _check_places(self, rows: list[GroupRow]) -> None:
        """No two groups share bytes, and each has its own."""
        places = sorted(
            (at.segment, at.offset, at.end, row.id) for row in rows for at in [parse_location(row.location)]
        )
        for (segment, _, end, one), (other_segment, start, _, other) in itertools.pairwise(places):
            self.check(segment != other_segment or end <= start, f"{one} and {other} overlap in segment {segment}")
        for row in rows:
            self._check_bytes(row)

    def _check_bytes(self, row: GroupRow) -> None:
        world = self._world
        if row.id in world.lied or row.id in world.damaged:
            return
        frame = world.storage.peek(row.location)
        self.check(frame is not None, f"the log holds {row.id}, and its bytes at {row.location} are gone")
        assert frame is not None
        self.check(xxhash.xxh3_128_digest(frame) == row.digest, f"{row.id}: other bytes at {row.location}")
        world.told.append(row.location)
        del world.told[:-20]

    def check_leaks(self) -> None:
        """Only segments that hold a group, or that the plane writes, are left."""
        world = self._world
        held = {parse_location(row.location).segment for row in world.log.groups() if row.location}
        rows = {row.name: row for row in world.log.segments()}
        unregistered = world.server.engine.segments.unregistered
        self.check(not unregistered, f"unregistered segments: {unregistered}")
        for name in world.storage.segments():
            row = rows.get(name)
            self.check(row is not None, f"segment {name} is in storage, and the log does not know it")
            assert row is not None
            is_open = row.writer == OWN and not row.sealed_at
            self.check(name in held or is_open, f"segment {name} of {row.writer} holds no group and is not freed")
