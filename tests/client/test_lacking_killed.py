"""Judges and planes of real processes, killed while rewards are attached: every group is scored with one value."""

from __future__ import annotations

import signal
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

import penstock as ps
from penstock.protocol import Timeouts
from penstock.runs import RecordedRun, stored_samples
from penstock.server import PlaneProcess
from tests.support.late_groups import put_late
from tests.support.pace import eventually

pytestmark = pytest.mark.process

GROUPS, KILLS = 120, 4
PATIENT = Timeouts(plane_s=240.0)
JUDGE = """
import sys, zlib
import penstock as ps
from penstock.protocol import Timeouts
with ps.open(sys.argv[1], timeouts=Timeouts(plane_s=240.0)) as plane:
    for lease in plane.lacking("rewards", groups=3, lease_s=1.0):
        for name, samples in lease.groups.items():
            bad = {s.id: "cannot be scored" for s in samples if zlib.crc32(s.id.encode()) % 11 == 0}
            good = {s.id: zlib.crc32(s.id.encode()) % 5 + 0.1 for s in samples if s.id not in bad}
            lease.attach(good, errors=bad)
"""


def words(folder: Path) -> list[str]:
    sizes = ["--ranks=1", "--seq-len=64", "--groups-per-step=1", "--capacity=100000", f"--listen=ipc://{folder}/s"]
    return [str(folder / "run"), *sizes, "--retain=all", "--needs=rewards", "--set=needs_deadline_s=3600"]


def expected(name: str) -> float | None:
    number = zlib.crc32(name.encode())
    return None if number % 11 == 0 else number % 5 + 0.1


def test_every_group_gets_its_rewards_once_whatever_is_killed(tmp_path: Path) -> None:
    plane = PlaneProcess(words(tmp_path))
    url, names = plane.url, [f"g{number:03}" for number in range(GROUPS)]
    judges = [subprocess.Popen([sys.executable, "-c", JUDGE, url]) for _ in range(2)]
    try:
        with ps.open(url, timeouts=PATIENT) as producer:
            for kill in range(KILLS):
                for name in names[kill * GROUPS // KILLS : (kill + 1) * GROUPS // KILLS]:
                    put_late(producer, name, 3)
                # Until some are scored, by either judge: one may do all the work while the other one starts.
                eventually(lambda: producer.ledger.waiting < 3 * GROUPS // KILLS)
                victim = judges[kill % 2]
                victim.send_signal(signal.SIGKILL)
                victim.wait(60)
                judges[kill % 2] = subprocess.Popen([sys.executable, "-c", JUDGE, url])
                if kill % 2:
                    plane.kill()
                    plane = PlaneProcess(words(tmp_path))
            eventually(lambda: producer.ledger.waiting == 0)
            ledger = producer.ledger
            assert ledger.balanced
            assert ledger.accepted == 3 * GROUPS == ledger.held + ledger.dropped.total()
    finally:
        for judge in judges:
            judge.kill()
            judge.wait(60)
        plane.stop(60)
    rows = RecordedRun.open(tmp_path / "run").groups.values()
    assert sorted(row.id for row in rows) == names
    for row in rows:
        for sample in stored_samples(tmp_path / "run", row.id, row.location):
            reward = expected(sample.id)
            assert ("rewards" in sample) == (reward is not None)
            assert reward is None or float(sample["rewards"]) == pytest.approx(reward)
