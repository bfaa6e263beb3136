"""Keepers, plane, ranks and a producer as real processes over tcp with keys: killed, and what everybody sees then."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.errors import StepAborted
from penstock.send.keys import make_keys
from penstock.serve import PlaneProcess
from penstock.serve.keepers import KeeperProcess
from penstock.testing.groups import named_group
from tests.serve.conftest import FAST
from tests.serve.processes import embedded_digests, trained_digests, wait_until

TIMES = replace(FAST, keeper_s=3 * FAST.peer_s, plane_s=12 * FAST.peer_s)
NAMES = [f"g{i}" for i in range(6)]


class Run:
    """A plane and two keepers, each a process; killed and started again as a test likes."""

    def __init__(self, folder: Path, copies: int | str, stack: ExitStack) -> None:
        self.folder, self.copies, self._stack = folder, copies, stack
        self.keys = folder / "keys"
        make_keys(self.keys, keepers=("keeper",))
        self.plane = self.start_plane("tcp://127.0.0.1:*")
        self.keepers = {node: self.start_keeper(node) for node in "ab"}

    def _times(self) -> list[str]:
        names = ("heartbeat_s", "peer_s", "delivery_s", "plane_s", "resend_s", "keeper_s")
        return [f"--set=timeouts.{name}={getattr(TIMES, name)}" for name in names]

    def start_plane(self, listen: str) -> PlaneProcess:
        words = [str(self.folder / "run"), "--ranks=2", "--seq-len=64", "--groups-per-step=2", f"--listen={listen}"]
        words += [f"--copies={self.copies}", f"--keys={self.keys}", *self._times()]
        self.plane = self._stack.enter_context(PlaneProcess(words))
        return self.plane

    def start_keeper(self, node: str, *, folder: str = "") -> KeeperProcess:
        """In the folder of that name, which is the node's unless it is named."""
        words = [f"--plane={self.plane.url}", f"--folder={self.folder / (folder or node)}", f"--node={node}"]
        return self._stack.enter_context(KeeperProcess([*words, f"--keys={self.keys}", *self._times()]))

    def client(self, node: str) -> ps.Plane:
        return ps.open(self.plane.url, keys=self.keys, timeouts=TIMES, node=node)

    def put(self, names: list[str], node: str) -> None:
        with self.client(node) as plane:
            for name in names:
                plane.put(named_group(name, samples=3, tokens=12), timeout=120)

    def train(self, steps: int) -> list[list[str]]:
        return trained_digests(self._rank, steps)

    def _rank(self, rank: int) -> ps.Source:
        return ps.connect(self.plane.url, rank=rank, world=2, keys=self.keys, timeouts=TIMES, node="a")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.fixture(scope="module")
def undisturbed() -> list[list[str]]:
    """What ranks get of these groups when nothing happens; a plane that keeps frames itself gives the same."""
    return embedded_digests("memory:", NAMES, TIMES)


def test_with_two_copies_a_killed_keeper_changes_no_byte(
    tmp_path: Path, stack: ExitStack, undisturbed: list[list[str]]
) -> None:
    run = Run(tmp_path, 2, stack)
    run.put(NAMES, "a")
    run.keepers["a"].kill()
    assert run.train(3) == undisturbed


def test_with_one_copy_a_keeper_that_is_started_again_changes_no_byte(
    tmp_path: Path, stack: ExitStack, undisturbed: list[list[str]]
) -> None:
    run = Run(tmp_path, 1, stack)
    run.put(NAMES, "a")
    run.keepers["a"].kill()
    run.start_keeper("a")
    assert run.train(3) == undisturbed


def test_with_one_copy_a_killed_keeper_ends_the_step_with_the_same_words_on_every_rank(
    tmp_path: Path, stack: ExitStack
) -> None:
    run = Run(tmp_path, 1, stack)
    run.put(NAMES[:2], "a")
    run.put(NAMES[2:], "b")
    lost = run.keepers["a"].name
    run.keepers["a"].kill()

    def first(rank: int) -> str:
        with ps.connect(run.plane.url, rank=rank, world=2, keys=run.keys, timeouts=TIMES) as source:
            with pytest.raises(StepAborted) as raised:
                source.step(timeout=180)
            return str(raised.value)

    with ThreadPoolExecutor() as pool:
        words = set(pool.map(first, range(2)))
    assert len(words) == 1
    assert f"lost with keeper {lost}" in words.pop()
    run.train(2)
    with run.client("b") as plane:
        assert plane.ledger.as_dict()["dropped"] == {"lost": 6}
        assert plane.ledger.balanced


def test_a_killed_plane_comes_back_to_its_keepers(
    tmp_path: Path, stack: ExitStack, undisturbed: list[list[str]]
) -> None:
    run = Run(tmp_path, 2, stack)
    with run.client("a") as plane, ThreadPoolExecutor() as pool:
        plane.put(named_group(NAMES[0], samples=3, tokens=12), timeout=120)
        ranks = pool.submit(run.train, 3)
        run.plane.kill()
        rest = pool.submit(lambda: [plane.put(named_group(n, samples=3, tokens=12), timeout=180) for n in NAMES[1:]])
        run.start_plane(run.plane.url)
        assert rest.result() == [True] * 5
        assert ranks.result() == undisturbed
        wait_until(lambda: plane.ledger.committed == 18)


PRODUCER = """
import sys
import penstock as ps
from penstock.testing.groups import named_group
plane = ps.open(sys.argv[1], keys=sys.argv[2], node="a")
for name in sys.argv[3:]:
    plane.put(named_group(name, samples=3, tokens=12))
    print(name, flush=True)
sys.stdin.read()
"""


def test_a_killed_producer_loses_nothing_that_was_acknowledged(
    tmp_path: Path, stack: ExitStack, undisturbed: list[list[str]]
) -> None:
    run = Run(tmp_path, 2, stack)
    command = [sys.executable, "-c", PRODUCER, run.plane.url, str(run.keys), *NAMES]
    producer = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    assert producer.stdout is not None
    acknowledged = [producer.stdout.readline().decode().strip() for _ in range(3)]
    producer.send_signal(signal.SIGKILL)
    assert acknowledged == NAMES[:3]
    run.put(NAMES, "b")  # those that were there are recognised
    assert run.train(3) == undisturbed


def test_a_keeper_ends_in_order_and_says_why_it_does_not_start(tmp_path: Path, stack: ExitStack) -> None:
    run = Run(tmp_path, 2, stack)
    second = [sys.executable, "-m", "penstock.cli", "keep", f"--plane={run.plane.url}", f"--keys={run.keys}"]
    found = subprocess.run([*second, f"--folder={tmp_path / 'a'}"], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert f"another keeper has it open (process {run.keepers['a'].pid} of " in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1
    assert run.keepers["a"].stop() == 0


def test_a_shared_folder_is_waited_for_and_goes_on_where_a_keeper_is_started_on_it(
    tmp_path: Path, stack: ExitStack, undisturbed: list[list[str]]
) -> None:
    """Nobody serves it for longer than `keeper_s`: nothing is lost, and who waits is told what to start."""
    run = Run(tmp_path, "shared", stack)
    run.put(NAMES, "a")
    name = run.keepers["a"].name
    run.keepers["a"].kill()
    with run.client("b") as plane, ThreadPoolExecutor() as pool:
        wait_until(lambda: _keepers(plane)[name]["silent_s"] > TIMES.keeper_s + TIMES.heartbeat_s)
        ranks = pool.submit(run.train, 3)
        wait_until(lambda: f"keeper {name} (silent for" in plane.status()["waiting_for"])
        assert "its folder is shared: start `penstock keep` on it, on any node" in plane.status()["waiting_for"]
        assert run.start_keeper("c", folder="a").name == name
        assert ranks.result() == undisturbed
        ledger = plane.ledger
        assert ledger.balanced and ledger.committed == 18 and not ledger.dropped


def test_a_shared_folder_changes_its_node_while_ranks_wait_for_its_frames(
    tmp_path: Path, stack: ExitStack, undisturbed: list[list[str]]
) -> None:
    run = Run(tmp_path, "shared", stack)
    run.put(NAMES[:4], "a")
    with ThreadPoolExecutor() as pool:
        ranks = pool.submit(run.train, 3)  # they have steps, or addresses for them, when it dies
        run.keepers["a"].kill()
        second = run.start_keeper("b", folder="a")
        run.put(NAMES[4:], "a")
        assert ranks.result() == undisturbed
    second.kill()
    third = run.start_keeper("a")
    with run.client("a") as plane:
        wait_until(lambda: _keepers(plane)[third.name]["up"])
        assert _keepers(plane)[third.name]["node"] == "a"
        assert plane.ledger.balanced and plane.ledger.committed == 18


def test_a_keeper_that_was_cut_off_and_replaced_ends_when_it_comes_back(
    tmp_path: Path, stack: ExitStack, undisturbed: list[list[str]]
) -> None:
    """Another host has its folder, because the locks of the one that was cut off ran out."""
    run = Run(tmp_path, "shared", stack)
    run.put(NAMES, "a")
    old = run.keepers["a"].process
    old.send_signal(signal.SIGSTOP)
    try:
        shutil.copytree(tmp_path / "a", tmp_path / "there")  # on one host there is no other way past its locks
        assert run.start_keeper("c", folder="there").name == run.keepers["a"].name
    finally:
        old.send_signal(signal.SIGCONT)
    assert old.wait(120) == 1
    assert run.train(3) == undisturbed


def _keepers(plane: ps.Plane) -> dict[str, dict[str, Any]]:
    return {keeper["name"]: keeper for keeper in plane.status()["keepers"]}
