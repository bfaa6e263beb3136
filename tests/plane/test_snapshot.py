"""Memory that was written down: a restart from it ends where a restart from the whole log ends."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.frames import encode
from penstock.log import GroupRow
from penstock.plane.recorder import rebuild
from penstock.plane.settings import Replay
from penstock.plane.snapshot import Saved
from penstock.plane.state import PlaneState
from penstock.plane.tenant_tables import TenantTables
from penstock.protocol.steps import Staged
from penstock.replay import Fifo, Freshest, MinPriority, Prioritized, Uniform
from tests.support.engines import DirectEngine
from tests.support.groups import named_group
from tests.support.planes import OpenEngine, sqlite_of

POLICIES = {
    "queue": Replay(capacity=8),
    "uniform": Replay(capacity=6, sampler=Uniform(), remover=Fifo(), max_times_sampled=3, seed=5),
    "prioritized": Replay(capacity=6, sampler=Prioritized(0.6), remover=MinPriority(), max_times_sampled=None, seed=7),
    "freshest": Replay(capacity=6, sampler=Freshest(2), remover=Fifo(), max_times_sampled=2, max_staleness=2),
}


def live(engine: DirectEngine, first: int, last: int) -> list[list[str]]:
    """What a run with two members does between two step numbers; the digests of its steps."""
    digests = []
    for step in range(first, last):
        rng = np.random.default_rng(step)
        for i in range(4):
            name = f"g{step}-{i}"
            engine.put(name, name, encode(named_group(name, run="ab"[i % 2], policy_version=max(step - 2, 0))))
        engine.flush()
        engine.discard("too short", 1)
        staged = engine.plan_step(step)
        assert isinstance(staged, Staged), staged
        digests.append(staged.digests)
        engine.received(step)
        engine.report({f"g{step}-{i}/0": float(rng.random()) for i in range(4)}, {})
        engine.commit(step, step)
    return digests


def everything(state: PlaneState) -> dict[str, Any]:
    """All that a state knows, as plain data."""
    saved = msgspec.structs.asdict(state.save())
    saved["rows"] = {op: (row.id, row.samples, row.tokens, row.size, row.run) for op, row in state.rows.items()}
    saved["manifests"] = state.steps
    return saved


@pytest.mark.deep
@pytest.mark.parametrize("shares", [{}, {"a": 2.0, "b": 1.0}], ids=["one table_name", "two runs"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_restart_from_memory_equals_one_from_the_whole_log(
    open_engine: OpenEngine, tmp_path: Path, policy: str, shares: dict[str, float]
) -> None:
    kinds: dict[str, Any] = {"replay": POLICIES[policy], "shares": shares, "retain_steps": 3}
    straight = live(open_engine(**kinds), 1, 31)
    engine = open_engine(tmp_path, snapshot_every=1, **kinds)
    got: list[list[str]] = []
    for first in range(1, 31, 5):
        got += live(engine, first, first + 5)
        engine.log.close()  # as after kill -9
        engine = open_engine(tmp_path, snapshot_every=1, **kinds)
    assert got == straight
    taken = engine.log.snapshot()
    assert taken is not None and taken[0] > engine.state.op // 2  # of late, so that the test means something
    short = rebuild(engine.log, POLICIES[policy], retain_steps=3)
    sqlite_of(engine.log).execute("DELETE FROM snapshots")
    whole = rebuild(engine.log, POLICIES[policy], retain_steps=3)
    assert everything(short) == everything(whole) == everything(engine.state)


@pytest.mark.parametrize("damage", ["altered", "other settings", "another format", "another table"])
def test_memory_that_is_of_no_use_is_left_aside(open_engine: OpenEngine, tmp_path: Path, damage: str) -> None:
    engine = open_engine(tmp_path, snapshot_every=1)
    live(engine, 1, 9)
    before = everything(engine.state)
    found = engine.log.snapshot()
    assert found is not None
    saved = msgspec.msgpack.decode(found[1][8:], type=Saved)
    if damage == "altered":
        data = found[1][:100] + bytes([found[1][100] ^ 1]) + found[1][101:]
    elif damage == "another table":
        tenant_tables = msgspec.structs.replace(
            saved.tenant_tables, tables={"": b"PSTABLE0" + saved.tenant_tables.tables[""][8:]}
        )
        data = msgspec.structs.replace(saved, tenant_tables=tenant_tables).to_bytes()
    elif damage == "another format":
        data = msgspec.structs.replace(saved, format=99).to_bytes()
    else:
        data = msgspec.structs.replace(saved, replay="Replay(capacity=1)").to_bytes()
    sqlite_of(engine.log).execute("UPDATE snapshots SET data = ?", (data,))
    engine.log.close()
    assert everything(open_engine(tmp_path).state) == before


def test_a_trainer_may_go_back_behind_the_moment_memory_was_written_down(
    open_engine: OpenEngine, tmp_path: Path
) -> None:
    engine = open_engine(tmp_path, snapshot_every=1)
    digests = live(engine, 1, 21)
    engine.log.close()
    again = open_engine(tmp_path, snapshot_every=1)
    again.resume(2, 3)
    assert [again.stage_again(step).digests for step in range(3, 21)] == digests[2:]
    again.log.close()
    third = open_engine(tmp_path)
    assert third.next_step == 3 and third.ledger == again.ledger


@pytest.mark.deep
def test_a_restart_reads_only_what_came_later(open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine(tmp_path, snapshot_every=1, retain_steps=2)
    live(engine, 1, 60)
    engine.log.close()
    seen: list[str] = []
    again = open_engine(tmp_path, retain_steps=2)
    sqlite_of(again.log).set_trace_callback(seen.append)
    rebuild(again.log, Replay(), retain_steps=2)
    sqlite_of(again.log).set_trace_callback(None)
    held = len(again.state.rows)
    single = [query for query in seen if "WHERE op = " in query]
    assert len(single) <= 2 * held + 8 and held < 140  # of the 236 groups that were ever accepted


def test_a_restart_makes_a_large_table_once() -> None:
    """A table takes memory by its capacity: a second one beside it would be 76 MB more at a million items."""

    def peak_of(make: Callable[[], TenantTables]) -> tuple[TenantTables, int]:
        tracemalloc.start()
        try:
            return make(), tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    def restored() -> TenantTables:
        tables = TenantTables(replay, lambda _key, _reason: None)
        tables.load(saved)
        return tables

    replay = Replay(capacity=1 << 18)
    made, once = peak_of(lambda: TenantTables(replay, lambda _key, _reason: None))
    made.insert(GroupRow(1, "g", b"", 0, 16, 100, 100), 0, 1)
    saved = made.save()
    found, peak = peak_of(restored)
    assert list(found) == ["g"] and peak < 1.2 * once
