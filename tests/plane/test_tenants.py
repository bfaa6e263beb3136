"""Several runs in one plane: each gets its share of every step, and a bad one does not spoil the others."""

from __future__ import annotations

from collections import Counter
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.cli import main
from penstock.errors import ConfigError, Evicted, InvalidInput, Overloaded, UnknownKey
from penstock.frames import encode
from penstock.packing import Packing
from penstock.plane.acceptance import Outcome
from penstock.plane.settings import PlaneSettings, Replay, Target
from penstock.plane.tenant_tables import TenantTables
from penstock.protocol.steps import Staged
from penstock.replay import Fifo, MinSize, Prioritized
from tests.support.engines import DirectEngine
from tests.support.groups import named_group
from tests.support.planes import OpenEngine, OpenPlane

HALVES = {"a": 1.0, "b": 1.0}


def offer(engine: DirectEngine, name: str, run: str, **group: Any) -> Outcome | None:
    """Put a group; the outcome if it was refused."""
    return engine.put(name, name, encode(named_group(name, run=run, **group))) or next(
        (outcome for outcome in engine.flush() if outcome.error is not None), None
    )


def fill(engine: DirectEngine, run: str, count: int, *, first: int = 0, **group: Any) -> None:
    for i in range(first, first + count):
        assert offer(engine, f"{run}{i}", run, **group) is None


def train(engine: DirectEngine) -> Counter[str]:
    """Plan and commit a step; the tokens that each run had in it."""
    staged = engine.plan_step(engine.last_step + 1)
    assert isinstance(staged, Staged), staged
    groups = engine.state.steps[staged.step].groups
    had = Counter[str]()
    for op in groups:
        had[engine.state.rows[op].run] += engine.state.rows[op].tokens
    engine.commit(staged.step, None)
    return had


# ------------------------------------------------------------------ shares


@pytest.mark.deep
def test_tokens_follow_the_shares_however_long_the_samples_are(open_engine: OpenEngine) -> None:
    engine = open_engine(shares={"a": 3.0, "b": 1.0}, target=Target(tokens=800), max_held_bytes=64 << 20)
    fill(engine, "a", 700, tokens=8)
    fill(engine, "b", 100, tokens=60)
    had = sum((train(engine) for _ in range(10)), Counter[str]())
    assert had["a"] / had["b"] == pytest.approx(3.0, rel=0.05)


@pytest.mark.parametrize("target", [Target(groups=12), Target(samples=24), Target(tokens=144)], ids=str)
def test_a_step_is_shared_whatever_it_is_counted_in(open_engine: OpenEngine, target: Target) -> None:
    engine = open_engine(shares=HALVES, target=target)
    fill(engine, "a", 30)
    fill(engine, "b", 30)
    assert train(engine) == {"a": 72, "b": 72}


def test_what_a_run_leaves_free_goes_to_the_others(open_engine: OpenEngine) -> None:
    engine = open_engine(shares=HALVES, target=Target(groups=6))
    fill(engine, "a", 10)
    fill(engine, "b", 2)
    assert train(engine) == {"a": 4 * 12, "b": 2 * 12}
    fill(engine, "b", 6, first=2)
    assert train(engine) == {"a": 3 * 12, "b": 3 * 12}  # nobody is owed for the time it had nothing


def test_a_run_that_floods_the_plane_leaves_the_others_their_room(open_engine: OpenEngine) -> None:
    size = len(encode(named_group("a0", run="a")))
    engine = open_engine(shares={"a": 1.0, "b": 3.0}, max_held_bytes=12 * size + 40, target=Target(groups=8))
    fill(engine, "a", 3)
    refused = offer(engine, "a3", "a")
    assert refused is not None and isinstance(refused.error, Overloaded)
    assert "the limits (tenant 'a' has its share) are 1," in str(refused.error)
    assert not engine.is_full  # b may still fill the step
    waiting = engine.plan_step(1)
    assert waiting == "generation: 3 of 8 groups; tenant 'a' is at its share of max_held_bytes"
    fill(engine, "b", 9)
    assert train(engine).keys() == {"a", "b"}
    assert offer(engine, "a3", "a") is None


def test_runs_of_all_replay_policies_are_drawn_the_same_after_a_kill(open_engine: OpenEngine, tmp_path: Path) -> None:
    replay = Replay(capacity=8, sampler=Prioritized(0.6), remover=Fifo(), max_times_sampled=None, seed=3)
    kinds: dict[str, Any] = {"shares": {"a": 2.0, "b": 1.0}, "replay": replay, "target": Target(groups=4)}
    straight, killed = open_engine(**kinds), open_engine(tmp_path, **kinds)
    rng = np.random.default_rng(0)
    for step in range(1, 9):
        names = [(f"{run}{step}-{i}", run) for run in ("a", "b") for i in range(3)]
        priorities = {f"{name}/0": float(rng.random()) for name, _ in names}
        digests = []
        for engine in (straight, killed):
            for name, run in names:
                assert offer(engine, name, run) is None
            staged = engine.plan_step(step)
            assert isinstance(staged, Staged)
            digests.append(staged.digests)
            engine.report(priorities, {})
            engine.commit(step, None)
        assert digests[0] == digests[1]
        killed.log.close()
        killed = open_engine(tmp_path, **kinds)
        assert killed.tenant_tables.shares.owed == straight.tenant_tables.shares.owed
    assert killed.tenants() == straight.tenants()


# ------------------------------------------------------------------ who takes part


def test_without_shares_runs_are_not_kept_apart(open_engine: OpenEngine) -> None:
    engine = open_engine()
    fill(engine, "a", 1)
    fill(engine, "b", 1)
    assert train(engine) == {"": 24} and engine.tenants() == {}


def test_a_run_without_a_share_is_refused_and_may_be_given_one(open_engine: OpenEngine) -> None:
    engine = open_engine(shares=HALVES)
    refused = offer(engine, "c0", "c")
    assert refused is not None and isinstance(refused.error, UnknownKey)
    assert "tenant 'c': has no share in this plane, which 'a', 'b' use" in str(refused.error)
    nameless = offer(engine, "x", "")
    assert nameless is not None and isinstance(nameless.error, InvalidInput)
    engine.share("c", 2.0)
    assert offer(engine, "c0", "c") is None
    assert engine.tenants()["c"]["share"] == 0.5


def test_a_group_belongs_to_one_run(open_engine: OpenEngine) -> None:
    engine = open_engine(shares=HALVES)
    mixed = [*named_group("g", samples=1, run="a"), *named_group("g", samples=2, run="b")[1:]]
    outcome = engine.put(1, "g", encode(mixed))
    assert outcome is not None and "samples of runs 'a' and 'b'" in str(outcome.error)


@pytest.mark.parametrize("shares", [{"a": 0.0}, {"a": float("nan")}, {"": 1.0}])
def test_senseless_shares_are_refused(shares: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="shares"):
        PlaneSettings(packing=Packing(ranks=1, seq_len=8), target=Target(groups=1), shares=shares)


# ------------------------------------------------------------------ eviction


def test_an_evicted_run_loses_what_waits_and_the_others_go_on(open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine(tmp_path, shares=HALVES, target=Target(groups=4))
    fill(engine, "a", 6)
    fill(engine, "b", 6)
    train(engine)
    planned = engine.plan_step(2)
    assert isinstance(planned, Staged)
    engine.evict("b", "no rewards since step 40")
    assert engine.ledger.dropped == {"evicted": 4}  # two groups of two samples; four groups are in steps
    refused = offer(engine, "b9", "b")
    assert refused is not None and isinstance(refused.error, Evicted)
    assert "tenant 'b': evicted: no rewards since step 40" in str(refused.error)
    engine.commit(2, None)
    fill(engine, "a", 2, first=6)
    assert train(engine) == {"a": 48}
    engine.log.close()
    again = open_engine(tmp_path, shares=HALVES, target=Target(groups=4))
    assert again.tenant_tables.evicted == {"b": "no rewards since step 40"}  # though the settings still name it
    assert again.ledger == engine.ledger
    assert again.stage_again(2).digests == planned.digests  # what was planned is served as it was
    again.share("b", 1.0)
    assert offer(again, "b9", "b") is None


def test_evicting_a_run_that_is_not_there_says_who_is(open_engine: OpenEngine) -> None:
    with pytest.raises(UnknownKey, match="it has no share; those that have: 'a', 'b'"):
        open_engine(shares=HALVES).evict("c", "unknown")


# ------------------------------------------------------------------ as users see it


def test_a_plane_is_shared_by_two_producers(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, groups_per_step=4, shares=HALVES)
    for i in range(4):
        plane.put(named_group(f"a{i}", run="a"))
        plane.put(named_group(f"b{i}", run="b"))
    with plane.source(rank=0, prefetch=0) as source:
        step = source.step(timeout=120)
        assert {batch.run for batch in step} == {"a", "b"}
        assert step.totals.tenants["a"].loss_tokens == step.totals.tenants["b"].loss_tokens > 0
        source.commit(step)
        source.flush()
    plane.evict("b", "its rewards are wrong")
    with pytest.raises(Evicted, match="its rewards are wrong"):
        plane.put(named_group("b9", run="b"), timeout=0)
    with pytest.raises(InvalidInput, match="use evict"):
        plane.share("b", 0)
    plane.share("b")
    plane.put(named_group("b9", run="b"), timeout=0)
    assert plane.ledger.dropped["evicted"] == 4


def test_the_command_shows_and_changes_shares(
    open_plane: OpenPlane, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"ipc://{tmp_path}/plane"
    plane = open_plane(ranks=1, listen=[url])
    assert main(["tenants", url]) == 0
    assert "this plane has no tenants" in capsys.readouterr().out
    assert main(["tenants", url, "--share", "alpha=3", "--share", "beta"]) == 0
    plane.put(named_group("g", run="alpha"))
    assert main(["top", url, "--once"]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if "alpha" in line]
    assert all("75.0 %" in line for line in shown) and "1" in shown[-1].split()
    assert main(["tenants", url, "--evict", "beta", "--because", "too slow"]) == 0
    assert "evicted: too slow" in capsys.readouterr().out
    for bad in (["--evict", "alpha"], ["--share", "alpha=much"], ["--share", "alpha=-1"]):
        assert main(["tenants", url, *bad]) == 1
    assert main(["tenants", str(tmp_path)]) == 1
    assert "not an address" in capsys.readouterr().err


def test_a_step_that_a_limiter_holds_back_says_so(open_engine: OpenEngine) -> None:
    engine = open_engine(shares=HALVES, target=Target(groups=2), replay=Replay(limiter=MinSize(min_size=5)))
    fill(engine, "a", 2)
    fill(engine, "b", 2)
    assert engine.plan_step(1) == "generation: 4 of 2 groups; MinSize(min_size=5) holds it back"
    fill(engine, "a", 3, first=2)
    assert train(engine) == {"a": 24}


def test_the_part_of_a_run_is_the_same_whichever_order_runs_came_in() -> None:
    weights = {"a": 0.1, "b": 1.0, "c": 0.1, "d": 3.0, "e": 1e-6}
    parts = set()
    for order in permutations(weights):
        tables = TenantTables(Replay(), lambda *_: None)
        for run in order:
            tables.admit(run, weights[run])
        parts.add(tables.part("b"))
    assert len(parts) == 1
