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
from penstock.runs import RecordedRun, check, stored_samples
from penstock.server import PlaneProcess
from tests.support.late_groups import nothing_to_delete, put_late
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


# A judge that writes frames itself. It may die before a frame, between two, or before the plane has heard of them.
DYING = """
import os, signal, sys, zlib
import penstock as ps
from penstock.client.direct import DirectWriter
from penstock.protocol import Timeouts
written, write = 0, DirectWriter.write
def write_and_die(self, pieces, *more):
    global written
    written += 1
    if written == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    found = write(self, pieces, *more)
    if written == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    return found
DirectWriter.write = write_and_die
with ps.open(sys.argv[1], timeouts=Timeouts(plane_s=240.0)) as plane:
    for lease in plane.lacking("teacher_logprobs", groups=3, lease_s=1.0):
        for half in (0, 1):
            lease.attach({s.id: [-0.5 * (zlib.crc32(s.id.encode()) % 5)] * s.num_tokens
                          for i, s in enumerate(lease.samples) if i % 2 == half})
"""


TEACHER = [sys.executable, "-c", DYING]


def test_a_judge_killed_around_the_frames_it_writes_harms_no_group(tmp_path: Path) -> None:
    needs = ["--needs=teacher_logprobs" if word == "--needs=rewards" else word for word in words(tmp_path)]
    plane, names = PlaneProcess(needs), [f"g{number:02}" for number in range(12)]
    try:
        with ps.open(plane.url, timeouts=PATIENT) as producer:
            for name in names:
                put_late(producer, name, 3, advantage=None)
            # Killed before its first frames, after its first, and after its third; the last one works to the end.
            for before, after in ((1, 0), (0, 1), (0, 3)):
                judge = subprocess.run([*TEACHER, plane.url, str(before), str(after)], timeout=240, check=False)
                assert judge.returncode == -signal.SIGKILL
            last = subprocess.Popen([*TEACHER, plane.url, "0", "0"])
            try:
                eventually(lambda: producer.ledger.held == 3 * len(names))
            finally:
                last.kill()
                last.wait(60)
            eventually(lambda: nothing_to_delete(producer))
    finally:
        plane.stop(60)
    found = check(tmp_path / "run")
    assert (found.frames, found.damaged, found.missing, found.unregistered, found.lost) == (len(names), [], [], {}, 0)
    # What the killed judges wrote and did not attach is in their segments, which are deleted once they are old.
    assert found.broken == [] and found.unused > 0
    for row in RecordedRun.open(tmp_path / "run").groups.values():
        for sample in stored_samples(tmp_path / "run", row.id, row.location):
            assert (
                sample["teacher_logprobs"].tolist() == [-0.5 * (zlib.crc32(sample.id.encode()) % 5)] * sample.num_tokens
            )


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
