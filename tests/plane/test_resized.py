"""A run reopened with another number of ranks, or other packing settings: steps keep their number and groups, and are
planned and recorded again before they are served."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

import penstock as ps
from penstock.errors import Fenced, InvalidInput
from penstock.frames import encode
from penstock.log import SqliteLog, take_over
from penstock.packing import Packing
from penstock.plane.manifest import read_manifest
from penstock.plane.pipeline import fitting
from penstock.plane.settings import PlaneSettings, Replay, Target
from penstock.plane.step_builder import StepBuilder
from penstock.protocol.steps import Staged
from penstock.replay import Uniform
from penstock.runs.recorded_run import RecordedRun
from penstock.runs.rerunning import rerun
from tests.support.engines import DirectEngine, damage_frame
from tests.support.groups import named_group

SETTINGS = PlaneSettings(
    packing=Packing(ranks=2, seq_len=64),
    target=Target(groups=2),
    replay=Replay(sampler=Uniform(), seed=7),
    over_length="truncate",
    snapshot_every=3,
)
NAMES = [f"g{i}" for i in range(10)]


def opened(folder: Path, ranks: int, **changes: Any) -> DirectEngine:
    packing = {name: changes.pop(name) for name in list(changes) if hasattr(SETTINGS.packing, name)}
    made = replace(SETTINGS, packing=replace(SETTINGS.packing, ranks=ranks, **packing), **changes)
    return DirectEngine(made, SqliteLog(folder))


def begun(folder: Path, ranks: int, planned: int, **changes: Any) -> DirectEngine:
    """A plane with all groups, and this many steps planned."""
    engine = opened(folder, ranks, **changes)
    for i, name in enumerate(NAMES):
        assert engine.put(name, name, encode(named_group(name, tokens=6 + 2 * i))) is None
    assert all(outcome.error is None for outcome in engine.flush())
    for step in range(1, planned + 1):
        assert isinstance(engine.plan_step(step), Staged)
    return engine


def stop(engine: DirectEngine, *, orderly: bool = True) -> None:
    """Close a plane; without order nothing more is written, as after `kill -9`."""
    assert engine.ledger.balanced
    if orderly:
        engine.close()
    engine.log.close()


def recorded(engine: DirectEngine, step: int) -> tuple[str, ...]:
    """The digests of a step in the log."""
    return next(read_manifest(data).digests for number, _, data, _ in engine.log.steps() if number == step)


def train(engine: DirectEngine, step: int) -> tuple[list[str], tuple[str, ...]]:
    """Serve a step and commit it. Returns its groups in order, and its digests; the log had them before."""
    staged = engine.plan_step(step) if step > engine.last_step else engine.stage_again(step)
    assert isinstance(staged, Staged)
    assert recorded(engine, step) == tuple(staged.digests)
    assert len(staged.payloads) == engine.settings.packing.ranks
    names = [row.id for op in engine.state.steps[step].groups for row in engine.log.groups_of([op])]
    engine.received(step)
    engine.commit(step, step)
    assert engine.ledger.balanced
    return names, tuple(staged.digests)


def undisturbed(folder: Path, ranks: int, **changes: Any) -> list[tuple[list[str], tuple[str, ...]]]:
    """The five steps of a run that has this many ranks from its beginning."""
    engine = begun(folder, ranks, 0, **changes)
    steps = [train(engine, step) for step in range(1, 6)]
    stop(engine)
    return steps


@pytest.mark.parametrize("orderly", [True, False])
@pytest.mark.parametrize("planned", [0, 1, 2])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (4, 2), (2, 7)])
def test_planned_steps_are_those_of_a_run_that_always_had_as_many_ranks(
    before: int, after: int, planned: int, orderly: bool, tmp_path: Path
) -> None:
    expected = undisturbed(tmp_path / "expected", after)
    engine = begun(tmp_path / "run", before, planned)
    first = train(engine, 1) if planned else None
    stop(engine, orderly=orderly)
    engine = opened(tmp_path / "run", after)
    engine.resume(1, engine.next_step)
    rest = [train(engine, step) for step in range(engine.next_step, 6)]
    assert rest == expected[len(expected) - len(rest) :]
    trained = [name for names, _ in [*([first] if first else []), *rest] for name in names]
    assert sorted(trained) == sorted(NAMES)
    assert engine.ledger.committed == 2 * len(NAMES)
    stop(engine)


def test_a_plane_killed_between_two_steps_leaves_each_to_the_next_one(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "expected", 4)
    stop(begun(tmp_path / "run", 2, 3), orderly=False)
    engine = opened(tmp_path / "run", 3)
    engine.resume(1, 1)
    three = engine.stage_again(1).digests
    again = engine.draw_again(2)  # and planned, when the plane is killed
    builder = StepBuilder(engine.settings.packing, engine.storage)
    builder.plan(fitting(engine.settings, engine.storage, again), again.oldest_version)
    stop(engine, orderly=False)
    engine = opened(tmp_path / "run", 3)
    assert recorded(engine, 1) == tuple(three)
    assert [len(recorded(engine, step)) for step in (1, 2, 3)] == [3, 2, 2]
    stop(engine)
    engine = opened(tmp_path / "run", 4)
    engine.resume(2, 1)
    assert [train(engine, step) for step in range(1, 6)] == expected
    stop(engine)


@pytest.mark.parametrize("to", [1, 2, 3])
def test_a_rewind_plans_steps_of_another_number_of_ranks_again(to: int, tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "expected", 3)
    engine = begun(tmp_path / "run", 2, 3)
    two = [train(engine, step)[1] for step in (1, 2)]
    stop(engine)
    engine = opened(tmp_path / "run", 3)
    assert [recorded(engine, step) for step in (1, 2)] == two  # what was trained stays recorded until it is not
    engine.resume(1, to)
    assert [train(engine, step) for step in range(to, 6)] == expected[to - 1 :]
    assert [recorded(engine, step) for step in range(1, to)] == two[: to - 1]
    stop(engine)


def test_one_line_says_which_steps_are_planned_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stop(begun(tmp_path, 2, 2))
    engine = opened(tmp_path, 3)
    engine.resume(1, 1)
    stop(engine)
    (line,) = [record.message for record in caplog.records if "planned" in record.message]
    assert line == (
        f"{tmp_path}: steps 1 to 2: planned for 2 ranks, planned again for 3 with the same groups and today's settings"
    )


def test_a_plane_that_was_taken_over_cannot_record_its_plan(tmp_path: Path) -> None:
    stop(begun(tmp_path, 2, 1))
    old = opened(tmp_path, 3)
    old.resume(1, 1)
    assert take_over(tmp_path, 0.1)
    new = opened(tmp_path, 4)
    new.resume(2, 1)
    four = new.stage_again(1).digests
    with pytest.raises(Fenced, match="taken over"):
        old.stage_again(1)
    assert recorded(new, 1) == tuple(four)
    old.log.close()
    stop(new)


def test_a_session_that_goes_on_keeps_its_plans_and_a_new_one_has_the_cap_of_today(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "expected", 2, micro_batch_max_tokens=16)
    engine = begun(tmp_path / "run", 2, 2)
    with_64 = [recorded(engine, step) for step in (1, 2)]
    stop(engine)
    engine = opened(tmp_path / "run", 2, micro_batch_max_tokens=16)
    assert tuple(engine.stage_again(1).digests) == with_64[0]  # its ranks may have it already
    stop(engine)
    engine = opened(tmp_path / "run", 2, micro_batch_max_tokens=16)
    engine.resume(1, 1)
    assert [train(engine, step) for step in range(1, 6)] == expected
    assert with_64[1] != expected[1][1]
    stop(engine)


def test_a_shorter_seq_len_cuts_planned_steps_too_and_counts_each_cut_once(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "expected", 3, seq_len=16)
    stop(begun(tmp_path / "run", 2, 2))
    for seq_len in (16, 64, 16):
        engine = opened(tmp_path / "run", 3, seq_len=seq_len)
        over_length = engine.ledger.over_length
        stop(engine)
    engine = opened(tmp_path / "run", 3, seq_len=16)
    engine.resume(1, 1)
    assert [train(engine, step) for step in range(1, 6)] == expected
    # 10 groups of two samples with 6, 8, 10, ... 24 tokens
    assert engine.ledger.over_length == over_length
    assert over_length["truncated_samples"] == 8
    assert over_length["truncated_tokens"] == 2 * (2 + 4 + 6 + 8)
    stop(engine)


def test_a_step_that_cannot_be_planned_again_says_so_and_stays_as_it_was(tmp_path: Path) -> None:
    engine = begun(tmp_path, 2, 1)
    two = recorded(engine, 1)
    stop(engine)
    engine = opened(tmp_path, 3, micro_batch_max_tokens=5, over_cap="strict")
    engine.resume(1, 1)
    with pytest.raises(
        InvalidInput, match=r"step 1 was planned for 2 ranks and cannot be planned again for 3: .*former"
    ):
        engine.stage_again(1)
    assert recorded(engine, 1) == two
    stop(engine)
    engine = opened(tmp_path, 2)
    engine.resume(2, 1)
    assert train(engine, 1)[1] == two
    stop(engine)


def test_a_damaged_group_is_found_when_its_step_is_built_for_other_ranks(tmp_path: Path) -> None:
    engine = begun(tmp_path, 2, 1)
    damage_frame(engine, next(row.id for row in engine.log.groups_of(engine.state.steps[1].groups)))
    stop(engine)
    engine = opened(tmp_path, 3)
    engine.resume(1, 1)
    trained = [name for step in range(1, 5) for name in train(engine, step)[0]]
    assert len(set(trained)) == 8 and len(engine.state.quarantined) == 1
    stop(engine)


@pytest.mark.parametrize("seq_len", [64, 16])
def test_a_run_that_was_resized_is_made_again(seq_len: int, tmp_path: Path) -> None:
    engine = begun(tmp_path / "run", 2, 2, retain="all")
    train(engine, 1)
    stop(engine)
    for ranks, steps in ((3, (2, 3)), (1, (4, 5))):
        engine = opened(tmp_path / "run", ranks, seq_len=seq_len, retain="all")
        engine.resume(ranks, engine.next_step)
        for step in steps:
            train(engine, step)
            if step == 3:
                assert isinstance(engine.plan_step(4), Staged)
        stop(engine)
    run = RecordedRun.open(tmp_path / "run")
    assert [len(entry.digests) for entry in run.steps.values()] == [2, 3, 3, 1, 1]
    found = rerun(run, tmp_path / "again")
    assert (found.same, found.steps, found.skipped) == (True, 5, 0), found.sentence


def test_a_log_of_an_earlier_version_is_planned_again_for_other_ranks_only(tmp_path: Path) -> None:
    engine = begun(tmp_path, 2, 1)
    two = recorded(engine, 1)
    with engine.log.transaction():
        (data,) = [data for _, _, data, _ in engine.log.steps()]
        engine.log.set_manifest(1, msgspec.msgpack.encode(msgspec.msgpack.decode(data)[:-1]))
    stop(engine)
    engine = opened(tmp_path, 2, micro_batch_max_tokens=16)
    engine.resume(1, 1)
    assert tuple(engine.stage_again(1).digests) == two
    stop(engine)
    engine = opened(tmp_path, 3)
    engine.resume(2, 1)
    assert len(engine.stage_again(1).digests) == 3
    stop(engine)


LIFE = """
import os, signal, sys, threading
import penstock as ps
from tests.support.groups import named_group

plane = ps.open(sys.argv[1], ranks=2, seq_len=64, groups_per_step=2)
for i in range(10):
    plane.put(named_group(f"g{i}"))
together = threading.Barrier(2)

def live(rank):
    source = plane.source(rank, prefetch=2)
    step = source.step(timeout=60)
    together.wait()
    source.commit(step)
    source.flush(60)
    ahead = source.step(timeout=60)
    for word, one in (("trained", step), ("ahead", ahead)):
        groups = " ".join(group for batch in one for group in batch.segments.groups)
        os.write(1, f"{word} {groups}\\n".encode())
    together.wait()
    os.kill(os.getpid(), signal.SIGKILL)

threads = [threading.Thread(target=live, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.process
@pytest.mark.parametrize("ranks", [1, 3])
def test_after_a_kill_another_number_of_ranks_trains_every_group_once(ranks: int, tmp_path: Path) -> None:
    life = subprocess.run([sys.executable, "-c", LIFE, str(tmp_path)], capture_output=True, text=True, check=False)
    assert life.returncode == -signal.SIGKILL, life.stderr
    said = [line.split() for line in life.stdout.splitlines()]
    trained, ahead = (
        {name for word, *names in said if word == which for name in names} for which in ("trained", "ahead")
    )
    assert len(trained) == len(ahead) == 2
    with ps.open(tmp_path, ranks=ranks, seq_len=64, groups_per_step=2) as plane, ThreadPoolExecutor() as pool:

        def live(rank: int) -> list[tuple[int, set[str]]]:
            steps = []
            with plane.source(rank) as source:
                for _ in range(4):
                    step = source.step(timeout=60)
                    steps.append((step.number, {group for batch in step for group in batch.segments.groups}))
                    source.commit(step)
                source.flush(60)
            return steps

        rest: dict[int, set[str]] = {step: set() for step in range(2, 6)}
        for steps in pool.map(live, range(ranks)):
            for step, groups in steps:
                rest[step] |= groups
        assert rest[2] == ahead
        assert sorted(name for names in (trained, *rest.values()) for name in names) == sorted(NAMES)
        ledger = plane.ledger
        assert ledger.balanced and ledger.committed == ledger.accepted == 20
