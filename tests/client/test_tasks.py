"""Prompt tasks as workers use them: leased, renewed, completed, returned, cancelled, over every transport."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.client import Task
from penstock.client.prompt_lists import read_prompts
from penstock.commands.top import _from_plane, page
from penstock.convert import ZeroVariance
from penstock.errors import InvalidInput, UnknownKey
from penstock.protocol import MAX_PROMPT_BYTES
from tests.support.pace import eventually, pace
from tests.support.planes import FAST, OpenPlane

NAMES = [f"p{number}" for number in range(6)]


def add(group: Any, *rewards: float) -> None:
    for reward in rewards or (0.0, 1.0):
        turns = [ps.Turn([1, 2]), ps.Turn([3, 4], logprobs=[-0.5, -0.5])]
        group.add(ps.Trajectory(turns=turns, reward=reward))


def work(task: Task, **fields: Any) -> None:
    with task.group(**fields) as group:
        add(group)


def train(plane: ps.Plane, steps: int) -> None:
    with plane.source(0, prefetch=0) as source:
        for version in range(1, steps + 1):
            source.commit(source.step(timeout=60), policy_version=version)
        source.flush()


def take(plane: ps.Plane, count: int = 1, **settings: Any) -> list[Task]:
    """The next tasks, held by the caller."""
    tasks = iter(plane.tasks(NAMES, lease_s=0.5 * pace(), **settings))
    return [next(tasks) for _ in range(count)]


@pytest.fixture
def plane(open_plane: OpenPlane) -> ps.Plane:
    return open_plane(ranks=1, groups_per_step=2)


def test_every_prompt_is_handed_out_once_per_epoch_in_a_seeded_order(plane: ps.Plane) -> None:
    names = [f"p{number}" for number in range(40)]
    found: list[tuple[int, str]] = []
    for task in plane.tasks(names, epochs=3, seed=7, batch=16):
        found.append((task.epoch, task.prompt))
        work(task)
    orders = [[name for epoch, name in found if epoch == number] for number in (1, 2, 3)]
    assert all(sorted(order) == sorted(names) for order in orders)
    assert len({tuple(order) for order in [*orders, names]}) == 4
    assert [epoch for epoch, _ in found] == sorted(epoch for epoch, _ in found)
    demand = plane.demand()["prompts"]
    assert (demand["ended"], demand["held"], demand["left"], demand["leased"]) == (True, 120, 0, 0)
    assert list(plane.tasks(names, epochs=3, seed=7)) == []


def test_group_and_payload_are_filled_in(plane: ps.Plane, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"name": "b", "question": "1 + 1?", "answer": [2]}\n\n"a"\n')
    seen = {}
    for task in plane.tasks(file, order=ps.Sequential(shuffle=False)):
        seen[task.prompt] = task.payload
        with task.group() as group:
            add(group)
            assert (group.id, group.prompt, group.policy_version) == (task.id, task.prompt, 0)
    assert seen == {"b": {"name": "b", "question": "1 + 1?", "answer": [2]}, "a": None}
    assert plane.has(["task:prompts:1:0:0"])["task:prompts:1:0:0"].state == "held"


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([], "none; give at least one"),
        (["a", "b", "a"], r"prompts\[2\]: 'a' is also the name of prompts\[0\]"),
        ([{"question": "?"}], r"prompts\[0\]: .* give a name, or an object with one"),
        ([{"name": "a", "bad": object()}], "is not JSON"),
        ([{"name": "a", "list": [{"x": float("nan")}]}], "'a' holds NaN or an infinite number"),
        ([{"name": "a", "text": "x" * MAX_PROMPT_BYTES}], "give at most 65,536"),
        ([""], "a name of 0 characters"),
        (["a\0b"], r"holds the control character U\+0000"),
        (["\ud800"], r"holds the control character U\+D800"),
        ([7], "give a name"),
        ("nowhere.jsonl", "is no file"),
    ],
)
def test_prompts_that_cannot_be_listed_say_why(prompts: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        read_prompts(prompts)


@pytest.mark.parametrize("settings", [{"epochs": 0}, {"seed": -1}, {"name": ""}, {"attempts": 0}, {"batch": 65}])
def test_settings_out_of_range_are_rejected(plane: ps.Plane, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        next(iter(plane.tasks(NAMES, **settings)))


def test_a_lease_out_of_range_is_rejected(plane: ps.Plane) -> None:
    with pytest.raises(InvalidInput, match=r"lease_s: 0\.01; give from 0\.5"):
        next(iter(plane.tasks(NAMES, lease_s=0.01)))


@pytest.fixture(params=["tcp", "ipc", "file"])
def reach(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], ps.Plane]]:
    """Connect to a plane over each transport."""
    listen = {"tcp": "tcp://127.0.0.1:*", "ipc": f"ipc://{tmp_path}/s", "file": f"file://{tmp_path}/mail"}
    settings: dict[str, Any] = {"ranks": 1, "seq_len": 64, "groups_per_step": 2, "timeouts": FAST}
    with ps.open(tmp_path / "run", listen=[listen[request.param]], **settings) as served:
        yield lambda: ps.open(served.url, timeouts=FAST)


def test_several_workers_share_a_list_over_every_transport(reach: Callable[[], ps.Plane]) -> None:
    done: Counter[tuple[int, str]] = Counter()

    def run() -> None:
        with reach() as mine:
            for task in mine.tasks(NAMES, epochs=2, batch=2):
                work(task)
                done[task.epoch, task.prompt] += 1

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert done == dict.fromkeys([(epoch, name) for epoch in (1, 2) for name in NAMES], 1)


def test_a_worker_that_generates_for_many_prompts_takes_batches(plane: ps.Plane) -> None:
    sizes = []
    for tasks in plane.tasks(NAMES, epochs=2).batches(5):
        sizes.append(len(tasks))
        for task in tasks:
            work(task)
    assert sizes == [5, 5, 2]


def test_async_workers_lease_and_put_at_once(plane: ps.Plane) -> None:
    async def main() -> int:
        count = 0
        async with asyncio.TaskGroup() as tasks:
            async for task in plane.tasks(NAMES, epochs=2):
                tasks.create_task(one(task))
                count += 1
        return count

    async def one(task: Task) -> None:
        async with task.agroup() as group:
            await asyncio.sleep(0.01)
            add(group)

    assert asyncio.run(main()) == 12
    assert plane.demand()["prompts"]["ended"]


def test_a_process_that_stops_or_fails_leaves_its_tasks_to_others(plane: ps.Plane) -> None:
    (first,) = take(plane)
    first.give_back()
    (again,) = take(plane)
    assert (again.id, again.attempt) == (first.id, 0)
    with pytest.raises(ZeroDivisionError), again.group():
        raise ZeroDivisionError
    eventually(lambda: plane.demand()["prompts"]["again"] == {"rollout failed": 1})
    (third,) = take(plane)
    assert (third.prompt, third.attempt) == (first.prompt, 1)
    del third  # left without a put
    gc.collect()
    eventually(lambda: plane.demand()["prompts"]["again"] == {"rollout failed": 2})
    tasks = iter(plane.tasks(NAMES, batch=4))
    work(next(tasks))
    tasks.close()  # type: ignore[attr-defined]
    eventually(lambda: plane.demand()["prompts"]["leased"] == 0)
    assert plane.demand()["prompts"]["left"] == len(NAMES) - 1


def test_a_prompt_that_always_fails_is_dropped_after_its_attempts(plane: ps.Plane) -> None:
    tried: Counter[str] = Counter()
    for task in plane.tasks(["good", "bad"], attempts=3):
        tried[task.prompt] += 1
        try:
            with task.group() as group:
                add(group)
                assert task.prompt == "good"
        except AssertionError:
            continue
    assert tried == {"good": 1, "bad": 3}
    assert plane.demand()["prompts"]["dropped"] == {"rollout failed": 1}


def test_a_failed_attempt_counts_although_its_worker_closes_at_once(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, groups_per_step=2, listen=["tcp://127.0.0.1:*"])
    for _ in range(2):
        with ps.open(plane.url) as worker, pytest.raises(ZeroDivisionError):
            for task in worker.tasks(["bad"], attempts=2):
                with task.group():
                    raise ZeroDivisionError
    eventually(lambda: plane.demand()["prompts"]["dropped"] == {"rollout failed": 1})


def test_what_filters_drop_is_dropped_or_made_again_as_configured(plane: ps.Plane) -> None:
    for again, tries in (((), 1), (("zero variance",), 4)):
        tried = 0
        for task in plane.tasks(["x"], name=f"list {tries}", again=again, attempts=4):
            tried += 1
            with task.group(filters=[ZeroVariance()]) as group:
                add(group, 1.0, 1.0)
        assert tried == tries
        (reason,) = plane.demand()[f"list {tries}"]["dropped"]
    assert reason == "zero variance"


def test_a_lease_is_renewed_while_its_process_lives_and_the_slower_of_two_does_not_raise(plane: ps.Plane) -> None:
    (task,) = take(plane)
    server = plane._server
    assert server is not None
    started = server.engine.counts["leases_expired"]
    assert not task.cancelled.wait(2.0)  # four times lease_s
    assert server.engine.counts["leases_expired"] == started
    plane._connection.renewals.release(task.lease)  # as if this process was paused
    eventually(lambda: server.engine.counts["leases_expired"] == started + 1)
    (other,) = take(plane)
    assert other.id == task.id
    work(other)
    with task.group() as group:
        add(group, 0.5, 0.7)
    assert task.is_late and not other.is_late
    assert plane.status()["counts"]["tasks_late"] == plane.counts.num_late == 1
    assert plane.ledger.accepted == 2


def test_a_task_is_cancelled_when_another_worker_completes_it(plane: ps.Plane) -> None:
    (task,) = take(plane)
    with plane.group(task.prompt, id=task.id, policy_version=0) as group:
        add(group)
    assert task.cancelled.wait(60)
    assert "completed" in task.cancelled.reason
    work(task)
    assert plane.ledger.accepted == 2


def test_a_task_is_cancelled_when_its_result_would_be_too_stale(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, groups_per_step=1, max_staleness=1)
    slow, *quick = take(plane, 3)
    for task in quick:
        work(task)

    async def wait() -> str:
        return await slow.cancelled

    train(plane, 2)
    assert asyncio.run(wait()).startswith("too stale: leased at policy version 0, now ")
    assert slow.cancelled and slow.cancelled.is_set()
    work(slow)  # its worker did not look: the group is dropped, and made again
    assert plane.demand()["prompts"]["again"]["stale"] >= 1
    (again,) = [task for task in take(plane, 3) if task.prompt == slow.prompt]
    assert (again.attempt, again.policy_version) == (1, plane.policy_version)


def test_an_evicted_tenant_gets_no_tasks_and_its_workers_end(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1)
    plane.share("mine")
    (task,) = take(plane, tenant="mine")
    plane.evict("mine", "enough")
    assert task.cancelled.wait(60)
    assert task.cancelled.reason == "tenant 'mine' was evicted"
    assert list(plane.tasks(NAMES, tenant="mine")) == []
    plane.share("mine")
    task.give_back()
    assert [one.prompt for one in take(plane, tenant="mine")] == [task.prompt]


def test_a_list_continues_after_a_restart_and_may_change(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"ranks": 1, "seq_len": 64, "groups_per_step": 2, "timeouts": FAST}
    with ps.open(tmp_path / "run", **settings) as plane:
        tasks = iter(plane.tasks(NAMES, epochs=2))
        first = [next(tasks) for _ in range(3)]
        for task in first[:2]:
            work(task)
        sent = plane.status()["counts"]
        del task
    assert sent["groups"] == 2
    with ps.open(tmp_path / "run", **settings) as plane:
        # p0 is gone, p9 is new: it comes at the end of the epoch that was under way.
        changed = [*NAMES[1:], "p9"]
        seen = []
        for task in plane.tasks(changed, epochs=2):
            seen.append((task.epoch, task.prompt))
            work(task)
        done = [(1, task.prompt) for task in first[:2]]
        assert sorted(seen) == sorted({(e, n) for e in (1, 2) for n in changed} - set(done))
        assert [name for epoch, name in seen if epoch == 1][-1] == "p9"


def test_a_list_that_is_known_is_not_sent_again(plane: ps.Plane) -> None:
    server = plane._server
    assert server is not None
    names = [{"name": f"p{number}", "text": "x" * 1000} for number in range(3000)]
    for epochs in (1, 1, 2):
        next(iter(plane.tasks(names, epochs=epochs))).give_back()
    ((rows,),) = server.engine.log.rows("SELECT COUNT(*) FROM prompts")
    assert rows == 3000
    assert plane.demand()["prompts"]["left"] == 6000


def test_an_iteration_waits_for_leases_of_others_and_says_so(plane: ps.Plane) -> None:
    (task,) = take(plane)
    ended = threading.Event()
    tasks = plane.tasks(NAMES)

    def run() -> None:
        for one in tasks:
            work(one)
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    eventually(lambda: tasks.waiting_for == "1 open leases")
    assert plane.demand()["prompts"]["waiting_for"] == tasks.waiting_for
    assert not ended.is_set()
    work(task)
    assert ended.wait(60)
    thread.join()


@pytest.mark.deep
@pytest.mark.parametrize("env_weights", [None, {"math": 1.0, "code": 1.0}])
def test_a_step_that_no_prompt_is_left_for_says_so(open_plane: OpenPlane, env_weights: dict[str, float] | None) -> None:
    plane = open_plane(ranks=1, groups_per_step=2, **({"env_weights": env_weights} if env_weights else {}))
    for name, prompts in {"code": NAMES[:1], "math": NAMES[: 4 if env_weights else 2]}.items():
        for task in plane.tasks(prompts, name=name):
            with task.group() as group:
                for reward in (0.0, 1.0):
                    turns = [ps.Turn([1, 2]), ps.Turn([3, 4], logprobs=[-0.5, -0.5])]
                    group.add(ps.Trajectory(turns=turns, reward=reward, env=name))
    train(plane, 1)
    if env_weights:  # the other environment has groups
        words = "generation: 3 of 2 groups; environment 'code': 0 of 1; no prompts are left in 'code', 'math'"
    else:
        words = "generation: 1 of 2 groups; no prompts are left in 'code', 'math'"
    with plane.source(0) as source, pytest.raises(ps.errors.WaitTimeout, match=f"waited for: {words}$"):
        source.step(timeout=2.0 * pace())


def test_top_shows_how_far_a_list_is(plane: ps.Plane) -> None:
    held = take(plane, 2)
    work(held[0])
    lines = [line for line in page(_from_plane(plane.status()), {}) if line.startswith("tasks")]
    assert lines == ["tasks      'prompts': epoch 1 of 1, 4 to hand out, 1 leased, 1 held, 0 trained"]
    held[1].give_back("too hard")
    for task in plane.tasks(NAMES):
        work(task)
    (line,) = [line for line in page(_from_plane(plane.status()), {}) if line.startswith("tasks")]
    assert line.endswith("0 to hand out, 0 leased, 5 held, 0 trained, dropped: 1 too hard; all done")


def test_the_last_groups_are_made_again_if_they_become_stale(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, groups_per_step=1, max_staleness=0)
    trained: list[str] = []

    def run() -> None:
        for task in plane.tasks(NAMES):
            work(task)

    thread = threading.Thread(target=run)
    with plane.source(0, prefetch=0) as source:
        thread.start()
        for number in range(1, len(NAMES) + 1):
            step = source.step(timeout=60)
            trained.append(str(step.number))
            source.commit(step, policy_version=number)
        source.flush()
    thread.join(60)
    assert not thread.is_alive()
    demand = plane.demand()["prompts"]
    assert (demand["trained"], demand["dropped"], demand["held"]) == (len(NAMES), {}, 0)


def test_ids_of_tasks_cannot_be_used_otherwise(plane: ps.Plane) -> None:
    (task,) = take(plane)
    for name, evaluation in (("task:prompts:2:0:0", False), (task.id, True)):
        other = plane.group("x", id=name, policy_version=0, evaluation=evaluation)
        with pytest.raises(InvalidInput, match="this one was not leased for training"), other as group:
            add(group)
    work(task)
    for name in ("task: not one of them", "task:of another run:9:9:9", "task:prompts:1:00:0"):
        with plane.group("x", id=name, policy_version=0) as group:
            add(group)
    assert plane.ledger.accepted == 8


def test_a_list_that_was_never_opened_is_unknown(plane: ps.Plane) -> None:
    tasks = plane.tasks(NAMES, name="other")
    tasks._prompts = None
    with pytest.raises(UnknownKey, match=r"list 'other': not known here; open it with plane\.tasks"):
        next(iter(tasks))


def test_no_list_of_prompts_at_all_says_what_to_give() -> None:
    with (
        ps.open("memory:", ranks=1, seq_len=16, groups_per_step=1) as plane,
        pytest.raises(InvalidInput, match="prompts: None; give a list of prompts"),
    ):
        plane.tasks(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["for", "async for"])
def test_a_cancelled_asyncio_worker_returns_its_task_and_does_not_fail_it(plane: ps.Plane, kind: str) -> None:
    async def worker(began: asyncio.Event) -> None:
        tasks = plane.tasks(NAMES, attempts=1)
        if kind == "async for":
            async for _task in tasks:
                began.set()
                await asyncio.sleep(3600)
        else:
            for _task in tasks:
                began.set()
                await asyncio.sleep(3600)

    async def cancel() -> None:
        began = asyncio.Event()
        running = asyncio.create_task(worker(began))
        await began.wait()
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()

    asyncio.run(cancel())
    gc.collect()
    for task in plane.tasks(NAMES, attempts=1):
        work(task)
    assert plane.ledger.discarded == Counter() and plane.ledger.accepted == 2 * len(NAMES)


def test_an_asyncio_worker_that_raises_fails_its_task(plane: ps.Plane) -> None:
    async def worker() -> None:
        async for _task in plane.tasks(NAMES, attempts=1):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        asyncio.run(worker())
    gc.collect()
    for task in plane.tasks(NAMES, attempts=1):
        work(task)
    assert plane.ledger.accepted == 2 * (len(NAMES) - 1)
