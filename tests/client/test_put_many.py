"""Many groups in one call: the same as one by one, with one round trip, one write and one transaction."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.client import EncodedGroup
from penstock.client.async_puts import UNDER_WAY
from penstock.errors import Closed, InvalidInput, Overloaded, PenstockError, PlaneLost, PutManyError
from penstock.frames import encode
from penstock.runs import RecordedRun
from tests.client.test_async_puts import until
from tests.client.test_plane_producers import train
from tests.client.test_plane_producers import until as until_so
from tests.plane.test_path import counting
from tests.support.groups import named_group
from tests.support.pace import pace
from tests.support.planes import FAST, PATIENT, OpenPlane

ROOM: dict[str, Any] = {"ranks": 1, "groups_per_step": 1, "capacity": 4}


def groups(names: Sequence[str]) -> Iterator[list[ps.Sample]]:
    return (named_group(name) for name in names)


def names(count: int, prefix: str = "g") -> list[str]:
    return [f"{prefix}{number:03}" for number in range(count)]


def is_full(plane: ps.Plane) -> bool:
    """Whether the plane holds four groups of two samples."""
    return bool(plane.ledger.held == 8)


# ------------------------------------------------------------------ the same as one by one

PUTS = st.lists(st.tuples(st.integers(0, 7), st.sampled_from(["good", "good", "good", "other", "broken"])), max_size=12)


def encoded(prefix: str, number: int, kind: str) -> EncodedGroup:
    """A group; one that has the same id and other content; or a frame that cannot be read."""
    name = f"{prefix}-{number}"
    frame = encode(named_group(name, tokens=6 if kind != "other" else 8))
    return EncodedGroup.of_frame(name, frame if kind != "broken" else frame[: len(frame) // 2], evaluation=False)


def one_by_one(plane: ps.Plane, batch: Sequence[EncodedGroup]) -> list[bool | type[PenstockError]]:
    found: list[bool | type[PenstockError]] = []
    for group in batch:
        try:
            found.append(not plane.deliver(group, None).duplicate)
        except PenstockError as error:
            found.append(type(error))
    return found


def at_once(plane: ps.Plane, batch: Sequence[EncodedGroup]) -> list[bool | type[PenstockError]]:
    try:
        return list(plane.put_many(batch))
    except PutManyError as error:
        return [one if isinstance(one, bool) else type(one) for one in error.results]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[Path, ps.Plane]]]:
    folders = [tmp_path_factory.mktemp("runs") / name for name in ("many", "single")]
    settings: Any = {"ranks": 1, "seq_len": 64, "groups_per_step": 1, "timeouts": FAST}
    planes = [ps.open(folder, **settings) for folder in folders]
    yield list(zip(folders, planes, strict=True))
    for plane in planes:
        plane.close()


_examples = iter(range(1 << 20))


@settings(max_examples=20, deadline=None)
@given(puts=PUTS)
def test_a_batch_leaves_the_log_and_the_frames_that_single_puts_leave(
    pair: list[tuple[Path, ps.Plane]], puts: list[tuple[int, str]]
) -> None:
    batch = [encoded(f"e{next(_examples)}", *put) for put in puts]
    # A group and its repeat in one batch are both under way, and the second is answered with the first.
    (many, batched), (single, plain) = pair
    assert at_once(batched, batch) == one_by_one(plain, batch)
    runs = [RecordedRun.open(folder) for folder in (many, single)]
    rows = [[(row.id, row.digest, row.tokens, row.state) for row in run.in_order()] for run in runs]
    assert rows[0] == rows[1]
    assert all(runs[0].frame(row.op) == runs[1].frame(row.op) for row in list(runs[0].in_order())[-12:])
    assert batched.ledger == plain.ledger


@pytest.mark.parametrize("is_direct", [True, False])
def test_a_batch_takes_one_message_one_write_and_one_transaction(
    open_plane: OpenPlane, tmp_path: Path, is_direct: bool
) -> None:
    hops = [
        "penstock.storage.writer:Writer.write",
        "penstock.log.decision_log:Log.add_groups",
        "penstock.protocol.bundles:unbundled",
        "penstock.plane.acceptance:Acceptance.offer",
    ]
    with counting(hops) as counts:
        plane = open_plane(tmp_path / "run", ranks=1, direct=is_direct, timeouts=PATIENT)
        plane.put(named_group("first"))  # attaches and opens a segment
        before = counts()
        assert plane.put_many(groups(names(8))) == [True] * 8
        after = counts()
        assert {hop: after[hop] - before[hop] for hop in hops} == dict(zip(hops, (1, 1, 1, 8), strict=True))
        plane.close()


def test_groups_are_taken_from_the_caller_as_they_are_needed(open_plane: OpenPlane) -> None:
    plane, pulled = open_plane(**ROOM), []

    def lazily() -> Iterator[list[ps.Sample]]:
        for name in names(UNDER_WAY * 3):
            pulled.append(name)
            yield named_group(name)

    with ThreadPoolExecutor(1) as pool:
        putting = pool.submit(plane.put_many, lazily())
        until_so(lambda: is_full(plane))
        assert len(pulled) <= UNDER_WAY
        plane.close()
        with pytest.raises(PutManyError) as found:
            putting.result(60)
    assert found.value.results[:4] == (True,) * 4
    assert {type(one) for one in found.value.results[4:]} == {PlaneLost}
    assert len(found.value.results) == UNDER_WAY  # the others were never sent


def test_an_empty_batch_and_things_that_are_no_groups(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1)
    assert plane.put_many([]) == []
    with pytest.raises(
        PutManyError, match=r"1 of 3 groups failed, .* groups\[1\]: InvalidInput: .*no samples"
    ) as found:
        plane.put_many([named_group("a"), [], named_group("b")])
    assert isinstance(found.value.failed[1], InvalidInput)
    again = copy.copy(found.value)  # by `__reduce__`, as frameworks send exceptions between processes
    assert str(again) == str(found.value) and again.results[0] is True
    assert plane.put_many([named_group("a"), named_group("c")], evaluation=False) == [False, True]
    assert plane.put_many([named_group("e")], evaluation=True) == [True]
    assert plane.ledger.evaluation == 2
    plane.close()
    with pytest.raises(Closed):
        plane.put_many([named_group("a")])


# ------------------------------------------------------------------ room


@pytest.mark.parametrize("where", ["memory:", "folder"])
def test_a_batch_larger_than_the_table_goes_on_as_the_trainer_consumes(
    open_plane: OpenPlane, tmp_path: Path, where: str
) -> None:
    plane = open_plane(where if where != "folder" else tmp_path / "run", retain="all", **ROOM)
    wanted = names(20)
    with ThreadPoolExecutor(1) as pool:
        putting = pool.submit(plane.put_many, groups(wanted))
        until_so(lambda: is_full(plane))
        train(plane, 16)
        assert putting.result(120) == [True] * 20
    if where == "folder":
        assert [row.id for row in RecordedRun.open(tmp_path / "run").in_order()] == wanted


@pytest.mark.parametrize("timeout", [0, 0.2])
def test_what_finds_no_room_in_time_says_so_and_the_others_are_durable(open_plane: OpenPlane, timeout: float) -> None:
    plane = open_plane(**ROOM)
    with pytest.raises(PutManyError) as found:
        plane.put_many(groups(names(7)), timeout=timeout)
    assert [one if one is True else type(one) for one in found.value.results] == [True] * 4 + [Overloaded] * 3
    assert plane.status()["producers_waiting"] == 0
    states = plane.has(names(7))
    assert [one.state for one in states.values()] == ["held"] * 4 + ["unknown"] * 3
    train(plane, 4)
    assert plane.put_many(groups(names(7)), timeout=60) == [False] * 4 + [True] * 3


def test_a_tenant_without_room_does_not_hold_up_the_others(open_plane: OpenPlane) -> None:
    size = max(len(encode(named_group(f"x{i}", run="x"))) for i in range(10))
    plane = open_plane(ranks=1, groups_per_step=1, shares={"a": 1.0, "b": 1.0}, max_held_bytes=int(size * 4.5))
    batch = [named_group(f"{run}{i}", run=run) for run in "ab" for i in range(3)]
    with pytest.raises(PutManyError) as found:
        plane.put_many(batch, timeout=0.5 * pace())
    results = [one is True for one in found.value.results]
    assert results == [True, True, False] * 2


def test_two_producers_put_batches_at_the_same_time_and_each_keeps_its_order(
    open_plane: OpenPlane, tmp_path: Path
) -> None:
    plane = open_plane(tmp_path / "run", listen=[f"ipc://{tmp_path}/s"], **(ROOM | {"retain": "all"}))
    wanted = [names(12, "a"), names(12, "b")]

    def put(mine: list[str]) -> list[bool]:
        with ps.open(plane.url, timeouts=FAST) as line:
            return line.put_many(groups(mine))

    with ThreadPoolExecutor(2) as pool:
        putting = [pool.submit(put, mine) for mine in wanted]
        train(plane, 20)
        assert [one.result(120) for one in putting] == [[True] * 12] * 2
    found = [row.id for row in RecordedRun.open(tmp_path / "run").in_order()]
    assert [[name for name in found if name.startswith(prefix)] for prefix in "ab"] == wanted


# ------------------------------------------------------------------ asyncio


def test_batches_of_tasks_share_the_places_of_a_process(open_plane: OpenPlane, tmp_path: Path) -> None:
    plane = open_plane(tmp_path / "run", ranks=1, capacity=1000)

    async def work() -> list[list[bool]]:
        batches = [plane.aput_many(groups(names(UNDER_WAY, prefix))) for prefix in "abc"]
        return await asyncio.gather(*batches, plane.aput_many(groups(names(2, "a"))))

    found = asyncio.run(work())
    assert [len(one) for one in found] == [UNDER_WAY] * 3 + [2]
    assert plane.ledger.accepted == 2 * 3 * UNDER_WAY


def test_a_batch_that_is_cancelled_leaves_nothing_waiting_and_can_be_put_again(open_plane: OpenPlane) -> None:
    plane = open_plane(**ROOM)

    async def work() -> list[bool]:
        waiting = asyncio.create_task(plane.aput_many(groups(names(10))))
        await until(lambda: is_full(plane) and plane.status()["producers_waiting"] == 6)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(lambda: plane.status()["producers_waiting"] == 0)
        assert [one.is_known for one in (await plane.ahas(names(10))).values()] == [True] * 4 + [False] * 6
        again = asyncio.create_task(plane.aput_many(groups(names(10))))
        await asyncio.to_thread(train, plane, 6)
        return await again

    assert asyncio.run(work()) == [False] * 4 + [True] * 6


def test_a_batch_waits_for_a_place_no_longer_than_it_may(open_plane: OpenPlane) -> None:
    plane = open_plane(**ROOM)

    async def work() -> None:
        first = asyncio.create_task(plane.aput_many(groups(names(UNDER_WAY))))
        await until(lambda: is_full(plane) and plane.status()["producers_waiting"] == UNDER_WAY - 4)
        with pytest.raises(PutManyError, match="64 puts of this process are running"):
            await plane.aput_many(groups(names(2, "b")), timeout=0.05)
        first.cancel()

    asyncio.run(work())
