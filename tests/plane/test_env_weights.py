"""Environments share every step in proportion to their weights, with every sampler, and a restart draws the same."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.commands.top import looking
from penstock.commands.top import page as top_page
from penstock.errors import ConfigError, InvalidInput, Overloaded, UnknownKey
from penstock.frames import encode
from penstock.plane.settings import PlaneSettings, Target
from penstock.protocol.steps import Staged
from penstock.replay import Fifo, Lifo, Prioritized, Replay, Uniform
from penstock.replay.selector import Selector
from tests.support.engines import DirectEngine
from tests.support.groups import named_group
from tests.support.planes import FAST, OpenEngine, OpenPlane

WEIGHTS = {"math": 2.0, "code": 1.0}
SAMPLERS: list[Selector] = [Fifo(), Lifo(), Uniform(), Prioritized(1.0)]


def fill(engine: DirectEngine, env: str, count: int, *, first: int = 0, **group: Any) -> None:
    for i in range(first, first + count):
        assert engine.put(i, f"{env}{i}", encode(named_group(f"{env}{i}", env=env, **group))) is None
    assert all(outcome.error is None for outcome in engine.flush())


def train(engine: DirectEngine) -> list[str]:
    """Take one step; the groups in it."""
    step = engine.last_step + 1
    staged = engine.plan_step(step)
    assert isinstance(staged, Staged), staged
    names = [next(engine.log.groups_of([op])).id for op in engine.state.steps[step].groups]
    engine.received(step)
    engine.commit(step, None)
    return names


def shares(names: list[str]) -> Counter[str]:
    return Counter(name.rstrip("0123456789") for name in names)


@pytest.mark.parametrize(
    ("groups", "sampler"),
    [
        (4, SAMPLERS[0]),
        (7, SAMPLERS[-1]),
        *(pytest.param(4, sampler, marks=pytest.mark.deep) for sampler in SAMPLERS[1:]),
        pytest.param(3, SAMPLERS[0], marks=pytest.mark.deep),
    ],
    ids=repr,
)
def test_every_step_has_the_proportion_and_a_restart_goes_on_with_it(
    open_engine: OpenEngine, tmp_path: Path, sampler: Selector, groups: int
) -> None:
    settings = {"target": Target(groups=groups), "replay": Replay(sampler=sampler), "env_weights": WEIGHTS}
    straight = open_engine(ranks=1, **settings)
    for env, count in (("math", 60), ("code", 40)):
        fill(straight, env, count)
    whole = [train(straight) for _ in range(9)]
    for names in whole:
        assert abs(shares(names)["math"] - groups * 2 / 3) < 1
    assert sum(map(shares, whole), Counter()) == {"math": groups * 6, "code": groups * 3}
    engine = open_engine(tmp_path, ranks=1, **settings)
    for env, count in (("math", 60), ("code", 40)):
        fill(engine, env, count)
    parts = []
    for _ in range(9):
        parts.append(train(engine))
        engine.log.close()  # nothing more is written: as after kill -9
        engine = open_engine(tmp_path, ranks=1, **settings)
    assert parts == whole


@pytest.mark.parametrize("unit", ["samples", "tokens"])
def test_other_targets_are_shared_in_their_own_unit(open_engine: OpenEngine, unit: str) -> None:
    target = Target(samples=24) if unit == "samples" else Target(tokens=240)
    engine = open_engine(ranks=1, target=target, env_weights=WEIGHTS, max_held_bytes=64 << 20)
    fill(engine, "math", 150, samples=1, tokens=10)
    fill(engine, "code", 50, samples=4, tokens=20)
    taken = Counter[str]()
    for _ in range(6):
        train(engine)
        for op in engine.state.steps[engine.last_step].groups:
            row = engine.state.rows[op]
            taken[row.run] += row.samples if unit == "samples" else row.tokens
    assert taken["math"] / taken["code"] == pytest.approx(2.0, abs=0.35)


def test_a_step_waits_for_an_environment_and_says_for_which(open_engine: OpenEngine) -> None:
    engine = open_engine(ranks=1, target=Target(groups=6), env_weights=WEIGHTS)
    fill(engine, "math", 30)
    fill(engine, "code", 1)
    assert engine.plan_step(1) == "generation: 31 of 6 groups; environment 'code': 1 of 2"
    fill(engine, "code", 1, first=1)
    assert shares(train(engine)) == {"math": 4, "code": 2}
    assert engine.plan_step(2) == "generation: 26 of 6 groups; environment 'code': 0 of 2"
    tokens = open_engine(ranks=1, target=Target(tokens=30), env_weights=WEIGHTS)
    fill(tokens, "math", 30)
    assert tokens.plan_step(1) == "generation: environment 'code' has too few groups for 30 tokens"
    assert tokens.plan_step(1) == "generation: 360 of 30 tokens; environment 'code': none"


@pytest.mark.parametrize("sampler", [Fifo(), Uniform(), Prioritized(1.0)], ids=["fifo", "uniform", "prioritized"])
def test_a_draw_that_an_environment_cannot_fill_takes_nothing(open_engine: OpenEngine, sampler: Selector) -> None:
    settings = {"target": Target(tokens=120), "replay": Replay(sampler=sampler), "env_weights": WEIGHTS}
    engine, straight = open_engine(ranks=1, **settings), open_engine(ranks=1, **settings)
    for one in (engine, straight):
        fill(one, "math", 30)
        fill(one, "code", 1)
    assert engine.plan_step(1) == "generation: environment 'code' has too few groups for 120 tokens"
    for _ in range(2):
        waits_for = "generation: 372 of 120 tokens; environment 'code' has too few groups for 120 tokens"
        assert engine.plan_step(1) == waits_for
    for one in (engine, straight):
        fill(one, "code", 9, first=1)
    assert train(engine) == train(straight)


def test_groups_of_other_environments_are_rejected_and_evaluation_is_not(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, groups_per_step=3, env_weights=WEIGHTS)
    with pytest.raises(UnknownKey, match="environment 'chat': has no weight in this plane, which has 'code', 'math'"):
        plane.put(named_group("c", env="chat"))
    with pytest.raises(UnknownKey, match="environment ''"):
        plane.put(named_group("none"))
    mixed = [*named_group("m", env="math", samples=1), *named_group("m", env="code", samples=2)[1:]]
    with pytest.raises(InvalidInput, match="samples of environments 'code', 'math'; with env_weights it has one"):
        plane.put(mixed)
    assert plane.put(named_group("e", env="aime"), evaluation=True)
    with pytest.raises(InvalidInput, match="shares its steps among environments"):
        plane.share("math", 3.0)
    with pytest.raises(InvalidInput, match="shares its steps among environments"):
        plane.evict("math", "why")
    status = plane.status()
    assert status["tenants"] == {}
    assert [round(env["share"], 2) for env in status["envs"].values()] == [0.33, 0.67]


def test_weights_may_change_at_a_start_and_the_choice_of_tables_may_not(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ranks": 1, "seq_len": 64, "groups_per_step": 4, "timeouts": FAST}
    with ps.open(tmp_path / "run", env_weights=WEIGHTS, **settings) as plane:
        plane.put_many([named_group(f"{env}{i}", env=env) for env in WEIGHTS for i in range(6)])
    for shares_given in ({}, WEIGHTS):
        with pytest.raises(ConfigError, match="the run began with some"):
            ps.open(tmp_path / "run", shares=shares_given, **settings)
    with ps.open(tmp_path / "run", env_weights={"math": 1.0, "chat": 3.0}, **settings) as plane:
        assert plane.ledger.dropped == {"evicted": 12}  # `code` has no weight any more
        plane.put_many([named_group(f"chat{i}", env="chat") for i in range(3)])
        with plane.source(0, prefetch=0) as source:
            step = source.step(timeout=60)
            source.commit(step)
            source.flush()
        events = list(plane.feedback())
        assert Counter((event.outcome, event.env) for event in events) == {
            ("dropped", "code"): 6,
            ("trained", "chat"): 3,
            ("trained", "math"): 1,
        }
    with pytest.raises(ConfigError, match="give one of the two"):
        ps.open(tmp_path / "other", env_weights=WEIGHTS, shares=WEIGHTS, **settings)
    with ps.open(tmp_path / "plain", **settings) as plane:
        plane.put(named_group("a"))
    with pytest.raises(ConfigError, match="the run began without it"):
        ps.open(tmp_path / "plain", env_weights=WEIGHTS, **settings)


@pytest.mark.deep
def test_an_environment_that_floods_does_not_keep_the_others_out(open_plane: OpenPlane, tmp_path: Path) -> None:
    plane = open_plane(
        tmp_path / "run", ranks=1, groups_per_step=2, env_weights={"org/math": 1.0, "code": 1.0}, capacity=4
    )

    async def flood() -> None:
        async with asyncio.TaskGroup() as tasks:
            for i in range(100):  # more than the places of one environment
                tasks.create_task(plane.aput(named_group(f"math{i}", env="org/math")))
            for i in range(100):
                tasks.create_task(plane.aput(named_group(f"code{i}", env="code")))
            await asyncio.to_thread(take)

    def take() -> None:
        with plane.source(0, prefetch=0) as source:
            for _ in range(100):
                source.commit(source.step(timeout=60))
            source.flush()

    with pytest.raises(Overloaded):
        for i in range(1000, 1010):
            plane.put(named_group(f"math{i}", env="org/math"), timeout=0)
    assert plane.put(named_group("code1000", env="code"), timeout=120)
    asyncio.run(flood())
    assert plane.ledger.committed == 400


def test_top_shows_the_environments(tmp_path: Path) -> None:
    with ps.open(
        tmp_path / "run",
        listen=[f"ipc://{tmp_path}/s"],
        ranks=1,
        seq_len=64,
        groups_per_step=4,
        env_weights=WEIGHTS,
        timeouts=FAST,
    ) as plane:
        plane.put(named_group("a", env="math"))
        with looking(plane.url) as look:
            text = "\n".join(top_page(look(), {}))
    assert "envs" in text and "environment" in text and "66.7 %" in text


def test_names_and_weights_are_checked() -> None:
    from penstock.packing import Packing

    for weights in (
        {"": 1.0},
        {"a": 0.0},
        {"a": -1.0},
        {"a": float("nan")},
        {"a": 1e9},
        {"a\n": 1.0},
        {"x" * 201: 1.0},
    ):
        with pytest.raises(ConfigError):
            PlaneSettings(packing=Packing(ranks=1, seq_len=8), target=Target(groups=1), env_weights=weights)
