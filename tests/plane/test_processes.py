"""Real processes, really killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.log import SqliteLog
from tests.support.engines import DirectEngine
from tests.support.hosts import NoNamespaces, torture_hosts
from tests.support.plane_processes import alive, wait_until
from tests.support.processes import TIMEOUTS, Notes, settings
from tests.support.torture import TRANSPORTS, Run, torture

pytestmark = pytest.mark.process


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_run_whose_processes_are_killed_is_the_run_that_nothing_happened_to(
    transport: str, tmp_path: Path, pace: float
) -> None:
    result = torture(tmp_path / "run", transport, kills=3, seed=TRANSPORTS.index(transport))
    assert result.good, result
    assert result.kills.total() == 3
    assert result.detect_s < (TIMEOUTS.peer_s + 5 * TIMEOUTS.heartbeat_s) * pace


def test_a_run_on_two_hosts_that_share_a_folder_goes_straight_to_it_and_outlives_kills(tmp_path: Path) -> None:
    try:
        result = torture_hosts(tmp_path / "run", kills=3, seed=1)
    except NoNamespaces as error:
        pytest.skip(f"needs mount and network namespaces (root, or user namespaces allowed): {error}")
    assert result.good, result
    assert result.kills.total() == 3
    assert all(result.stored[name] for name in ("producer-0", "producer-1", "rank-0", "rank-3"))


PARENT = """
import sys, time
from pathlib import Path
from tests.support.torture import Run
run = Run(Path(sys.argv[1]), "direct", seed=0)
for name in run._names:
    run.start(name)
print(*(process.pid for process in run._processes.values()), flush=True)
time.sleep(600)
"""


def test_processes_of_a_run_end_with_whoever_started_them(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        started = [int(word) for word in parent.stdout.readline().split()]
        wait_until(lambda: len(Notes.read(tmp_path / "rank0.notes")) > 2)  # all of them are at work
        assert len(started) > 3 and all(map(alive, started))
        parent.kill()
    wait_until(lambda: not any(map(alive, started)))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path, "direct", seed=0)
    yield made
    for process in made._processes.values():
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


def test_who_stands_still_or_dies_stops_all_or_nobody(run: Run, pace: float) -> None:
    for name in run._names:
        run.start(name)
    run._await_step(2)

    before = [len(run._raises(rank)) for rank in range(4)]
    stopped = run._processes["rank-2"]
    stopped.send_signal(signal.SIGSTOP)
    run._await_raises(2, before, time.monotonic())
    assert run.result.detect_s < (TIMEOUTS.peer_s + 5 * TIMEOUTS.heartbeat_s) * pace
    stopped.send_signal(signal.SIGCONT)  # it must hear of it too, and begin again with the others
    run._await_step(run._step() + 2)
    assert len(run._raises(2)) > before[2]

    plane = run._processes["plane-0"]
    plane.send_signal(signal.SIGSTOP)
    time.sleep(TIMEOUTS.peer_s * 1.5)  # longer than any rank may be silent, and not as long as a plane may be lost
    before = [len(run._raises(rank)) for rank in range(4)]
    plane.send_signal(signal.SIGCONT)
    run._await_step(run._step() + 2)
    assert [len(run._raises(rank)) for rank in range(4)] == before

    run.kill("plane-0")
    run.start("plane-0")
    run._await_step(run._step() + 3)
    assert [len(run._raises(rank)) for rank in range(4)] == before


# ------------------------------------------------------------------ the disk


FILL = """
import resource, signal, sys
from pathlib import Path
import penstock as ps
from penstock.errors import DiskFull
from tests.support.groups import named_group

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
small = dict(ranks=1, seq_len=64, groups_per_step=2, over_length="truncate", untrained_groups="accept")
plane = ps.open(sys.argv[1], retain_steps=0, **small)
source = plane.source(0)
for i in range(4):
    plane.put(named_group(f"g{i}", tokens=20_000))
source.step(timeout=120)
size = max(path.stat().st_size for path in Path(sys.argv[1], "storage", "segments").iterdir())
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100_000, resource.RLIM_INFINITY))
refused = ""
for i in range(4, 60):
    try:
        plane.put(named_group(f"g{i}", tokens=20_000))
    except DiskFull as error:
        refused = str(error)
        break
assert "room" in refused, refused
plane.status()
source.commit(1)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
plane.put(named_group("after", tokens=20_000))
source.flush(120)
source.commit(source.step(timeout=120))
source.flush(120)
assert plane.ledger.balanced
assert plane.ledger.committed >= 8
source.close()
plane.close()
print("went on")
"""


def test_a_full_disk_refuses_puts_and_everything_goes_on_when_there_is_room(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FILL, str(tmp_path / "run")], capture_output=True, text=True, timeout=250, check=False
    )
    assert (done.stdout, done.returncode) == ("went on\n", 0), done.stderr


def _can_mount() -> bool:
    probe = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not _can_mount(), reason="needs a mount namespace: run as root, or allow user namespaces")
def test_a_small_filesystem_that_is_full_refuses_puts_with_reads_going_on(tmp_path: Path) -> None:
    script = FILL.replace("resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100_000, resource.RLIM_INFINITY))", "")
    script = script.replace(
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))",
        "import subprocess; subprocess.run(['mount', '-o', 'remount,size=64m', sys.argv[2]], check=True)",
    )
    mount = f'mount -t tmpfs -o size=3m none {tmp_path} && exec {sys.executable} -c "$0" {tmp_path}/run {tmp_path}'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount, script], capture_output=True, text=True, timeout=250, check=False
    )
    assert (done.stdout, done.returncode) == ("went on\n", 0), done.stderr


ONE_PUT = """
import sys
import penstock as ps
from penstock.frames import encode
from tests.support.engines import DirectEngine
from penstock.log import Log, SqliteLog
from tests.support.groups import named_group
from tests.support.processes import settings

engine = DirectEngine(settings(2), SqliteLog(sys.argv[1]))
for i in range(6):
    engine.put(i, f"g{i}", encode(named_group(f"g{i}")))
    if engine.flush()[0].error is None:
        print(f"g{i}", flush=True)
    if i % 2:
        made = engine.plan_step(i // 2 + 1)
        engine.received(i // 2 + 1)
        engine.commit(i // 2 + 1, None)
        print(f"committed {i // 2 + 1}", flush=True)
"""


def _strace_works() -> bool:
    try:
        return subprocess.run(["strace", "-f", "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not _strace_works(), reason="needs strace and the right to trace: apt-get install strace")
@pytest.mark.parametrize("call", ["pwrite64", "fdatasync"])
@pytest.mark.parametrize("what", ["signal=SIGKILL", "error=EIO", "error=ENOSPC"])
def test_whatever_system_call_fails_nothing_acknowledged_is_lost(tmp_path: Path, call: str, what: str) -> None:
    for when in (2, 9):
        folder = tmp_path / f"{when}"
        inject = f"inject={call}:{what}:when={when}"
        command = [
            "strace",
            "-f",
            "-o",
            "/dev/null",
            "-e",
            f"trace={call}",
            "-e",
            inject,
            sys.executable,
            "-c",
            ONE_PUT,
        ]
        done = subprocess.run([*command, str(folder)], capture_output=True, text=True, timeout=250, check=False)
        said = done.stdout.split("\n")
        engine = DirectEngine(settings(2), SqliteLog(folder))
        known = {row.id for row in engine.log.groups()}
        assert {line for line in said if line.startswith("g")} <= known
        assert engine.next_step > max([int(line[10:]) for line in said if line.startswith("committed")], default=0)
        assert engine.ledger.balanced
        if engine.last_step:
            assert engine.stage_again(engine.last_step).digests
        engine.log.close()
