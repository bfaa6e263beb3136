"""A plane that starts again is the plane it was: what it remembers, what it refuses, and what damage looks like."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import penstock as ps
from penstock.errors import CorruptFile, InvalidInput, PenstockError
from penstock.frames import encode
from penstock.plane.settings import Replay, Target
from penstock.protocol.steps import Staged
from tests.support.engines import DirectEngine
from tests.support.groups import named_group
from tests.support.planes import OpenEngine, OpenPlane


def put(engine: DirectEngine, *names: str, run: str = "") -> None:
    for name in names:
        assert engine.put(name, name, encode(named_group(name, run=run))) is None
    assert all(outcome.error is None for outcome in engine.flush())


def test_shares_set_at_run_time_survive_a_restart_with_the_same_settings(
    open_engine: OpenEngine, tmp_path: Path
) -> None:
    shares = {"alpha": 0.5, "beta": 0.5}
    engine = open_engine(tmp_path, shares=shares)
    engine.share("alpha", 0.9)
    engine.share("beta", 0.1)
    engine.log.close()
    again = open_engine(tmp_path, shares=shares)
    assert again.tenant_tables.part("alpha") == pytest.approx(0.9)
    again.log.close()
    changed = open_engine(tmp_path, shares={"alpha": 3.0, "beta": 1.0})
    assert changed.tenant_tables.part("alpha") == 0.75


@pytest.mark.parametrize("weight", [1e308, 1e-320, 0.0, -1.0, float("nan"), float("inf")])
def test_shares_that_would_overflow_are_refused(open_engine: OpenEngine, weight: float) -> None:
    with pytest.raises(InvalidInput, match="give a name and a number from 1e-06 to 1e\\+06"):
        open_engine().share("a", weight)


def test_seq_len_and_the_steps_target_may_change(tmp_path: Path) -> None:
    with ps.open(tmp_path, ranks=1, seq_len=64, groups_per_step=2) as plane:
        for i in range(4):
            plane.put(named_group(f"g{i}", tokens=40))
    with ps.open(tmp_path, ranks=1, seq_len=16, groups_per_step=4) as plane:
        source = plane.source(0)
        step = source.step(timeout=30)
        assert step.accounting.truncated_samples == 8
        assert max(int(batch.sequence_lengths.max()) for batch in step) <= 16
        source.close()


def test_discards_are_counted_once_however_often_a_put_is_tried_and_are_durable(
    open_plane: OpenPlane, tmp_path: Path
) -> None:
    plane = open_plane(tmp_path, ranks=1)
    for _ in range(3):
        plane.discard("too short", 2, key="g1: too short")
    assert dict(plane.ledger.discarded) == {"too short": 2}
    plane.close()
    again = open_plane(tmp_path, ranks=1)
    again.discard("too short", 2, key="g1: too short")
    assert dict(again.ledger.discarded) == {"too short": 2}


def test_manifests_that_can_no_longer_be_asked_for_are_freeing(open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine(tmp_path, retain_steps=2, target=Target(groups=1))
    for i in range(12):
        put(engine, f"g{i}")
        assert isinstance(engine.plan_step(i + 1), Staged)
        engine.received(i + 1)
        engine.commit(i + 1, None)
    engine.close()
    sizes = {step: len(manifest) for step, _, manifest, _ in engine.log.steps()}
    assert max(sizes[step] for step in range(1, 9)) < 60 < min(sizes[step] for step in range(11, 13))
    engine.log.close()
    assert open_engine(tmp_path, retain_steps=2, target=Target(groups=1)).ledger == engine.ledger


def test_a_folder_of_another_format_is_refused_in_words(open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine(tmp_path)
    with engine.log.transaction():
        engine.log.set_meta("format", 2)
    engine.log.close()
    with pytest.raises(CorruptFile, match="format 2; this version reads format 5; finish the run with the version"):
        open_engine(tmp_path)


def test_a_damaged_log_is_a_corrupt_file_or_opens_unharmed_and_never_a_raw_error(
    open_engine: OpenEngine, tmp_path: Path
) -> None:
    origin = tmp_path / "origin"
    engine = open_engine(origin)
    put(engine, *(f"g{i}" for i in range(8)))
    assert isinstance(engine.plan_step(1), Staged)
    engine.close()
    engine.log.close()
    data = (origin / "log.sqlite").read_bytes()
    rng = random.Random(7)
    for number in range(60):
        folder = tmp_path / str(number)
        folder.mkdir()
        harmed = bytearray(data)
        for _ in range(rng.randrange(1, 60)):
            harmed[rng.randrange(len(harmed))] = rng.randrange(256)
        (folder / "log.sqlite").write_bytes(harmed)
        try:
            with ps.open(folder, ranks=2, seq_len=64, groups_per_step=2) as plane:
                plane.status()
        except PenstockError:
            continue


# ------------------------------------------------------------------ policy versions


def test_with_a_staleness_limit_a_group_without_a_version_is_refused(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, max_staleness=2)
    with pytest.raises(InvalidInput, match="no policy_version, and max_staleness is 2"):
        plane.put(named_group("a", policy_version=None))
    plane.put(named_group("b", policy_version=0))
    assert plane.ledger.accepted == 2


def test_when_everything_that_arrives_is_stale_the_wait_says_so(open_engine: OpenEngine) -> None:
    engine = open_engine(replay=Replay(max_staleness=1))
    put(engine, "a", "b")
    assert isinstance(engine.plan_step(1), Staged)
    engine.received(1)
    engine.commit(1, 5)
    for name in ("old", "older"):
        assert engine.put(name, name, encode(named_group(name, policy_version=1))) is None
    assert all(outcome.stale for outcome in engine.flush())
    waits = engine.plan_step(2)
    assert isinstance(waits, str)
    assert "the last 2 groups that arrived were dropped as stale (max_staleness 1, policy version 5)" in waits
