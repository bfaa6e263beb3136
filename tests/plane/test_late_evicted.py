"""A tenant is evicted while late columns of its groups are merged into their frames, also with a kill in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from penstock.frames import encode, encode_values
from penstock.plane.late_frames import LateFrames
from penstock.plane.workers import Inline, Job, Then
from penstock.protocol import AttachValues
from penstock.runs import check
from tests.support.engines import DirectEngine
from tests.support.groups import named_group
from tests.support.planes import OpenEngine

TEACHER = "teacher_logprobs"
SETTINGS: dict[str, Any] = {"needs": (TEACHER,), "needs_deadline_s": 600.0, "shares": {"t": 1.0, "u": 1.0}}
GIVEN = {name: {f"{name}/{i}": np.linspace(-0.1, -1, 6, dtype=np.float32) for i in range(2)} for name in ("a", "b")}


class Slow(Inline):
    """Runs no job before `finish`."""

    def submit(self, queue: str, job: Job, then: Then) -> None:
        self._done.append((lambda made: then(made()), job))


def begin(engine: DirectEngine, workers: Slow) -> LateFrames:
    """Let values arrive for a group of tenant t and one of u. Nothing is merged yet."""
    frame, frames = encode_values(TEACHER, GIVEN), LateFrames(engine, workers, lambda _: None)
    message = AttachValues(
        ticket=1, column=TEACHER, values={}, groups=tuple(GIVEN), digest=xxhash.xxh3_128_digest(frame)
    )
    frames.offer("ticket", message, [frame], "judge")
    return frames


def decide(engine: DirectEngine, frames: LateFrames) -> tuple[int, int, int]:
    (found,) = engine.late.flush()
    assert found.error is None and frames.settled(found)
    engine.segments.tidy([])
    return found.new, found.known, found.late


@pytest.mark.parametrize("when", ["before the deletion", "before the merge", "after the merge", "after the attach"])
@pytest.mark.parametrize("killed", ["not", "then", "before"])
def test_an_eviction_during_a_merge_drops_its_groups_and_attaches_to_the_others(
    open_engine: OpenEngine, tmp_path: Path, when: str, killed: str
) -> None:
    def reopened(engine: DirectEngine) -> DirectEngine:
        engine.log.close()  # nothing else is written: as after SIGKILL
        return open_engine(tmp_path, **SETTINGS)

    engine = open_engine(tmp_path, **SETTINGS)
    for name, run in (("a", "t"), ("b", "u")):
        samples = [sample.replace(mode="opd", run=run) for sample in named_group(name)]
        assert engine.put(name, name, encode(samples)) is None
    assert all(outcome.error is None for outcome in engine.flush())
    frames = begin(engine, workers := Slow())
    if not when.startswith("before"):
        workers.finish()
    attached = decide(engine, frames) if when == "after the attach" else (0, 0, 0)
    if killed == "before":
        engine = reopened(engine)
    engine.evict("t", "over budget")
    if when == "before the merge":
        with engine.recorder.transaction():
            """The next decision: it deletes the frame that the merge begins with."""
    if killed == "then":
        engine = reopened(engine)
    if killed != "not":
        frames = begin(engine, workers := Slow())  # the judge sends its values again
    if killed != "not" or when != "after the attach":
        workers.finish()
        attached = decide(engine, frames)
        assert attached == ((0, 2, 2) if when == "after the attach" else (2, 0, 2))
    assert dict(engine.ledger.dropped) == {"evicted": 2}
    assert (engine.ledger.waiting, engine.ledger.held) == (0, 2)
    live = engine.state.rows[engine.state.by_id["b"]].location
    engine.close()  # frees what the last decision left
    assert list(engine.log.locations()) == [live] and not engine.state.late.tables.total()
    engine.log.close()
    report = check(tmp_path)
    assert (report.ok, report.frames, report.conflicts, report.broken) == (True, 1, [], [])
    again = open_engine(tmp_path, **SETTINGS)
    assert again.ledger == engine.ledger
    assert again.state.rows[again.state.by_id["b"]].location == live
