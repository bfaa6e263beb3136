"""A plane that dies gives every rank the same error, whatever each of them was doing."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.client.source import Source
from penstock.client.source_settings import SourceSettings
from penstock.errors import Closed, Conflict, PenstockError, StepAborted, StorageError
from tests.plane.test_plane import close, put, sources, together
from tests.plane.test_plane_failures import NonsenseClient
from tests.support.groups import named_group
from tests.support.pace import eventually, pace
from tests.support.planes import FAST, OpenPlane


def failing(plane: object, text: str) -> None:
    """Let the next turn of the plane's loop end it."""

    def end(_now: float) -> None:
        raise StorageError(text)

    server = plane._server  # type: ignore[attr-defined]
    server.turn = end


def raised(act: object) -> PenstockError:
    assert callable(act)
    try:
        act()
    except PenstockError as error:
        return error
    raise AssertionError("nothing was raised")


def test_every_rank_of_a_dying_plane_gets_the_same_words(open_plane: OpenPlane) -> None:
    for attempt in range(5):
        plane = open_plane(ranks=4)
        ranks = sources(plane, 4)
        put(plane, "a", "b")
        together(*(source.step for source in ranks))
        failing(plane, f"attempt {attempt}")
        found = together(*(lambda source=source: raised(lambda: source.step(timeout=60)) for source in ranks))
        words = f"step 1: the plane: the plane ended: StorageError: attempt {attempt}"
        assert {(type(error), str(error)) for error in found} == {(StepAborted, words)}
        close(ranks)


def test_a_rank_that_had_not_joined_yet_gets_the_words_of_the_others(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=2)
    first = plane.source(0, world=2)
    failing(plane, "no more")
    late = plane.source(1, world=2)
    errors = [raised(lambda source=source: source.step(timeout=60)) for source in (first, late)]
    assert {str(error) for error in errors} == {"step 1: the plane: the plane ended: StorageError: no more"}
    assert "the plane in this process ended: no more" in str(raised(lambda: plane.put(named_group("a"))))
    close([first, late])


def test_ranks_of_a_plane_that_is_closed_in_order_are_told_that(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=2)
    ranks = sources(plane, 2)
    plane.close()
    found = together(*(lambda source=source: raised(lambda: source.step(timeout=60)) for source in ranks))
    assert {(type(error), str(error)) for error in found} == {(Closed, "the plane in this process was closed")}
    close(ranks)


def test_a_rank_that_fails_while_it_fills_gives_all_the_same_words(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=2)
    for attempt in range(8):
        good = plane.source(0, world=2)
        bad = Source(NonsenseClient(plane._connect()), SourceSettings(rank=1, world=2, timeouts=FAST))
        put(plane, f"a{attempt}", f"b{attempt}")

        def take(source: Source) -> str:
            with source:  # as a trainer does: whoever fails leaves at once
                source.step(timeout=60)
            return "nothing was raised"

        found = together(*(lambda source=source: str(raised(lambda: take(source))) for source in (good, bad)))
        assert len(set(found)) == 1, found
        assert "step 1: rank 1: CorruptFrame" in str(found[0])


# ------------------------------------------------------------------ a handle that is dropped without close


def test_closing_a_plane_wakes_its_loop() -> None:
    took = []
    for _ in range(5):
        plane = ps.open("memory:", ranks=1, seq_len=64, groups_per_step=1)
        began = time.monotonic()
        plane.close()
        took.append(time.monotonic() - began)
    assert min(took) < 0.2  # a loop that is not woken waits 0.25 s for a message


def test_a_plane_that_is_only_deleted_frees_its_folder(tmp_path: Path) -> None:
    for life in range(3):
        plane = ps.open(tmp_path, ranks=1, seq_len=64, groups_per_step=1, timeouts=FAST)
        assert plane.put(named_group(f"g{life}"))
        assert plane.ledger.accepted == 2 * (life + 1)
        del plane
        gc.collect()


def test_a_plane_in_a_reference_cycle_frees_its_folder(tmp_path: Path) -> None:
    gc.disable()  # so that only the next `open` collects
    try:
        for life in range(3):
            plane = ps.open(tmp_path, ranks=1, seq_len=64, groups_per_step=1, timeouts=FAST)
            plane.put(named_group(f"g{life}"))
            cycle: list[Any] = [plane]
            cycle.append(cycle)
            del plane, cycle
    finally:
        gc.enable()
        gc.collect()


def test_a_plane_lives_as_long_as_its_source(tmp_path: Path) -> None:
    plane = ps.open(tmp_path, ranks=1, seq_len=64, groups_per_step=1, timeouts=FAST)
    plane.put(named_group("a"))
    source = plane.source(0)
    del plane
    gc.collect()
    assert source.step(timeout=30 * pace()).number == 1
    source.close()
    del source
    gc.collect()
    ps.open(tmp_path, ranks=1, seq_len=64, groups_per_step=1).close()


@pytest.mark.parametrize("cycle", [False, True], ids=["deleted", "in a cycle"])
def test_a_source_that_is_never_closed_frees_the_folder_of_its_plane(tmp_path: Path, cycle: bool) -> None:
    steps, before = list[ps.Step](), set(threading.enumerate())
    gc.disable()  # so that only the next `open` collects
    try:
        for life in range(3):
            plane = ps.open(tmp_path, ranks=1, seq_len=64, groups_per_step=1, timeouts=FAST)
            plane.put(named_group(f"g{life}"))
            source = plane.source(0)
            for step in source.steps(timeout=30 * pace()):
                source.commit(step)
                source.flush(30 * pace())  # a commit that is on its way may be lost with its source
                steps.append(step)  # a step that is kept keeps neither
                break
            held: list[Any] = [source, plane]
            if cycle:
                held.append(held)
            del plane, source, held
    finally:
        gc.enable()
    assert [step.number for step in steps] == [1, 2, 3]
    gc.collect()
    eventually(lambda: not set(threading.enumerate()) - before)


def test_a_source_that_is_dropped_leaves_its_session(tmp_path: Path) -> None:
    with ps.open(tmp_path, ranks=1, seq_len=64, groups_per_step=1) as plane:  # peers may be silent for minutes
        plane.put(named_group("a"))
        before = set(threading.enumerate())
        source = plane.source(0)
        assert source.step(timeout=30 * pace()).number == 1
        del source
        gc.collect()
        mine = {"penstock-source-0", "penstock-fill-0"}
        eventually(lambda: mine.isdisjoint(thread.name for thread in {*threading.enumerate()} - before))
        with plane.source(0) as again:
            assert again.step(timeout=30 * pace()).number == 1


def test_what_can_still_use_a_plane_keeps_it_open(tmp_path: Path) -> None:
    """A task puts its group, and a loop over tasks leases more."""
    settings: dict[str, Any] = {"ranks": 1, "seq_len": 64, "groups_per_step": 1, "timeouts": FAST}
    tasks = iter(ps.open(tmp_path, **settings).tasks(["p", "q"]))
    task = next(tasks)
    gc.collect()
    with task.group() as group:
        group.add(ps.Trajectory(turns=[ps.Turn([1]), ps.Turn([2], logprobs=[-0.5])], reward=1.0))
    assert next(tasks).prompt == {"p": "q", "q": "p"}[task.prompt]
    with pytest.raises(Conflict, match="this process has it open already"):
        ps.open(tmp_path, **settings)
    del tasks, task, group
    ps.open(tmp_path, **settings).close()


def test_a_folder_open_in_this_process_says_what_to_do(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ranks": 1, "seq_len": 64, "groups_per_step": 1}
    with ps.open(tmp_path, **settings), pytest.raises(Conflict, match=r"this process has it open already; call close"):
        ps.open(tmp_path, **settings)
