from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.server.plane_process import PlaneProcess
from tests.support.pace import pace
from tests.support.plane_processes import SMALL, alive, wait_until

pytestmark = pytest.mark.process

STALL_S = round(0.8 * pace(), 1)
QUICK = (f"--set=watchdog.stall_s={STALL_S}", "--set=watchdog.grace_s=0.5", "--set=watchdog.end_s=1")

WEDGED = """
import ctypes, faulthandler, signal, sys, time
from penstock.server.watchdog import Watchdog
faulthandler.register(signal.SIGUSR1, all_threads=True)
dog = Watchdog(stall_s=60, end_s=0.5, grace_s=0.5)
signal.set_wakeup_fd(dog.pipe, warn_on_full_buffer=False)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: None)
dog.beat("step 7, waiting for the disk", 0)
print(dog.pid, flush=True)
def stuck_in_c():
    library = ctypes.PyDLL(None)            # keeps the interpreter's lock: no Python code can run
    while True:
        library.sleep(1000)
stuck_in_c()
"""

DEADLOCKED = """
import faulthandler, signal, threading
from penstock.server.watchdog import Watchdog
faulthandler.register(signal.SIGUSR1, all_threads=True)
dog = Watchdog(stall_s=0.5, grace_s=0.5)
dog.beat("step 7", 0)
def waits_for_itself():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
waits_for_itself()
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "plane.log"


def start(log: Path, *words: str) -> PlaneProcess:
    return PlaneProcess(["memory:", *SMALL, "--listen=tcp://127.0.0.1:*", f"--log-file={log}", *QUICK, *words])


def test_a_plane_that_turns_is_left_alone(log: Path) -> None:
    with start(log) as plane:
        wait_until(lambda: alive(plane.ready["watchdog"]))
        with pytest.raises(subprocess.TimeoutExpired):
            plane.process.wait(2.5 * STALL_S)
    assert plane.process.returncode == 0
    assert "watchdog" not in log.read_text()
    assert not alive(plane.ready["watchdog"])


def test_a_stopped_plane_is_killed_with_its_stacks_in_the_log(log: Path) -> None:
    plane = start(log)
    os.kill(plane.pid, signal.SIGSTOP)
    assert plane.process.wait(120) == -signal.SIGKILL
    text = log.read_text()
    assert f"has not turned its loop for {STALL_S:g} s; its last state was: epoch 1, session 0 forming, step 1" in text
    assert "most recent call first" in text
    assert "in run_plane" in text
    wait_until(lambda: not alive(plane.ready["watchdog"]))
    plane.stop()


def test_a_deadlocked_process_is_killed_with_its_stacks_in_the_log() -> None:
    done = subprocess.run([sys.executable, "-c", DEADLOCKED], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert "has not turned its loop for 0.5 s; its last state was: step 7" in done.stderr
    assert "in waits_for_itself" in done.stderr


def wedged() -> tuple[subprocess.Popen[str], int]:
    """A process whose interpreter is stuck in C and cannot handle a signal."""
    process = subprocess.Popen(
        [sys.executable, "-c", WEDGED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_sigterm_ends_a_process_that_is_stuck_in_c() -> None:
    process, dog = wedged()
    process.terminate()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert "was asked to end 0.5 s ago and did not; its last state was: step 7, waiting for the disk" in errors
    assert "in stuck_in_c" in errors
    wait_until(lambda: not alive(dog))


def test_a_second_sigterm_ends_it_at_once_and_without_stacks() -> None:
    process, dog = wedged()
    process.terminate()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert "was asked to end a second time" in errors
    assert "stuck_in_c" not in errors
    wait_until(lambda: not alive(dog))


def test_the_watchdog_goes_when_the_plane_is_killed(log: Path) -> None:
    plane = start(log)
    plane.kill()
    wait_until(lambda: not alive(plane.ready["watchdog"]))


def test_a_watchdog_that_was_killed_is_replaced(log: Path) -> None:
    with start(log) as plane:
        os.kill(plane.ready["watchdog"], signal.SIGKILL)
        wait_until(lambda: "the watchdog had died; started another" in log.read_text())
        os.kill(plane.pid, signal.SIGSTOP)  # and the new one works
        assert plane.process.wait(120) == -signal.SIGKILL


def test_a_plane_without_watchdog_has_no_child(log: Path) -> None:
    with start(log, "--set=watchdog.stall_s=none") as plane:
        assert plane.ready["watchdog"] is None
