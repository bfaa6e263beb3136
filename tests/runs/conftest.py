"""Planes whose runs are read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import penstock as ps
from penstock.frames import encode
from penstock.log import SqliteLog
from penstock.packing import Packing
from penstock.plane.settings import PlaneSettings, Target
from penstock.protocol.steps import Staged
from penstock.protocol.timeouts import Timeouts
from penstock.runs.run_log import kept_groups, read_stored
from tests.support.engines import DirectEngine
from tests.support.groups import named_group
from tests.support.pace import pace, stretched

FAST = stretched(Timeouts(heartbeat_s=0.2, peer_s=1.0, delivery_s=3.0, plane_s=5.0, resend_s=0.2), pace())
SETTINGS: dict[str, Any] = {"ranks": 2, "seq_len": 64, "groups_per_step": 2, "timeouts": FAST}


def put(plane: ps.Plane, *names: str, evaluation: bool = False, **more: Any) -> None:
    for name in names:
        plane.put_frame(name, encode(named_group(name, **more)), evaluation=evaluation)


def names_kept(folder: Path) -> list[str]:
    """The groups whose frames are kept, each read and compared with what was put."""
    for row in kept_groups(folder):
        assert bytes(read_stored(folder, row.location)) == encode(named_group(row.id)), row.id
    return [row.id for row in kept_groups(folder)]


def train(plane: ps.Plane, steps: int, *, version: int = 0) -> list[tuple[str, ...]]:
    """Take and commit so many steps on both ranks, one version each; the digests."""
    from concurrent.futures import ThreadPoolExecutor

    found = []
    with ThreadPoolExecutor() as pool:
        sources = [plane.source(rank=rank, prefetch=0) for rank in range(2)]
        for number in range(1, steps + 1):
            taken = list(pool.map(lambda source: source.step(timeout=60), sources))
            found.append(tuple(step.digest for step in taken))
            for source, step in zip(sources, taken, strict=True):
                source.commit(step, policy_version=version + number)
            list(pool.map(lambda source: source.flush(), sources))
        for source in sources:
            source.close()
    return found


def open_engine(folder: Path, **settings: Any) -> DirectEngine:
    made = PlaneSettings(packing=Packing(ranks=2, seq_len=64), target=Target(groups=2), **settings)
    return DirectEngine(made, SqliteLog(folder))


def put_to(engine: DirectEngine, *names: str, evaluation: bool = False) -> None:
    for name in names:
        assert engine.put(name, name, encode(named_group(name)), evaluation=evaluation) is None
    assert all(outcome.error is None for outcome in engine.flush())


def step(engine: DirectEngine, number: int) -> None:
    staged = engine.plan_step(number)
    assert isinstance(staged, Staged), staged
    engine.commit(number, number)


def end(engine: DirectEngine) -> None:
    engine.close()
    engine.log.close()
