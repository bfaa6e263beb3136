"""The waiting line of real planes: producers that are killed, cancelled or hostile keep no place in it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import penstock as ps
from penstock.protocol.message_header import pack_message, read_from_plane
from penstock.protocol.messages import AskRoom, Attach, Attached
from penstock.protocol.rooms import MOST_OF_ONE
from penstock.protocol.timeouts import Timeouts
from penstock.server.plane_process import PlaneProcess
from penstock.transport.sockets import SocketClient
from tests.support.groups import named_group
from tests.support.pace import pace
from tests.support.plane_processes import SMALL, wait_until

pytestmark = pytest.mark.process

WAITING = 64
PRODUCER = f"""
import asyncio, sys
import penstock as ps
from tests.support.groups import named_group

async def work():
    with ps.open(sys.argv[1]) as plane:
        await asyncio.gather(*(plane.aput(named_group(f"dead{{i}}")) for i in range({WAITING})))

asyncio.run(work())
"""


def waiting(plane: ps.Plane) -> int:
    found = plane.status()["producers_waiting"]
    assert isinstance(found, int)
    return found


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_a_killed_producer_with_64_waiting_puts_costs_no_more_than_its_silence(tmp_path: Path, scheme: str) -> None:
    listen = "tcp://127.0.0.1:*" if scheme == "tcp" else f"file://{tmp_path}/mail"
    words = [str(tmp_path / "run"), *SMALL, "--capacity=1", f"--listen={listen}"]
    with PlaneProcess(words) as process, ps.open(process.url) as plane, ThreadPoolExecutor(1) as pool:
        plane.put(named_group("first"))
        dead = subprocess.Popen([sys.executable, "-c", PRODUCER, process.url])
        wait_until(lambda: waiting(plane) == WAITING)
        live = pool.submit(plane.put, named_group("live"))
        wait_until(lambda: waiting(plane) == WAITING + 1)
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        began = time.monotonic()
        with plane.source(0, prefetch=0) as source:
            source.commit(source.step(timeout=60))
            source.commit(source.step(timeout=180))  # the live producer's group
            source.flush()
        assert live.result(60)
        assert time.monotonic() - began < (Timeouts().peer_s + 5.0) * pace()
        assert waiting(plane) == 0


def test_tasks_cancelled_while_the_plane_stands_still_leave_no_waiter(tmp_path: Path) -> None:
    words = [str(tmp_path / "run"), *SMALL, "--capacity=1", f"--listen=ipc://{tmp_path}/s"]

    async def work() -> None:
        with ps.open(process.url) as producer:
            tasks = [asyncio.create_task(producer.aput(named_group(f"g{i}"))) for i in range(8)]
            await asyncio.to_thread(wait_until, lambda: waiting(plane) == 8)
            os.kill(process.pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(3.0)  # so that reminders are on their way: not a wait for anything
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                os.kill(process.pid, signal.SIGCONT)
            await asyncio.to_thread(wait_until, lambda: waiting(plane) == 0)

    with PlaneProcess(words) as process, ps.open(process.url) as plane:
        plane.put(named_group("first"))
        asyncio.run(work())


def test_a_client_that_asks_five_thousand_times_and_leaves_stops_nobody(tmp_path: Path) -> None:
    words = [str(tmp_path / "run"), *SMALL, "--capacity=1", "--listen=tcp://127.0.0.1:*"]
    with PlaneProcess(words) as process, ps.open(process.url) as plane, ThreadPoolExecutor(1) as pool:
        plane.put(named_group("first"))
        greedy = SocketClient(process.url)
        greedy.send(pack_message(Attach(ticket=0)))
        got = greedy.receive(60.0)
        assert got is not None
        attached = read_from_plane(got[0])
        assert isinstance(attached, Attached)
        for number in range(5000):
            greedy.send(pack_message(AskRoom(ticket=number, tenant="", size=100), attached.run_id))
            if number % 100 == 99:
                assert greedy.receive(60.0) is not None  # the queue between us holds 256
        wait_until(lambda: waiting(plane) == MOST_OF_ONE)
        live = pool.submit(plane.put, named_group("live"))
        wait_until(lambda: waiting(plane) == MOST_OF_ONE + 1)
        greedy.close()
        began = time.monotonic()
        with plane.source(0, prefetch=0) as source:
            source.commit(source.step(timeout=60))
            source.commit(source.step(timeout=60))
            source.flush()
        assert live.result(60)
        assert time.monotonic() - began < (Timeouts().peer_s + 5.0) * pace()
        assert waiting(plane) == 0
