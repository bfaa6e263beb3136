"""Puts from asyncio: as durable as others, without a thread for each; one that is cancelled leaves nothing waiting."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.client.async_puts import THREADS, UNDER_WAY
from penstock.convert.filters import Truncated
from penstock.errors import Closed, InvalidInput, Overloaded
from penstock.frames import encode
from penstock.server import PlaneProcess
from tests.client.test_plane_producers import train
from tests.support.groups import named_group
from tests.support.planes import FAST, OpenPlane

TASKS = 1000
LOSS = np.arange(8192) > 0


def rollout(reward: float, *, truncated: bool = False) -> ps.Trajectory:
    turns = [ps.Turn([1, 2]), ps.Turn([3, 4], logprobs=[-0.5, -0.25])]
    return ps.Trajectory(turns=turns, reward=reward, truncated=truncated)


async def until(done: object) -> None:
    assert callable(done)
    async with asyncio.timeout(60):
        while not done():
            await asyncio.sleep(0.01)


def test_tasks_put_groups_and_learn_which_were_there_already(open_plane: OpenPlane, tmp_path: Path) -> None:
    plane = open_plane(tmp_path / "run", ranks=1, listen=[f"ipc://{tmp_path}/s"])

    async def work() -> list[bool]:
        with ps.open(plane.url, timeouts=FAST) as line:
            puts = [plane.aput(named_group("a")), line.aput(named_group("b"))]
            first = await asyncio.gather(*puts, line.aput_frame("c", encode(named_group("c"))))
            return [*first, await line.aput(named_group("a"))]

    assert asyncio.run(work()) == [True, True, True, False]
    assert plane.ledger.accepted == 6


def test_a_group_is_put_where_its_block_ends_and_cancelled_where_it_raises(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, groups_per_step=1)

    async def work() -> None:
        async with plane.agroup("p", policy_version=3, filters=[Truncated()]) as group:

            async def one(reward: float, *, truncated: bool = False) -> None:
                await asyncio.sleep(0)
                group.add(rollout(reward, truncated=truncated))

            await asyncio.gather(one(1.0), one(0.0), one(0.0, truncated=True))
        with pytest.raises(ZeroDivisionError):
            async with plane.agroup("q") as other:
                other.add(rollout(1.0))
                raise ZeroDivisionError
        async with plane.agroup("e", evaluation=True) as seen:
            seen.add(rollout(1.0))

    asyncio.run(work())
    ledger = plane.ledger
    assert ledger.held == 2 and ledger.evaluation == 1 and ledger.discarded == {"truncated": 1}
    with plane.source(0) as source:
        (batch,) = source.step(timeout=60)
        assert sorted(np.unique(batch["advantages"][batch["loss_mask"]]).tolist()) == pytest.approx([-1 / 3, 2 / 3])
        assert batch.segments.policy_versions.tolist() == [3, 3]


def large(i: int, ids: object, logprobs: object) -> list[ps.Sample]:
    """A group of random numbers, which do not become smaller."""
    return [ps.Sample(id=f"{i}", group=f"{i}", token_ids=ids, loss_mask=LOSS, logprobs=logprobs)]  # type: ignore[arg-type]


@pytest.mark.process
@pytest.mark.parametrize("has_room", [True, False])
def test_a_thousand_tasks_put_with_few_threads_and_few_frames(tmp_path: Path, has_room: bool) -> None:
    rng = np.random.default_rng(1)
    ids, logprobs = rng.integers(0, 2**17, len(LOSS), np.uint32), -rng.random(len(LOSS), np.float32)
    size = len(encode(large(0, ids, logprobs)))
    words = [
        str(tmp_path / "run"),
        "--ranks=1",
        "--seq-len=16384",
        "--groups-per-step=1",
        f"--listen=ipc://{tmp_path}/s",
    ]
    more = peak = 0

    async def watch() -> None:
        nonlocal more
        while True:
            more = max(more, threading.active_count() - threads)
            await asyncio.sleep(0.005)

    async def work() -> None:
        nonlocal peak
        watching = asyncio.create_task(watch())
        tracemalloc.start()
        tasks = [asyncio.create_task(line.aput(large(i, ids, logprobs))) for i in range(TASKS)]
        if has_room:
            assert all(await asyncio.gather(*tasks))
        else:
            await until(lambda: line.status()["producers_waiting"] == UNDER_WAY)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        for task in (*tasks, watching):
            task.cancel()
        await asyncio.gather(*tasks, watching, return_exceptions=True)
        await until(lambda: line.status()["producers_waiting"] == 0)  # a task that is cancelled leaves nothing behind

    with PlaneProcess(words if has_room else [*words, "--capacity=1"]) as plane, ps.open(plane.url) as line:
        if not has_room:
            line.put(large(TASKS, ids, logprobs))
        threads = threading.active_count()
        asyncio.run(work())
        assert line.ledger.accepted == (TASKS if has_room else 1)
    assert more <= THREADS
    assert peak < 2 * UNDER_WAY * size + (8 << 20) < TASKS * size / 2


def test_a_task_that_is_cancelled_can_put_its_group_again(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, groups_per_step=1, capacity=1)
    plane.put(named_group("a"))

    async def work() -> bool:
        waiting = asyncio.create_task(plane.aput(named_group("b")))
        await until(lambda: plane.status()["producers_waiting"] == 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(lambda: plane.status()["producers_waiting"] == 0)
        again = asyncio.create_task(plane.aput(named_group("b")))
        await asyncio.to_thread(train, plane, 1)
        return await again

    assert asyncio.run(work())
    assert plane.ledger.accepted == 4


def test_no_room_no_samples_and_no_plane_raise_what_a_put_raises(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, groups_per_step=1, capacity=1)
    plane.put(named_group("a"))

    async def work() -> None:
        for timeout in (0, 0.05):
            with pytest.raises(Overloaded, match="'b'"):
                await plane.aput(named_group("b"), timeout=timeout)
        with pytest.raises(InvalidInput, match="no samples"):
            await plane.aput([])
        waiting = [asyncio.create_task(plane.aput(named_group(f"w{i}"))) for i in range(UNDER_WAY)]
        await until(lambda: plane.status()["producers_waiting"] == UNDER_WAY)
        with pytest.raises(Overloaded, match=f"{UNDER_WAY} puts of this process are running"):
            await plane.aput(named_group("b"), timeout=0)
        assert await plane.aput(named_group("e"), evaluation=True, timeout=0)  # which needs no room
        plane.close()
        assert {type(found) for found in await asyncio.gather(*waiting, return_exceptions=True)} == {Closed}
        with pytest.raises(Closed):
            await plane.aput(named_group("b"))

    asyncio.run(work())


def test_several_event_loops_share_a_plane(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1)

    async def work(name: str) -> list[bool]:
        return await asyncio.gather(*(plane.aput(named_group(f"{name}{i}")) for i in range(2 * UNDER_WAY)))

    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda name: asyncio.run(work(name)), "ab")
    assert all(map(all, found)) and plane.ledger.accepted == 8 * UNDER_WAY
