"""The feedback stream: every group's end once, in order, resumable, whatever is restarted."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.convert import ZeroVariance
from penstock.errors import Closed, InvalidInput
from penstock.frames import encode
from penstock.protocol import MAX_PAGE, FeedbackEvent
from tests.support.groups import named_group
from tests.support.planes import FAST, OpenPlane

SETTINGS: dict[str, Any] = {
    "ranks": 1,
    "seq_len": 64,
    "groups_per_step": 1,
    "timeouts": FAST,
    "max_staleness": 1,
    "over_length": "drop",
}


def rollout(reward: float, length: int = 2, env: str = "math") -> ps.Trajectory:
    turns = [ps.Turn([1, 2, 3]), ps.Turn([4] * length, logprobs=[-0.5] * length)]
    return ps.Trajectory(turns=turns, reward=reward, env=env)


def train(plane: ps.Plane, steps: int, *, resume: int | None = None, version: int | None = None) -> None:
    with plane.source(0, prefetch=0, resume_step=resume) as source:
        for _ in range(steps):
            source.commit(source.step(timeout=60), policy_version=version)
        source.flush()


def told(events: list[FeedbackEvent]) -> list[tuple[str, str, str, int | None]]:
    return [(event.outcome, event.group, event.reason, event.step) for event in events]


def check_dense(events: list[FeedbackEvent]) -> None:
    assert [event.number for event in events] == list(range(1, len(events) + 1))


def test_every_end_of_a_group_is_an_event_also_after_a_restart(tmp_path: Path) -> None:
    with ps.open(tmp_path / "run", **SETTINGS) as plane:
        assert list(plane.feedback()) == []
        plane.put_many([named_group(name, policy_version=5) for name in "ab"])
        plane.put(named_group("long", tokens=200, policy_version=5))
        plane.put(named_group("eval"), evaluation=True)
        train(plane, 2, version=6)
        plane.put(named_group("old", policy_version=0))
        plane.discard("judge failed", 3)
        events = list(plane.feedback())
    check_dense(events)
    assert told(events) == [
        ("dropped", "long", "over_length", None),
        ("evaluation", "eval", "", None),
        ("trained", "a", "", 1),
        ("trained", "b", "", 2),
        ("dropped", "old", "stale", None),
        ("filtered", "", "judge failed", None),
    ]
    by_group = {event.group: event for event in events}
    assert by_group["old"].staleness == 6
    assert by_group["b"].staleness == 1
    assert by_group["a"].lengths == by_group["b"].lengths != ()
    with ps.open(tmp_path / "run", **SETTINGS) as plane:
        assert list(plane.feedback()) == events
        assert list(plane.feedback(after=events[2].cursor)) == events[3:]
        assert list(plane.feedback(after=events[-1].cursor)) == []


def test_an_event_has_what_a_curriculum_needs(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, groups_per_step=1)
    with plane.group("sum-1", id="g1", policy_version=0) as group:
        group.add(rollout(1.0))
        group.add(rollout(0.25, length=4))
    with plane.group("sum-2", id="g2", policy_version=0, filters=[ZeroVariance()]) as group:
        group.add(rollout(0.5, env="code"))
        group.add(rollout(0.5, env="code"))
    train(plane, 1)
    filtered, trained = plane.feedback()
    assert (filtered.outcome, filtered.reason, filtered.prompt) == ("filtered", "zero variance", "sum-2")
    assert (filtered.group, filtered.env, filtered.rewards, filtered.lengths) == ("g2", "code", (0.5, 0.5), (5, 5))
    assert (trained.prompt, trained.env, trained.samples) == ("sum-1", "math", 2)
    assert (trained.rewards, trained.lengths, trained.staleness) == ((1.0, 0.25), (5, 7), 0)
    assert trained.mean_reward == 0.625


def test_a_filter_that_is_repeated_is_one_event(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1)
    for _ in range(3):
        plane.discard("zero variance", 4, key="g1: zero variance", prompt="p", rewards=[1.0, None, float("nan"), 1.0])
    (event,) = plane.feedback()
    assert (event.samples, event.rewards, event.prompt) == (4, (1.0, None, None, 1.0), "p")


def test_a_rewind_is_an_event_and_the_steps_come_again(tmp_path: Path) -> None:
    with ps.open(tmp_path / "run", **SETTINGS) as plane:
        plane.put_many([named_group(name, policy_version=0) for name in "abcd"])
        train(plane, 3)
        before = list(plane.feedback())
    with ps.open(tmp_path / "run", **SETTINGS) as plane:
        train(plane, 3, resume=2)
        events = list(plane.feedback())
    check_dense(events)
    assert events[:3] == before
    assert told(events[3:]) == [
        ("rewound", "", "steps 2 to 3 are trained again", 2),
        ("trained", "b", "", 2),
        ("trained", "c", "", 3),
        ("trained", "d", "", 4),
    ]


def test_a_group_that_is_trained_twice_has_two_events(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, groups_per_step=1, max_times_sampled=2)
    plane.put(named_group("a"))
    train(plane, 2)
    assert told(list(plane.feedback())) == [("trained", "a", "", 1), ("trained", "a", "", 2)]


def test_quarantine_and_its_end_are_events(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, groups_per_step=2)
    plane.put_many([named_group("a"), named_group("b")])
    bare = [ps.Sample(id="odd/0", group="odd", token_ids=[1, 2, 3], loss_mask=[False, True, True], advantages=1.0)]
    plane.put_frame("odd", encode(bare))
    train(plane, 1)
    plane.settle("odd", drop=True)
    events = list(plane.feedback())
    assert sorted(told(events)[:3])[1:] == [("trained", "a", "", 1), ("trained", "b", "", 1)] or "logprobs" in str(
        events
    )
    assert [event.outcome for event in events if event.group == "odd"] == ["quarantined", "dropped"]
    assert next(event for event in events if event.outcome == "quarantined").reason.startswith("logprobs")


def test_long_streams_come_in_pages_and_end_at_what_was_newest(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1)
    for number in range(MAX_PAGE + 10):
        plane.discard("errored", 1, group=f"g{number}")
    seen = []
    for event in plane.feedback():
        seen.append(event)
        if len(seen) < 50:  # the stream grows while it is read, and still ends
            plane.discard("errored", 1)
    check_dense(seen)
    assert len(seen) == MAX_PAGE + 10
    assert len(list(plane.feedback(after=seen[-1].cursor))) == 49


def test_steps_larger_than_a_page_can_be_resumed_anywhere(open_plane: OpenPlane) -> None:
    count = MAX_PAGE + 44
    plane = open_plane(ranks=1, groups_per_step=count)
    plane.put_many(named_group(f"g{number}") for number in range(count))
    train(plane, 1)
    events = list(plane.feedback())
    check_dense(events)
    assert Counter(event.group for event in events) == Counter(f"g{number}" for number in range(count))
    for place in (0, 1, 255, 256, 299):
        assert list(plane.feedback(after=events[place].cursor)) == events[place + 1 :]


def test_a_follower_gets_events_as_they_happen_until_the_plane_closes(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, groups_per_step=1)
    seen: list[FeedbackEvent] = []
    three, ended = threading.Event(), threading.Event()

    def follow() -> None:
        with pytest.raises(Closed):
            for event in plane.feedback(follow=True):
                seen.append(event)
                if len(seen) == 3:
                    three.set()
        ended.set()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    plane.discard("errored", 1)
    plane.put_many([named_group("a"), named_group("b")])
    train(plane, 2)  # the last commit is followed by no other decision
    assert three.wait(60)
    assert [event.outcome for event in seen] == ["filtered", "trained", "trained"]
    plane.close()
    assert ended.wait(60)
    thread.join(60)


def test_events_come_in_asyncio_too(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1)

    async def read() -> list[str]:
        await plane.adiscard("errored", 2, prompt="p")
        found = [event.prompt async for event in plane.afeedback()]
        async for event in plane.afeedback(follow=True):
            found.append(event.prompt)
            if len(found) == 2:
                await plane.adiscard("errored", 2, prompt="q")
            if len(found) == 3:
                break
        return found

    assert asyncio.run(read()) == ["p", "p", "q"]


HOSTILE = ["x", "0", ".", "-1", "é.1", "zz.1", "1" * 500, "aaaaaaaaaaaa.1", "\0.3", "'; DROP TABLE outcomes; --"]


def test_cursors_that_are_none_are_rejected_with_the_reason(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1)
    plane.discard("errored", 1)
    (event,) = plane.feedback()
    run = event.cursor.partition(".")[0]
    for cursor in [*HOSTILE, f"{run}.", f"{run}.-1", f"{run}.1.1", f"{run}.１", f"{run}.1e3"]:
        with pytest.raises(InvalidInput, match="after: "):
            list(plane.feedback(after=cursor))
    with pytest.raises(InvalidInput, match="ahead of the newest event, 1"):
        list(plane.feedback(after=f"{run}.2"))
    with pytest.raises(InvalidInput, match="cursor of another run"):
        list(plane.feedback(after="0123456789ab.1"))
    with pytest.raises(InvalidInput, match="after: 7"):
        list(plane.feedback(after=7))  # type: ignore[arg-type]
    assert list(plane.feedback(after=f"{run}.0")) == [event]


def test_discards_of_more_than_is_kept_are_bounded(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1)
    plane.discard("errored", 1000, rewards=[1.0] * 1000, lengths=[7] * 1000)
    (event,) = plane.feedback()
    assert (event.samples, len(event.rewards), len(event.lengths)) == (1000, 256, 256)
    with pytest.raises(InvalidInput, match="prompt: "):
        plane.discard("errored", 1, prompt="x" * 513)
    with pytest.raises(InvalidInput, match="rewards: 2 for 1 samples"):
        plane.discard("errored", 1, rewards=[1.0, 2.0])
    with pytest.raises(InvalidInput, match="lengths"):
        plane.discard("errored", 1, lengths=[-1])
