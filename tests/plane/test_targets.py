"""A step is as large as its target asks, whichever sampler draws it, and a restart draws the same one."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.frames import encode
from penstock.plane.settings import Target
from penstock.protocol.steps import Staged
from penstock.replay import Fifo, Freshest, Lifo, MaxPriority, Prioritized, Replay, SamplesPerInsert, Uniform
from penstock.replay.selector import Selector
from tests.support.engines import DirectEngine
from tests.support.groups import named_group
from tests.support.planes import OpenEngine

SAMPLERS: list[Selector] = [Fifo(), Lifo(), Uniform(), Prioritized(1.0), MaxPriority(), Freshest(1)]
USES = {"each once": {"max_times_sampled": 1}, "reuse": {"max_times_sampled": None, "remover": Fifo()}}


def tokens_of(i: int) -> int:
    """Every third group is forty times as long as the others."""
    return 40 if i % 3 == 0 else 2


def fill(engine: DirectEngine, count: int, *, run: str = "", samples: int = 1) -> None:
    for i in range(count):
        group = named_group(f"{run}{i}", tokens=tokens_of(i), samples=samples, policy_version=i % 4, run=run)
        assert engine.put(i, f"{run}{i}", encode(group)) is None
    assert all(outcome.error is None for outcome in engine.flush())


def train(engine: DirectEngine) -> list[tuple[str, int, int]]:
    """Take one step: the name, samples and tokens of each of its groups, in the order drawn."""
    step = engine.last_step + 1
    staged = engine.plan_step(step)
    assert isinstance(staged, Staged), staged
    rows = [next(engine.log.groups_of([op])) for op in engine.state.steps[step].groups]
    engine.received(step)
    engine.commit(step, None)
    return [(row.id, row.samples, row.tokens) for row in rows]


@pytest.mark.parametrize("uses", USES)
@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
@pytest.mark.parametrize("unit", ["tokens", pytest.param("samples", marks=pytest.mark.deep)])
def test_a_step_reaches_its_target_with_its_last_group(
    open_engine: OpenEngine, tmp_path: Path, unit: str, sampler: Selector, uses: str
) -> None:
    target = Target(tokens=100) if unit == "tokens" else Target(samples=5)
    settings = {"ranks": 1, "target": target, "replay": Replay(sampler=sampler, **USES[uses])}  # type: ignore[arg-type]
    engine = open_engine(tmp_path, **settings)
    fill(engine, 60, samples=2 if unit == "samples" else 1)
    steps = [train(engine) for _ in range(4)]
    for groups in steps:
        sizes = [tokens if unit == "tokens" else samples for _, samples, tokens in groups]
        assert sum(sizes[:-1]) < target.amount <= sum(sizes)
        assert len({name for name, _, _ in groups}) == len(groups)
    engine.close()
    engine.log.close()
    again = open_engine(tmp_path, **settings)
    assert [again.state.steps[step].groups for step in range(1, 5)] == [
        engine.state.steps[step].groups for step in range(1, 5)
    ]
    assert train(again)


def test_a_restart_with_another_target_redraws_what_was_drawn(open_engine: OpenEngine, tmp_path: Path) -> None:
    replay = Replay(sampler=Uniform())
    engine = open_engine(tmp_path, ranks=1, target=Target(tokens=100), replay=replay)
    fill(engine, 40)
    train(engine)
    engine.close()
    engine.log.close()
    engine = open_engine(tmp_path, ranks=1, target=Target(groups=3), replay=replay)
    assert len(train(engine)) == 3
    engine.close()
    engine.log.close()
    open_engine(tmp_path, ranks=1, target=Target(samples=2), replay=replay)


def test_runs_share_a_step_of_tokens_by_weight_with_any_sampler(open_engine: OpenEngine) -> None:
    replay = Replay(sampler=Uniform())
    engine = open_engine(ranks=1, target=Target(tokens=400), replay=replay, shares={"a": 3.0, "b": 1.0})
    for run in "ab":
        fill(engine, 90, run=run)
    steps = [train(engine) for _ in range(2)]
    assert all(400 <= sum(tokens for _, _, tokens in groups) < 440 for groups in steps)
    taken = engine.tenant_tables.taken
    assert taken["a"] == pytest.approx(3 * taken["b"], abs=160)


def test_what_a_limiter_holds_back_is_left_as_it_was(open_engine: OpenEngine) -> None:
    limiter = SamplesPerInsert(ratio=1.0, min_size=8, error_buffer=4.0, batch_size=6)
    replay = Replay(sampler=Fifo(), limiter=limiter, remover=Fifo(), max_times_sampled=None)
    engine = open_engine(ranks=1, target=Target(tokens=100), replay=replay)
    fill(engine, 8)
    before = engine.tenant_tables.save()
    for _ in range(2):
        waits = engine.plan_step(1)
        assert isinstance(waits, str) and "generation" in waits
        assert engine.tenant_tables.save() == before
