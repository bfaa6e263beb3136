"""Batches of real processes that are killed in the middle: nothing is lost, nothing is there twice."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import penstock as ps
from penstock.errors import PenstockError, PlaneLost, PutManyError
from penstock.protocol import Timeouts
from penstock.runs import RecordedRun
from penstock.server import PlaneProcess
from tests.support.groups import named_group
from tests.support.pace import eventually

pytestmark = pytest.mark.process

BATCHES, SIZE = 40, 24
NAMES = [f"g{number:04}" for number in range(BATCHES * SIZE)]
PATIENT = Timeouts(plane_s=120.0)
PRODUCER = """
import sys
import penstock as ps
from tests.support.groups import named_group
size = int(sys.argv[2])
names = sys.stdin.read().split()
with ps.open(sys.argv[1]) as plane:
    missing = [name for name, state in plane.has(names).items() if not state.is_known]
    for start in range(0, len(missing), size):
        plane.put_many(named_group(name) for name in missing[start : start + size])
        print(start, flush=True)
"""


def words(folder: Path, *more: str) -> list[str]:
    return [
        str(folder / "run"),
        "--ranks=1",
        "--seq-len=64",
        "--groups-per-step=1",
        "--capacity=100000",
        f"--listen=ipc://{folder}/s",
        "--set=untrained_groups=accept",
        *more,
    ]


def check(folder: Path) -> None:
    run = RecordedRun.open(folder / "run")
    assert sorted(row.id for row in run.in_order()) == NAMES
    assert run.verify() == len(NAMES)


@pytest.mark.parametrize("direct", ["true", "false"])
def test_a_producer_that_is_killed_asks_what_is_there_and_puts_the_rest(tmp_path: Path, direct: str) -> None:
    command = [sys.executable, "-c", PRODUCER, f"ipc://{tmp_path}/s", str(SIZE)]
    with PlaneProcess(words(tmp_path, f"--set=direct={direct}")) as plane:
        for lines in (1, 3, 6, 10_000):
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as producer:
                assert producer.stdin is not None and producer.stdout is not None
                producer.stdin.write(" ".join(NAMES).encode())
                producer.stdin.close()
                for _, _line in zip(range(lines), producer.stdout, strict=False):
                    continue
                if lines < BATCHES:
                    producer.send_signal(signal.SIGKILL)
                else:
                    assert producer.wait(120) == 0
        with ps.open(plane.url) as line:
            assert line.ledger.accepted == 2 * len(NAMES)
            assert {state.state for state in line.has(NAMES).values()} == {"held"}
    check(tmp_path)


@pytest.mark.parametrize("direct", ["true", "false"])
def test_a_plane_that_is_killed_in_the_middle_of_batches_has_each_group_once(tmp_path: Path, direct: str) -> None:
    arguments = words(tmp_path, f"--set=direct={direct}")
    plane, done = PlaneProcess(arguments), threading.Event()

    def put() -> list[bool]:
        try:
            with ps.open(f"ipc://{tmp_path}/s", timeouts=PATIENT) as line:
                return line.put_many(named_group(name) for name in NAMES)
        finally:
            done.set()

    try:
        with ThreadPoolExecutor(1) as pool:
            putting = pool.submit(put)
            for accepted in (60, 300, 600):
                with ps.open(plane.url, timeouts=PATIENT) as observer:
                    eventually(lambda: done.is_set() or observer.ledger.accepted >= 2 * accepted)  # noqa: B023
                plane.kill()
                plane = PlaneProcess(arguments)
            found = putting.result(240)
        assert len(found) == len(NAMES)  # False: accepted, and its answer was lost with the plane
        with ps.open(plane.url) as line:
            assert line.ledger.accepted == 2 * len(NAMES)
            assert line.put_many(named_group(name) for name in NAMES[:100]) == [False] * 100
    finally:
        plane.stop(60)
    check(tmp_path)


def test_a_plane_that_does_not_come_back_leaves_no_group_in_doubt(tmp_path: Path) -> None:
    plane = PlaneProcess(words(tmp_path))
    lost = Timeouts(plane_s=4.0)
    with ThreadPoolExecutor(1) as pool, ps.open(plane.url, timeouts=lost) as line:
        putting = pool.submit(line.put_many, (named_group(name) for name in NAMES))
        with ps.open(plane.url, timeouts=PATIENT) as observer:
            eventually(lambda: putting.done() or observer.ledger.accepted >= 200)
        plane.kill()
        with pytest.raises(PutManyError) as error:
            putting.result(240)
    results = error.value.results
    assert {type(one) for one in results if isinstance(one, PenstockError)} == {PlaneLost}
    with PlaneProcess(words(tmp_path)) as again, ps.open(again.url) as line:
        states = line.has(NAMES)
        for i, name in enumerate(NAMES):
            if i >= len(results):
                assert not states[name].is_known  # never sent
            elif results[i] is True:
                assert states[name].is_known
        assert line.put_many(named_group(name) for name in NAMES) == [not states[name].is_known for name in NAMES]
    check(tmp_path)
