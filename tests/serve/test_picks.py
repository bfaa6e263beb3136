"""What ranks take from keepers is what a plane with the frames would have sent them: plan, order, every value."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.arrays import Samples
from penstock.arrays.digests import sample_digests, step_digest
from penstock.encode import decode
from penstock.keep import MemoryKeeper, Pick
from penstock.pack import Packing
from penstock.send.copies import location_of
from penstock.send.keeper_messages import Enlisted, KeeperAt, Take, Taken
from penstock.send.picks import StepPicks
from penstock.send.roster import Roster
from penstock.send.taking import Say, TakeSession
from penstock.send.timeouts import Timeouts
from penstock.serve.clients.taker import in_order
from penstock.serve.decisions.step_builder import PickBuilder, Place, StepBuilder
from penstock.testing.packing import packings
from tests.keep.test_facts import Groups, facts_of, groups

TERMS = Enlisted(epoch=1, copies=2, is_shared=False, seq_len=64, max_tokens=1, max_bytes=1, max_samples=1)
NAMES = ("a", "b", "c")


class Keepers:
    """Three of them, each with some of the frames; `lacking` are copies that cannot be read any more."""

    def __init__(self, made: Groups, rng: Random) -> None:
        self.keeper = MemoryKeeper()
        self.frames = [ps.encode(samples) for samples in made]
        self.locations = self.keeper.keep(self.frames)
        self.copies = [sorted(rng.sample(NAMES, rng.choice([1, 2]))) for _ in made]
        self.lacking = {(names[0], i) for i, names in enumerate(self.copies) if len(names) > 1 and rng.random() < 0.4}

    def places(self, made: Groups) -> list[Place]:
        where = [location_of((name, i) for name in names) for i, names in enumerate(self.copies)]
        return [Place(samples[0].group, at, len(samples)) for samples, at in zip(made, where, strict=True)]

    def give(self, say: Say) -> tuple[Taken, list[memoryview]]:
        take: Take = say.message
        missing = {k: "damaged" for k, (number, _, _) in enumerate(take.picks) if (say.keeper, number) in self.lacking}
        wanted = [
            Pick(self.locations[number], group, rows)
            for k, (number, group, rows) in enumerate(take.picks)
            if k not in missing
        ]
        return Taken(ticket=take.ticket, missing=tuple(missing.items())), self.keeper.take([wanted])


@settings(max_examples=40)
@given(groups(), packings(), st.randoms(use_true_random=False))
def test_samples_taken_by_picks_are_those_that_a_plane_with_the_frames_would_send(
    made: Groups, packing: Packing, rng: Random
) -> None:
    facts = [facts_of(samples, packing.seq_len) for samples in made]
    keepers, roster = Keepers(made, rng), Roster(TERMS, Timeouts())
    here = StepBuilder(packing, keepers.keeper)
    there = PickBuilder(packing, keepers.keeper, roster=roster)
    planned = here.plan(facts)
    assert there.plan(facts) == planned
    own = [Place(samples[0].group, at, len(samples)) for samples, at in zip(made, keepers.locations, strict=True)]
    sent, picked = here.build(1, planned, own), there.build(1, planned, keepers.places(made))
    assert (picked.plans, picked.digests) == (sent.plans, sent.digests)
    for rank in range(packing.ranks):
        samples = taken(StepPicks.from_frames(picked.payloads[rank]), keepers)
        expected = b"".join(sent.payloads[rank])
        assert samples == (decode(expected) if expected else Samples.of([]))
        assert step_digest(planned.rank_plans[rank], sample_digests(samples)) == planned.digests[rank]


def taken(picks: StepPicks, keepers: Keepers) -> Samples:
    known = [KeeperAt(name=name, node=name, url=f"tcp://{name}") for name in NAMES]
    session = TakeSession(picks, known, node="b", timeouts=Timeouts())
    says = session.start(0.0)
    asked: list[str] = []
    while says:
        say = says.pop(0)
        asked.append(say.keeper)
        answer, payload = keepers.give(say)
        says += session.on_message(answer, payload, 0.0)
    assert session.is_over and not session.missing
    assert len(asked) <= 2 * len(NAMES)
    return in_order(picks, session.parts)


def test_picks_of_a_rank_take_a_few_kilobytes() -> None:
    rng = np.random.default_rng(0)
    made = [
        [ps.Sample(id=f"p{g}/{i}", group=f"p{g}", token_ids=rng.integers(0, 9, 64)) for i in range(16)]
        for g in range(32)
    ]
    packing = Packing(ranks=2, seq_len=64)
    facts = [facts_of(samples) for samples in made]
    builder = PickBuilder(packing, MemoryKeeper(), roster=Roster(TERMS, Timeouts()))
    places = [Place(f"p{g}", f"node-a.3f9c21#{g},node-b.77ab01#{g}", 16) for g in range(32)]
    staged = builder.build(1, builder.plan(facts), places)
    assert max(len(b"".join(payload)) for payload in staged.payloads) < 2500
    assert max(len(own.to_bytes()) for own in facts) < 6000
