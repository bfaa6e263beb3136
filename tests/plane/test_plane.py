"""A plane and its ranks in one process, over every transport: the same steps for all, or the same error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import penstock as ps
from penstock.client.api import client_transport
from penstock.client.source import Source, Step
from penstock.client.source_settings import SourceSettings
from penstock.errors import Closed, Conflict, Overloaded, PenstockError, WaitTimeout
from penstock.testing.transport_suite import Trouble, UnreliableClient
from tests.support.groups import named_group
from tests.support.pace import pace
from tests.support.planes import FAST, OpenPlane

TRANSPORTS = ("memory", "tcp", "ipc", "file")


def address(kind: str, folder: Path) -> str:
    paths = {"tcp": "tcp://127.0.0.1:*", "ipc": f"ipc://{folder}/s"}
    return paths.get(kind, f"file://{folder}/transport")


def put(plane: ps.Plane, *names: str, tokens: int = 6) -> None:
    for name in names:
        assert plane.put(named_group(name, tokens=tokens))


def together(*calls: Callable[[], object]) -> list[object]:
    """What each call returns or raises, all called at the same time."""

    def safe(call: Callable[[], object]) -> object:
        try:
            return call()
        except PenstockError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(safe, calls))


def sources(plane: ps.Plane, ranks: int = 2, **settings: int) -> list[Source]:
    return [plane.source(rank, world=ranks, resume_step=settings.get("resume_step", 1)) for rank in range(ranks)]


def steps_of(found: list[object]) -> list[Step]:
    for step in found:
        assert isinstance(step, Step), step
    return [step for step in found if isinstance(step, Step)]


def close(made: list[Source]) -> None:
    for source in made:
        source.close()


# ------------------------------------------------------------------ what goes well


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_every_rank_gets_its_part_of_every_step(open_plane: OpenPlane, tmp_path: Path, kind: str) -> None:
    plane = open_plane(tmp_path / "run", listen=() if kind == "memory" else [address(kind, tmp_path)])
    url = plane._server.urls[-1] if plane._server else ""
    remote = plane if kind == "memory" else ps.open(url, timeouts=FAST)
    for i in range(8):
        put(remote, f"g{i}", tokens=20_000 if i % 2 else 6)
    ranks = sources(remote)
    seen: list[str] = []
    for number in range(1, 5):
        for step in steps_of(together(*(source.step for source in ranks))):
            assert step.number == number
            ids = {segment for batch in step if not batch.is_dummy for segment in batch.segments.ids}
            seen += sorted(ids)
        for source in ranks:
            source.commit(number, policy_version=number)
    for source in ranks:
        source.flush(120)
    close(ranks)
    assert sorted(seen) == sorted(f"g{i}/{k}" for i in range(8) for k in range(2))
    assert plane.ledger.committed == 16
    if remote is not plane:
        remote.close()


def test_one_thread_may_drive_all_ranks(open_plane: OpenPlane) -> None:
    plane = open_plane()
    put(plane, "a", "b", "c", "d")
    ranks = sources(plane)
    for number in (1, 2):
        for source in ranks:
            assert source.step(timeout=120).number == number
        for source in ranks:
            source.commit(number)
    close(ranks)


def test_a_rank_that_comes_late_misses_nothing(open_plane: OpenPlane) -> None:
    plane = open_plane()
    put(plane, "a", "b")
    first = plane.source(0, world=2, resume_step=1)
    with pytest.raises(WaitTimeout, match="rank 1 to join"):
        first.step(timeout=0.5 * pace())
    second = plane.source(1, world=2, resume_step=1)
    steps_of(together(first.step, second.step))
    close([first, second])


def test_processes_that_share_a_rank_are_all_waited_for(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, replicas=2)
    put(plane, "a", "b")
    one = plane.source(0, world=1, replicas=2, replica=0, resume_step=1)
    with pytest.raises(WaitTimeout, match="rank 0 replica 1 to join"):
        one.step(timeout=0.5 * pace())
    two = plane.source(0, world=1, replicas=2, replica=1, resume_step=1)
    a, b = steps_of(together(one.step, two.step))
    assert a.digest == b.digest
    one.commit(1)
    with pytest.raises(WaitTimeout):
        one.flush(0.3)
    two.commit(1)
    one.flush(120)
    close([one, two])


@pytest.mark.deep
def test_waiting_for_generation_has_no_deadline_while_the_plane_lives(open_plane: OpenPlane) -> None:
    impatient = replace(FAST, plane_s=FAST.plane_s / 3)
    plane = open_plane(timeouts=impatient)
    ranks = sources(plane)
    began = time.monotonic()
    putter = threading.Timer(impatient.plane_s + 0.5, lambda: put(plane, "a", "b"))
    putter.start()
    steps_of(together(*(source.step for source in ranks)))
    assert time.monotonic() - began > impatient.plane_s
    putter.join()
    close(ranks)


def test_a_step_waits_until_every_rank_has_it(open_plane: OpenPlane) -> None:
    plane = open_plane()
    put(plane, "a", "b")
    eager = plane.source(0, world=2, resume_step=1)
    lazy = plane.source(1, world=2, resume_step=1, prefetch=0)
    with pytest.raises(WaitTimeout, match="rank 1 to receive step 1"):
        eager.step(timeout=pace())
    steps_of(together(eager.step, lazy.step))
    close([eager, lazy])


def test_reports_reach_the_plane(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, sampler=ps.Prioritized(1.0), remover=ps.Fifo(), max_times_sampled=None, capacity=4)
    put(plane, "a", "b", "c", "d")
    (source,) = sources(plane, 1)
    source.step(timeout=120)
    source.report(1, priorities={"a/0": 0.0, "b": 0.0, "c": 0.0, "d/1": 9.0}, metrics={"loss": 0.25})
    source.commit(1)
    source.flush(120)
    status = plane.status()
    assert status["reported"] == {"loss": 0.25}
    close([source])


def test_a_trainer_that_begins_again_at_its_checkpoint_gets_the_same_bytes(
    open_plane: OpenPlane, tmp_path: Path
) -> None:
    plane = open_plane(tmp_path)
    put(plane, *(f"g{i}" for i in range(10)))
    digests: dict[tuple[int, int], str] = {}
    for resume, last in ((1, 5), (3, 5), (2, 6)):
        ranks = sources(plane, resume_step=resume)
        for number in range(resume, last):
            for step in steps_of(together(*(source.step for source in ranks))):
                assert digests.setdefault((number, step.rank), step.digest) == step.digest
            for source in ranks:
                source.commit(number)
        for source in ranks:
            source.flush(120)
        close(ranks)
    assert plane.ledger.committed == 20


def test_a_plane_that_is_closed_and_opened_again_goes_on(open_plane: OpenPlane, tmp_path: Path) -> None:
    digests = []
    for number in range(1, 4):
        plane = open_plane(tmp_path)
        put(plane, f"a{number}", f"b{number}", f"c{number}")
        ranks = [plane.source(rank) for rank in range(2)]
        digests += [step.digest for step in steps_of(together(*(source.step for source in ranks)))]
        for source in ranks:
            source.commit(number)
            assert source.step is not None
        for source in ranks:
            source.flush(120)
        close(ranks)
        plane.close()
    straight = open_plane()
    for number in range(1, 4):
        put(straight, f"a{number}", f"b{number}", f"c{number}")
    ranks = sources(straight)
    expected = []
    for number in range(1, 4):
        expected += [step.digest for step in steps_of(together(*(source.step for source in ranks)))]
        for source in ranks:
            source.commit(number)
    close(ranks)
    assert digests == expected


# ------------------------------------------------------------------ producers


def test_a_group_put_again_is_no_news_and_other_content_is_a_conflict(open_plane: OpenPlane) -> None:
    plane = open_plane()
    assert plane.put(named_group("a"))
    assert not plane.put(named_group("a"))
    with pytest.raises(Conflict, match="group 'a'"):
        plane.put(named_group("a", tokens=8))


def test_a_stalled_trainer_is_back_pressure_and_release_lets_all_flow(open_plane: OpenPlane) -> None:
    budget = 20_000
    plane = open_plane(ranks=1, max_held_bytes=budget)
    (source,) = sources(plane, 1)
    stop, put_count, refused = threading.Event(), [0], [0.0]

    def produce(number: int) -> None:
        for i in range(10_000):
            while not stop.is_set():
                began = time.monotonic()
                try:
                    plane.put(named_group(f"p{number}-{i}", tokens=60), timeout=0.2)
                    put_count[0] += 1
                    break
                except Overloaded:
                    refused[0] = max(refused[0], time.monotonic() - began)
            if stop.is_set():
                return

    threads = [threading.Thread(target=produce, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 120
    while not refused[0] and time.monotonic() < deadline:
        assert plane.status()["held_bytes"] <= budget
    assert 0 < refused[0] < 0.2 + pace()
    held = put_count[0]
    for number in range(1, 6):
        source.commit(source.step(number, timeout=120))
    while put_count[0] < held + 4 and time.monotonic() < deadline:
        assert plane.status()["held_bytes"] <= budget
    assert put_count[0] >= held + 4
    stop.set()
    for thread in threads:
        thread.join()
    close([source])


def test_a_put_that_waits_ends_when_the_plane_is_closed(open_plane: OpenPlane) -> None:
    plane = open_plane(max_held_bytes=1000)
    with pytest.raises(Overloaded):
        for i in range(100):
            plane.put(named_group(f"g{i}"), timeout=0)
    waiting = threading.Timer(0.3, plane.close)
    waiting.start()
    with pytest.raises(Closed):
        plane.put(named_group("late"))
    waiting.join()


def test_discarded_samples_are_counted_apart(open_plane: OpenPlane) -> None:
    plane = open_plane()
    plane.discard("all rewards equal", 4)
    plane.discard("all rewards equal", 2)
    assert dict(plane.ledger.discarded) == {"all rewards equal": 6}
    assert plane.ledger.accepted == 0


# ------------------------------------------------------------------ bad lines


TROUBLES = {
    "lossy": Trouble(drop=0.2, duplicate=0.2, delay=0.2),
    "damaging": Trouble(truncate=0.15, flip=0.15),
}


@pytest.fixture(params=TRANSPORTS)
def bad_line(request: pytest.FixtureRequest, open_plane: OpenPlane, tmp_path: Path) -> tuple[ps.Plane, str]:
    kind = str(request.param)
    plane = open_plane(tmp_path / "run", listen=() if kind == "memory" else [address(kind, tmp_path)])
    assert plane._server is not None
    return plane, "" if kind == "memory" else plane._server.urls[-1]


@pytest.mark.deep
@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_bad_line_loses_nothing_and_gives_no_wrong_byte(bad_line: tuple[ps.Plane, str], trouble: str) -> None:
    plane, url = bad_line
    seeds = iter(range(100))

    def line() -> UnreliableClient:
        inner = client_transport(url) if url else plane._connect()
        return UnreliableClient(inner, TROUBLES[trouble], next(seeds))

    producer = ps.Plane(line, url="a bad line", timeouts=FAST)
    for i in range(6):
        producer.put(named_group(f"g{i}", tokens=3000))
    ranks = [Source(line(), SourceSettings(rank=rank, world=2, timeouts=FAST)) for rank in range(2)]
    for number in (1, 2, 3):
        for step in steps_of(together(*(source.step for source in ranks))):
            assert step.number == number
        for source in ranks:
            source.commit(number)
    for source in ranks:
        source.flush(120)
    close(ranks)
    producer.close()
    assert plane.ledger.committed == plane.ledger.accepted == 12
