"""Each rule of storage is broken once, in the real code, and the simulation must find it.

For each broken rule there is a seed that finds it; the same seed passes while the rule is kept. To look for others:

    python tests/storage/test_rules_broken.py RULE 500

That the marker moves *before* a deletion is shown by the small model (`model.py`, rule "order"): here a crash between
the two and a log restored from just before it hardly ever meet.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from penstock.errors import InvalidInput
from penstock.log import Log
from penstock.plane import engine as engine_module
from penstock.plane.acceptance import Acceptance
from penstock.plane.loop import PlaneLoop
from penstock.plane.pipeline import Pipeline
from penstock.plane.segments import Sealed, Segments, _overlaps, _Segment
from penstock.protocol.messages import Put
from penstock.storage import Writer, parse_location
from penstock.storage.interface import Pieces
from tests.support import storage_simulation
from tests.support.oracle import Violated
from tests.support.storage_simulation import StorageSimulation

pytestmark = pytest.mark.deep

Broken = Callable[[pytest.MonkeyPatch], None]
RULES: dict[str, Broken] = {}


def rule(broken: Broken) -> Broken:
    RULES[broken.__name__] = broken
    return broken


@rule
def accept_from_a_sealed_segment(patch: pytest.MonkeyPatch) -> None:
    def expect(self: Segments, location: str, writer: str) -> bool:
        at = parse_location(location)
        one = self._all.get(at.segment)
        if one is None or _overlaps(one.rejected, at):
            raise Sealed("unknown here")
        if one.row.writer != writer or _overlaps(one.taken, at):
            raise InvalidInput("not theirs")
        self._expect(one, at)
        return not one.verified

    patch.setattr(Segments, "expect", expect)


@rule
def free_what_is_not_accepted_in_an_unsealed_segment(patch: pytest.MonkeyPatch) -> None:
    def look_for_empty(self: Segments) -> None:
        for name in list(self._all):
            one = self._all[name]
            if not one.live and not one.is_freed and one.row.writer != "plane":
                one.is_freed = True
                self._to_free.append(name)

    patch.setattr(Segments, "_look_for_empty", look_for_empty)


@rule
def a_repeated_put_frees_the_accepted_location(patch: pytest.MonkeyPatch) -> None:
    def free_repeat(self: Pipeline, put: Put, writer: str) -> None:
        self._engine.segments.free([put.location])

    patch.setattr(Pipeline, "_free_repeat", free_repeat)


@rule
def delete_unknown_segments_at_start(patch: pytest.MonkeyPatch) -> None:
    report = Segments._report

    def and_free(self: Segments, found: dict[str, int]) -> None:
        report(self, found)
        self._to_free += self.unregistered
        self.unregistered = []

    patch.setattr(Segments, "_report", and_free)


@rule
def delete_before_the_decision_is_in_the_log(patch: pytest.MonkeyPatch) -> None:
    write = Segments.write

    def delete_first(self: Segments, freed: Sequence[str] = ()) -> None:
        write(self, freed)
        self._custody.delete([*self._to_free, *freed], self._log.commits)

    patch.setattr(Segments, "write", delete_first)


@rule
def start_with_any_log(patch: pytest.MonkeyPatch) -> None:
    for module in (engine_module, storage_simulation):
        patch.setattr(module, "check_log", lambda *_args, **_metadata: None)


@rule
def an_old_plane_may_commit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Log, "check_epoch", lambda _self: None)
    patch.setattr(PlaneLoop, "_check_owner", lambda *_: None)


@rule
def free_what_earlier_epochs_left_at_once(patch: pytest.MonkeyPatch) -> None:
    def is_known(self: Segments, one: _Segment, now: float) -> bool:
        return True

    patch.setattr(Segments, "_is_known", is_known)


@rule
def use_a_location_twice(patch: pytest.MonkeyPatch) -> None:
    expect = Segments.expect

    def forgetful(self: Segments, location: str, writer: str) -> bool:
        one = self._all.get(parse_location(location).segment)
        if one is not None:
            one.taken.clear()
        return expect(self, location, writer)

    def settle(self: Segments, location: str, *, accepted: bool) -> None:
        at = parse_location(location)
        one = self._all.get(at.segment)
        if one is not None:
            one.pending -= 1
            one.live += accepted

    patch.setattr(Segments, "expect", forgetful)
    patch.setattr(Segments, "settle", settle)


@rule
def a_rejected_location_may_be_put_again(patch: pytest.MonkeyPatch) -> None:
    def reject(self: Segments, location: str) -> None:
        self.settle(location, accepted=False)
        self.free([location])

    patch.setattr(Segments, "reject", reject)


@rule
def free_frames_after_a_failed_commit(patch: pytest.MonkeyPatch) -> None:
    flush = Acceptance.flush

    def and_free(self: Acceptance) -> Any:
        there = {group.id: group.location for group in self._arrivals.ready}
        found = flush(self)
        segments = self._recorder.segments
        for name, location in there.items():
            if self._recorder.log.digest_of(name) is None:
                segments._custody.delete([location], self._recorder.log.commits)
        return found

    patch.setattr(Acceptance, "flush", and_free)


@rule
def accept_a_new_segment_without_reading_it(patch: pytest.MonkeyPatch) -> None:
    expect = Segments.expect

    def blind(self: Segments, location: str, writer: str) -> bool:
        expect(self, location, writer)
        return False

    patch.setattr(Segments, "expect", blind)


@rule
def go_on_in_a_segment_after_a_failed_sync(patch: pytest.MonkeyPatch) -> None:
    def write(self: Writer, frames: Sequence[Pieces]) -> list[str]:
        return self._segment().append(frames)

    patch.setattr(Writer, "write", write)


@rule
def forget_segments_that_were_not_there(patch: pytest.MonkeyPatch) -> None:
    """A writer that stood still creates its segment after it was freed."""

    def delete(self: Segments, names: Sequence[str], op: int) -> tuple[list[str], dict[str, int]]:
        self._custody.delete(names, op)
        return list(names), self._storage.segments()

    patch.setattr(Segments, "delete", delete)


FINDS = {
    "accept_from_a_sealed_segment": 8,
    "free_what_is_not_accepted_in_an_unsealed_segment": 0,
    "a_repeated_put_frees_the_accepted_location": 1,
    "delete_unknown_segments_at_start": 407,
    "delete_before_the_decision_is_in_the_log": 5,
    "start_with_any_log": 15,
    "an_old_plane_may_commit": 35,
    "free_what_earlier_epochs_left_at_once": 65,
    "use_a_location_twice": 1,
    "a_rejected_location_may_be_put_again": 80,
    "free_frames_after_a_failed_commit": 463,
    "accept_a_new_segment_without_reading_it": 14,
    "go_on_in_a_segment_after_a_failed_sync": 13,
    "forget_segments_that_were_not_there": 148,
}
"""For each rule the first seed that found it broken. If a change of the code made it another one, all 500 are tried."""


@pytest.mark.parametrize("name", RULES)
def test_a_broken_rule_is_found(name: str) -> None:
    seeds = [FINDS[name], *range(500)]
    seed = next((seed for seed in seeds if isinstance(find(name, seed), Violated)), None)
    assert seed is not None
    StorageSimulation(seed).run()  # while the rule is kept


def find(name: str, seed: int) -> BaseException | None:
    """What the simulation says of a broken rule."""
    with pytest.MonkeyPatch.context() as patch:
        RULES[name](patch)
        try:
            StorageSimulation(seed).run()
        except Exception as error:  # noqa: BLE001 - a rule that is broken may end in anything
            return error
    return None


def main(argv: Sequence[str]) -> None:
    logging.disable(logging.CRITICAL)
    most = int(argv[1]) if len(argv) > 1 else 500
    for name in [argv[0]] if argv and argv[0] != "all" else RULES:
        found = next((error for seed in range(most) if isinstance(error := find(name, seed), Violated)), "not found")
        print(f"{name}: {found}"[:300])


if __name__ == "__main__":
    main(sys.argv[1:])
