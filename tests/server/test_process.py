from __future__ import annotations

import json
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import penstock as ps
from penstock.errors import Closed, Fenced, PlaneLost, StepAborted
from penstock.protocol.timeouts import Timeouts
from penstock.server.daemon import Exit
from penstock.server.log_format import LineFormatter, printable
from penstock.server.plane_process import PlaneProcess
from tests.support.pace import stretched
from tests.support.plane_processes import SMALL, alive, wait_until

pytestmark = pytest.mark.process

PARENT = """
import json, sys, time
from penstock.server.plane_process import PlaneProcess
plane = PlaneProcess(sys.argv[1:])
print(json.dumps(plane.ready), flush=True)
time.sleep(600)
"""


def put(plane: ps.Plane, name: str) -> None:
    with plane.group(name, id=name) as group:
        for reward in (0.0, 1.0):
            group.add(ps.Trajectory(turns=[ps.Turn([1, 2]), ps.Turn([3], logprobs=[-0.5])], reward=reward))


def start(folder: Path | str, *words: str) -> PlaneProcess:
    return PlaneProcess([str(folder), *SMALL, "--listen=tcp://127.0.0.1:*", *words])


def test_a_run_goes_on_where_the_last_process_ended(tmp_path: Path) -> None:
    with start(tmp_path / "run") as process, ps.open(process.url) as plane:
        put(plane, "a")
        put(plane, "b")
        with plane.source(rank=0, prefetch=0) as source:
            source.commit(source.step(timeout=120))
            source.flush()
    assert process.process.returncode == Exit.ENDED
    with start(tmp_path / "run") as process:
        assert process.ready["next_step"] == 2
        assert "resume_step" not in process.ready["rank"]  # without it a rank goes on where the run is
        with ps.open(process.url) as plane:
            assert (plane.ledger.committed, plane.ledger.held, plane.ledger.balanced) == (2, 2, True)


def test_sigterm_under_load_ends_in_time_and_loses_nothing_acknowledged(tmp_path: Path, pace: float) -> None:
    process = start(tmp_path / "run")
    acknowledged: list[str] = []
    ended = threading.Event()

    def produce() -> None:
        timeouts = Timeouts(plane_s=0.5 * pace)
        with ps.open(process.url, timeouts=timeouts) as plane:
            try:
                while True:
                    put(plane, f"g{len(acknowledged)}")
                    acknowledged.append(f"g{len(acknowledged)}")
            except PlaneLost:
                ended.set()

    producer = threading.Thread(target=produce)
    producer.start()
    wait_until(lambda: len(acknowledged) > 5)
    begin = time.monotonic()
    assert process.stop() == Exit.ENDED
    assert time.monotonic() - begin < 10 * pace
    assert ended.wait(120)
    producer.join()
    with sqlite3.connect(tmp_path / "run" / "log.sqlite") as log:
        kept = {name for (name,) in log.execute("SELECT id FROM groups")}
    assert set(acknowledged) <= kept


def test_a_second_sigterm_ends_it_at_once() -> None:
    process = start("memory:")
    os.kill(process.pid, signal.SIGSTOP)  # both signals arrive before the loop can turn
    process.process.send_signal(signal.SIGTERM)
    process.process.send_signal(signal.SIGINT)
    os.kill(process.pid, signal.SIGCONT)
    # Either the process itself or its watchdog is the first to see the second one.
    assert process.process.wait(60) in (Exit.AT_ONCE, -signal.SIGKILL)
    wait_until(lambda: not alive(process.ready["watchdog"]))
    process.stop()


def test_ctrl_c_is_an_orderly_end() -> None:
    process = start("memory:")
    process.process.send_signal(signal.SIGINT)
    assert process.process.wait(60) == Exit.ENDED
    process.stop()


def test_sigusr1_writes_stacks_and_the_plane_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "deep" / "plane.log"
    with start("memory:", f"--log-file={log}") as process:
        process.process.send_signal(signal.SIGUSR1)
        wait_until(lambda: "run_plane" in log.read_text())
        with ps.open(process.url) as plane:
            put(plane, "still here")
    assert process.process.returncode == Exit.ENDED


def test_a_killed_parent_leaves_nothing_behind(tmp_path: Path) -> None:
    socket = tmp_path / "socket"
    words = [str(tmp_path / "run"), *SMALL, f"--listen=ipc://{socket}"]
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *words], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    try:
        ready = json.loads(parent.stdout.readline())
        assert alive(ready["pid"]) and alive(ready["watchdog"])
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    wait_until(lambda: not alive(ready["pid"]) and not alive(ready["watchdog"]))
    assert not socket.exists()


def test_what_a_killed_plane_leaves_is_removed_at_the_next_start(tmp_path: Path) -> None:
    listen = f"--listen=ipc://{tmp_path / 'socket'}"
    killed = PlaneProcess([str(tmp_path / "run"), *SMALL, listen])
    killed.kill()
    assert (tmp_path / "socket").exists()
    again = PlaneProcess([str(tmp_path / "run"), *SMALL, listen])  # same folder, same socket
    with again as process, ps.open(process.url) as plane:
        put(plane, "a")
    assert not (tmp_path / "socket").exists()


def test_files_of_a_run_are_for_its_owner_only(tmp_path: Path) -> None:
    with start(tmp_path / "run", f"--log-file={tmp_path / 'plane.log'}"):
        for path in [tmp_path / "run", tmp_path / "plane.log", *(tmp_path / "run").iterdir()]:
            assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--listen=tcp://0.0.0.0:*"], "other hosts can reach it, and there are no keys"),
        (["--listen=http://127.0.0.1:1"], "must begin with one of"),
        (["--metrics=0.0.0.0:0"], "give metrics_token"),
        (["--parent=1"], "this process was started by"),
        (["--set=timeouts.peer=1"], "timeouts.peer: unknown key"),
    ],
)
def test_what_cannot_start_says_why_in_one_line_and_leaves_no_process(
    tmp_path: Path, words: list[str], message: str
) -> None:
    listen = [] if any(word.startswith("--listen") for word in words) else ["--listen=tcp://127.0.0.1:*"]
    command = [sys.executable, "-m", "penstock.cli", "serve", str(tmp_path / "run"), *SMALL, *listen, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == Exit.REFUSED
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_folder_that_is_open_elsewhere_is_refused(tmp_path: Path) -> None:
    with start(tmp_path / "run") as process:
        command = [sys.executable, "-m", "penstock.cli", "serve", str(tmp_path / "run"), *SMALL]
        done = subprocess.run([*command, "--listen=tcp://127.0.0.1:*"], capture_output=True, text=True, timeout=120)
        assert done.returncode == Exit.REFUSED
        assert f"another plane has it open (process {process.pid} of " in done.stderr


def test_a_plane_that_was_taken_over_ends_as_fenced(tmp_path: Path) -> None:
    log = tmp_path / "plane.log"
    process = start(tmp_path / "run", f"--log-file={log}")
    with sqlite3.connect(tmp_path / "run" / "log.sqlite") as other:
        other.execute("UPDATE meta SET value = value + 1 WHERE name = 'epoch'")
    assert process.process.wait(60) == Exit.FENCED
    assert "fenced: epoch 1: the run was taken over by epoch 2" in log.read_text()
    process.stop()


@pytest.mark.parametrize("busy", [True, False])
def test_a_plane_in_this_process_that_was_taken_over_ends_and_every_call_says_so(tmp_path: Path, busy: bool) -> None:
    plane = ps.open(tmp_path / "run", ranks=1, seq_len=64, groups_per_step=1)
    put(plane, "before")
    source = plane.source(rank=0)
    source.step(timeout=120)
    with sqlite3.connect(tmp_path / "run" / "log.sqlite") as other:
        other.execute("UPDATE meta SET value = value + 1 WHERE name = 'epoch'")
    words = "epoch 1: the run was taken over by epoch 2"
    if busy:
        with pytest.raises((Fenced, Closed), match=words):
            put(plane, "after")
    assert plane._thread is not None
    plane._thread.join(60)
    assert not plane._thread.is_alive()
    for call in (lambda: put(plane, "later"), plane.status, lambda: plane.ledger, lambda: plane.source(rank=0)):
        with pytest.raises(Closed, match=words):
            call()
    with pytest.raises(StepAborted, match=rf"the plane ended: \w+: {words}"):
        source.step(timeout=120)
    source.close()
    plane.close()


def test_a_rank_that_fails_before_it_took_a_step_names_the_first_one(tmp_path: Path) -> None:
    with ps.open("memory:", ranks=2, seq_len=64, groups_per_step=1) as plane:
        early = plane.source(rank=1)
        early.fail("no GPU")
        with pytest.raises(StepAborted, match="step 1: rank 1: no GPU"):
            early.step(timeout=120)
        early.close()


def test_ranks_do_not_wait_for_one_that_left_before_the_plane_restarted(tmp_path: Path, pace: float) -> None:
    url = f"ipc://{tmp_path / 'socket'}"
    words = [str(tmp_path / "run"), "--ranks=2", "--seq-len=64", "--groups-per-step=1", f"--listen={url}"]
    timeouts = stretched(Timeouts(), pace)
    words += [f"--set=timeouts.peer_s={timeouts.peer_s}", f"--set=timeouts.plane_s={timeouts.plane_s}"]
    plane = PlaneProcess(words)
    with ps.open(url, timeouts=timeouts) as line:
        put(line, "a")
        stays, leaves = (line.source(rank=rank) for rank in range(2))
        for source in (stays, leaves):
            source.commit(source.step(timeout=120))
        stays.flush()
        leaves.close()
        wait_until(lambda: line.status()["missing"] == [] and stays._session.left == 1)
    plane.kill()
    plane = PlaneProcess(words)
    stays._session.left = -1  # as if it had not heard of it
    began = time.monotonic()
    with pytest.raises(StepAborted, match="step 2: rank 1: left before this step"):
        stays.step(timeout=30 * pace)
    assert time.monotonic() - began < timeouts.peer_s - 2
    stays.close()
    plane.stop()


def test_a_launcher_says_when_the_process_did_not_come_up(tmp_path: Path) -> None:
    with pytest.raises(PlaneLost, match="ended with code 2 before it listened"):
        PlaneProcess([str(tmp_path / "run"), "--ranks=0"], stderr=subprocess.DEVNULL)


def test_log_lines_cannot_be_forged() -> None:
    record = logging.LogRecord(
        "penstock.plane", logging.WARNING, "", 0, "bad id %r and %s", ("a", "b\nc\x1b[2J\u202e"), None
    )
    line = LineFormatter().format(record)
    assert line.endswith(r"WARNING penstock.plane: bad id 'a' and b\nc\x1b[2J\u202e")
    assert printable("plain — ü") == "plain — ü"


def test_an_exception_is_logged_in_one_line() -> None:
    try:
        int("two\nlines")
    except ValueError:
        record = logging.LogRecord("penstock", logging.ERROR, "", 0, "failed", (), sys.exc_info())
    line = LineFormatter().format(record)
    assert "\n" not in line
    assert r"failed | ValueError: invalid literal for int() with base 10: 'two\nlines' | " in line
    assert "test_process.py" in line
