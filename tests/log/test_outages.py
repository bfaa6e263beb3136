"""A plane at work while its database is killed, paused and cut off: nothing is lost, nothing is doubled, nobody is
counted as dead."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.errors import PenstockError
from penstock.protocol.timeouts import Timeouts
from penstock.server.plane_process import PlaneProcess
from tests.support.commit_cutter import CommitCutter
from tests.support.groups import named_group
from tests.support.pace import eventually, pace, stretched
from tests.support.postgres_server import PostgresServer

pytestmark = pytest.mark.process

TIMEOUTS = stretched(Timeouts(heartbeat_s=0.25, peer_s=1.5, plane_s=2.0, delivery_s=10.0, resend_s=0.2), pace())
SMALL: dict[str, Any] = {"ranks": 2, "seq_len": 64, "groups_per_step": 2, "untrained_groups": "accept"}


class Work:
    """Two producers and two ranks that go on until they are told to stop, and note what they did."""

    def __init__(self, plane: ps.Plane) -> None:
        self.plane = plane
        self.acked: list[str] = []
        self.trained: list[str] = []
        self.errors: list[BaseException] = []
        self._putting, self._training = threading.Event(), threading.Event()
        self._putting.set()
        self._training.set()
        self._threads = [threading.Thread(target=self._guarded, args=(self._put, n)) for n in range(2)]
        self._threads += [threading.Thread(target=self._guarded, args=(self._train, n)) for n in range(2)]
        for thread in self._threads:
            thread.start()

    def _guarded(self, work: Callable[[int], None], number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001 - asserted by the test
            self.errors.append(error)

    def _put(self, number: int) -> None:
        for count in range(1_000_000):
            if not self._putting.is_set():
                return
            name = f"{number}-{count}"
            assert self.plane.put(named_group(name))  # False would mean that it was there before
            self.acked.append(name)
            time.sleep(0.01)

    def _train(self, rank: int) -> None:
        with self.plane.source(rank=rank) as source:
            for step in source.steps():
                ids = {name for batch in step if not batch.is_dummy for name in batch.segments.ids if name}
                source.commit(step)
                self.trained += sorted(ids)
                if not self._training.is_set() and step.number >= self.last:
                    source.flush()
                    return

    def goes_on(self) -> None:
        """Wait until more was put and trained than before."""
        acked, trained = len(self.acked), len(self.trained)
        eventually(lambda: bool(self.errors) or (len(self.acked) > acked + 4 and len(self.trained) > trained + 4))
        assert not self.errors, self.errors

    def finish(self) -> None:
        """Stop putting, train all whole steps, and stop."""
        self._putting.clear()
        for thread in self._threads[:2]:
            thread.join()
        self.last = len(self.acked) // 2
        self._training.clear()
        if len(self.trained) == 4 * self.last:  # all is trained: one step more ends the ranks
            for name in ("more-0", "more-1"):
                assert self.plane.put(named_group(name))
                self.acked.append(name)
        for thread in self._threads[2:]:
            thread.join()
        assert not self.errors, self.errors

    last = 1 << 60


@pytest.fixture
def proxy(own_postgres: PostgresServer) -> Iterator[CommitCutter]:
    with CommitCutter(own_postgres.port) as made:
        yield made


def check_balance(work: Work) -> None:
    """0 lost, 0 doubled: every acknowledged sample was trained once or is held."""
    doubled = {name: n for name, n in Counter(work.trained).items() if n > 1}
    assert not doubled
    groups = {name.rpartition("/")[0] for name in work.trained}
    assert groups <= set(work.acked)
    assert len(groups) >= len(work.acked) - 1
    ledger = work.plane.ledger
    assert ledger.balanced
    assert ledger.accepted == 2 * len(work.acked)
    assert ledger.committed == 2 * len(groups)


def test_a_plane_outlives_every_outage_of_its_database(
    own_postgres: PostgresServer, proxy: CommitCutter, tmp_path: Path
) -> None:
    url = own_postgres.url_at(proxy.port)
    silence_s = TIMEOUTS.peer_s + TIMEOUTS.plane_s + 1.0
    """Longer than ranks and producers wait for a plane that says nothing."""
    with ps.open(tmp_path, **SMALL, log=url, timeouts=TIMEOUTS) as plane:
        work = Work(plane)
        for _ in range(3):
            work.goes_on()
            proxy.cut = "answer"
            eventually(lambda: not proxy.cut)
            work.goes_on()
            proxy.cut = "question"
            eventually(lambda: not proxy.cut)
            work.goes_on()
            proxy.drop_all()
        work.goes_on()
        query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'penstock'"
        for _ in range(3):
            own_postgres.execute(query)
            work.goes_on()
        own_postgres.pause()
        time.sleep(silence_s)  # how long the outage lasts
        own_postgres.resume()
        work.goes_on()
        own_postgres.kill()
        time.sleep(silence_s)
        own_postgres.start()
        work.goes_on()
        proxy.is_away = True
        proxy.drop_all()
        time.sleep(silence_s)
        proxy.is_away = False
        work.goes_on()
        work.finish()
        check_balance(work)
        assert proxy.cuts == 6
        epoch = plane.status()["epoch"]
    with ps.open(tmp_path, **SMALL, log=url, timeouts=TIMEOUTS) as again:
        assert again.ledger.accepted == 2 * len(work.acked)
        assert again.status()["epoch"] == epoch + 1


def test_a_plane_says_what_it_waits_for_while_the_log_is_away(own_postgres: PostgresServer, tmp_path: Path) -> None:
    timeouts = replace(TIMEOUTS, log_s=300.0)
    with ps.open(tmp_path, **{**SMALL, "ranks": 1}, log=own_postgres.url, timeouts=timeouts) as plane:
        source = plane.source(rank=0)
        with ThreadPoolExecutor(1) as pool:
            step = pool.submit(source.step)
            eventually(lambda: "generation" in source.waiting_for)
            own_postgres.pause()
            eventually(lambda: f"the log is slow or away: {own_postgres.url}" in source.waiting_for)
            own_postgres.resume()
            for name in "ab":
                plane.put(named_group(name))
            assert step.result().number == 1
        source.close()


def test_when_the_log_stays_away_every_handle_raises_and_the_run_can_be_opened_again(
    own_postgres: PostgresServer, tmp_path: Path
) -> None:
    timeouts = Timeouts(heartbeat_s=0.25, peer_s=1.5, plane_s=20.0, delivery_s=10.0, log_s=pace())
    settings = {**SMALL, "ranks": 1, "log": own_postgres.url}
    plane = ps.open(tmp_path, **settings, timeouts=timeouts)
    plane.put(named_group("a"))
    source = plane.source(rank=0)
    own_postgres.pause()
    with pytest.raises(PenstockError, match="postgresql://"):
        plane.put(named_group("b"))
    with pytest.raises(PenstockError, match="postgresql://"):
        source.step()
    with pytest.raises(PenstockError, match="postgresql://"):
        plane.ledger  # noqa: B018 - it is a question
    own_postgres.resume()
    source.close()
    plane.close()
    with ps.open(tmp_path, **settings) as again:
        again.put(named_group("b"))  # whether the one above was accepted or not
        assert again.ledger.accepted == 4
        source = again.source(rank=0)
        source.commit(source.step())
        source.flush()
        source.close()


def test_a_killed_plane_is_started_again_with_nothing_but_log_and_storage(
    own_postgres: PostgresServer, tmp_path: Path
) -> None:
    words = [
        "--ranks=1",
        "--seq-len=64",
        "--groups-per-step=2",
        "--untrained-groups=accept",
        "--listen=tcp://127.0.0.1:*",
    ]
    words += [f"--log={own_postgres.url}", f"--storage={tmp_path / 'storage'}"]
    with PlaneProcess([str(tmp_path / "here"), *words]) as first, ps.open(first.url) as plane:
        for name in "abc":
            plane.put(named_group(name))
        first.kill()
    with PlaneProcess([str(tmp_path / "there"), *words]) as second, ps.open(second.url) as plane:
        assert not plane.put(named_group("c"))
        assert (plane.ledger.accepted, plane.status()["epoch"]) == (6, 2)
        source = plane.source(rank=0)
        source.commit(source.step())
        source.flush()
        source.close()
