"""What an operator reads: the run's run_logger in the log, what is waited for, numbers that are not finite, bounds."""

from __future__ import annotations

import json
import logging

import pytest

from penstock.errors import CorruptFrame, InvalidInput, StepAborted, WaitTimeout
from penstock.protocol.message_header import MAX_HEADER
from tests.plane.test_plane import close, put, sources, steps_of, together
from tests.support.pace import pace
from tests.support.planes import OpenPlane

STORY = "penstock.plane"


def test_the_log_tells_the_story_of_a_run(
    open_plane: OpenPlane, caplog: pytest.LogCaptureFixture, tmp_path: object
) -> None:
    caplog.set_level(logging.INFO, STORY)
    plane = open_plane(f"{tmp_path}/run", run="demo", capacity=4)
    put(plane, "a", "b")
    for _ in range(12):
        with pytest.raises(CorruptFrame):
            plane.put_frame("bad", b"nothing")
    ranks = sources(plane)
    steps_of(together(*(source.step for source in ranks)))
    ranks[1].fail("out of memory")
    together(*(source.step for source in ranks))
    close(ranks)
    plane.close()
    open_plane(f"{tmp_path}/run", run="demo", capacity=4).close()
    told = [record.getMessage() for record in caplog.records if record.name == STORY]
    for words in (
        "run 'demo'",
        "started: next step 1",
        "session 1: rank 0 joined",
        "session 1: rank 1 joined",
        "session 1 runs: 2 processes, at step 1",
        "session 1 failed: step 1: rank 1: out of memory",
        "started again, epoch 2: next step 1",
        "put: refused: CorruptFrame",
    ):
        assert any(words in line for line in told), (words, told)
    assert sum("put: refused" in line for line in told) == 2  # the first and the tenth


def test_a_rank_that_goes_silent_is_named_in_the_log(open_plane: OpenPlane, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, STORY)
    plane = open_plane()
    put(plane, "a", "b")
    ranks = sources(plane)
    steps_of(together(*(source.step for source in ranks)))
    ranks[1]._loop._outbox = _Deaf()  # type: ignore[assignment]
    with pytest.raises(StepAborted, match="rank 1: silent for"):
        ranks[0].step(timeout=60)
    assert any("failed: step 1: rank 1: silent for" in record.getMessage() for record in caplog.records)
    close(ranks)


class _Deaf(list):  # type: ignore[type-arg]
    """An outbox that nothing leaves."""

    def __bool__(self) -> bool:
        return False


@pytest.mark.deep
def test_a_wait_names_rank_step_and_what_is_missing_at_that_moment(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=2, groups_per_step=3)
    alone = plane.source(1, world=2)
    with pytest.raises(WaitTimeout, match=r"rank 1: the first step: .* waited for: rank 0 to join"):
        alone.step(timeout=1.5 * pace())
    other = plane.source(0, world=2)
    put(plane, "a", "b", "c")
    for step in steps_of(together(alone.step, other.step)):
        alone.commit(step) if step.rank else other.commit(step)
    put(plane, "d")
    with pytest.raises(WaitTimeout, match=r"rank 1: step 2: .* waited for: generation: 1 of 3 groups"):
        alone.step(timeout=pace())
    put(plane, "e")
    with pytest.raises(WaitTimeout, match=r"rank 1: step 2: .* waited for: generation: 2 of 3 groups"):
        alone.step(timeout=pace())
    close([alone, other])


def test_numbers_that_are_not_finite_are_null_and_break_nothing(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, groups_per_step=1)
    put(plane, "a", "b")
    source = plane.source(0)
    step = source.step(timeout=120)
    values = {"loss": float("nan"), "norm": float("inf"), "low": float("-inf"), "lr": 0.5}
    source.report(step, metrics=values)
    source.commit(step)
    source.flush()
    assert plane.status()["reported"] == {"loss": None, "norm": None, "low": None, "lr": 0.5}
    assert plane.ledger.committed == 2
    source.close()
    again = plane.source(0)
    assert again.step(timeout=120).number == 2
    again.close()
    json.dumps(plane.status(), allow_nan=False)


def test_metric_names_are_bounded_in_number_and_length(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, groups_per_step=1)
    put(plane, "a")
    with plane.source(0) as source:
        step = source.step(timeout=120)
        source.report(step, metrics={f"m{i}": 1.0 for i in range(900)})
        source.report(step, metrics={"x" * 300_000: 1.0})
        source.report(step, metrics={f"n{i}": 2.0 for i in range(80_000)} | {"m5": 3.0})
        source.commit(step)
        source.flush()
    status = plane.status()
    assert len(status["reported"]) == 1000
    assert (status["reported"]["m5"], status["counts"]["metrics_refused"]) == (3.0, 2)
    assert len(json.dumps(status)) < MAX_HEADER / 100


@pytest.mark.parametrize("step", [0, -3, 2**70])
def test_a_resume_step_that_cannot_be_is_refused(open_plane: OpenPlane, step: int) -> None:
    plane = open_plane(ranks=1)
    with pytest.raises(InvalidInput, match=f"resume_step: {step}; must be one above"):
        plane.source(0, resume_step=step)


def test_going_back_and_going_ahead_are_said_and_counted(
    open_plane: OpenPlane, caplog: pytest.LogCaptureFixture
) -> None:
    plane = open_plane(ranks=1, groups_per_step=1)
    put(plane, *"abcd")
    with plane.source(0) as source:  # no checkpoint: where the plane is
        for _ in range(2):
            source.commit(source.step(timeout=120))
        source.flush()
        assert source.step(timeout=120).number == 3  # taken, and its commit is lost with the process
    with plane.source(0) as source:
        assert source.step(timeout=120).number == 3
    counts = plane.status()["counts"]
    assert (counts["resumes_rewound"], counts["resumes_ahead"]) == (0, 0)
    with plane.source(0, resume_step=4) as source:  # its checkpoint has step 3
        assert source.step(timeout=120).number == 4
    assert "resumed ahead at step 4: steps 3 to 3 count as trained" in caplog.text
    with plane.source(0, resume_step=2) as source:
        assert source.step(timeout=120).number == 2
    assert "rewound from step 4 to 2: steps 2 to 3 are served again" in caplog.text
    counts = plane.status()["counts"]
    assert (counts["resumes_ahead"], counts["resumes_rewound"]) == (1, 1)
    with plane.source(0, resume_step=6) as source, pytest.raises(StepAborted, match="the last step that was delivered"):
        source.step(timeout=120)
    with plane.source(0) as source:  # a refused resume changes nothing
        assert source.step(timeout=120).number == 2
