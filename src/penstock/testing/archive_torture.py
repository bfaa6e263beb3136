"""A served plane that is killed again and again while it archives, and what its archive must hold in the end.

A producer puts groups, some for evaluation, a rank trains them, and the plane's process is killed at random moments and
started again. Then every committed step must be in the archive, every frame once and as it was put, and the run decided
again from the archive must make the same steps. `scripts/torture archive` runs it.
"""

from __future__ import annotations

import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import penstock as ps
from penstock.archive import RecordedRun
from penstock.archive.recorded import numbers_of, segment_of
from penstock.encode import encode
from penstock.errors import WaitTimeout
from penstock.serve.process.plane_process import PlaneProcess
from penstock.serve.process.rerun import rerun
from penstock.testing.processes import TIMEOUTS, evaluation_of, group_of

_DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveResult:
    """What came out."""

    kills: int
    steps: int
    """Committed."""
    groups: int
    """Frames in the archive."""
    missing: int
    """Committed steps, and frames of archived ones, that are not there."""
    doubled: int
    altered: int
    """Frames that are not as they were put."""
    differing: int
    """1 if the run, decided again, made another step."""

    @property
    def good(self) -> bool:
        return not (self.missing or self.doubled or self.altered or self.differing) and self.steps > 0


class _Users:
    """A producer and a rank, each in a thread, that outlive every plane."""

    def __init__(self, url: str) -> None:
        self._url, self._end = url, threading.Event()
        self.steps = 0
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._put, self._train)]
        for thread in self._threads:
            thread.start()

    def _put(self) -> None:
        number = 0
        with ps.open(self._url, timeouts=TIMEOUTS) as plane:
            while not self._end.is_set():
                plane.put_frame(f"g{number}", encode(group_of(number)))
                if number % 4 == 0:
                    plane.put_frame(f"e{number}", encode(evaluation_of(number)), evaluation=True)
                number += 1

    def _train(self) -> None:
        with ps.connect(self._url, rank=0, world=1, timeouts=TIMEOUTS) as source:
            while not self._end.is_set():
                try:
                    step = source.step(timeout=1.0)
                except WaitTimeout:
                    continue
                source.commit(step)
                self.steps = step.number
            source.flush()

    def stop(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(_DEADLINE_S)
            assert not thread.is_alive(), "a user of the plane did not end"


def torture_archive(folder: Path, *, kills: int, seed: int = 0) -> ArchiveResult:
    """Kill a plane so many times while it archives, then read its archive."""
    folder.mkdir(parents=True, exist_ok=True)
    random = Random(seed)  # noqa: S311 - chosen, not secret
    url, where = f"ipc://{folder}/s", str(folder / "archive")
    words = [str(folder / "run"), "--ranks=1", "--seq-len=64", "--groups-per-step=2", f"--listen={url}"]
    words += ["--over-length=truncate", "--untrained-groups=accept"]  # one group in eight is large
    words += [f"--archive={where}", "--retain-steps=2", "--retain-eval-bytes=100000"]
    plane = PlaneProcess(words, stderr=subprocess.DEVNULL)
    users = _Users(url)
    for _ in range(kills):
        time.sleep(random.uniform(0.2, 4.0))
        plane.kill()
        plane = PlaneProcess(words, stderr=subprocess.DEVNULL)
    users.stop()
    _wait_for_archive(url)
    plane.stop()
    return _result(where, folder, kills, users.steps)


def _wait_for_archive(url: str) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    with ps.open(url, timeouts=TIMEOUTS) as plane:
        while (found := plane.status()["archive"])["behind_steps"]:
            assert time.monotonic() < deadline, found
            time.sleep(0.05)


def _result(where: str, folder: Path, kills: int, steps: int) -> ArchiveResult:
    recorded = RecordedRun.open(where)
    blobs = recorded.blobs
    frames = [entry.op for number in numbers_of(blobs) for entry in segment_of(blobs, number).front.frames]
    wanted = {op for step in recorded.steps.values() for op in step.groups}
    made = {entry.id: recorded.frame(entry.op) for entry in recorded.in_order()}
    makers = {"g": group_of, "e": evaluation_of}
    return ArchiveResult(
        kills=kills,
        steps=steps,
        groups=len(frames),
        missing=len(set(range(1, steps + 1)) - set(recorded.steps)) + len(wanted - set(frames)) + len(recorded.missing),
        doubled=len(frames) - len(set(frames)),
        altered=sum(frame != encode(makers[name[0]](int(name[1:]))) for name, frame in made.items()),
        differing=int(not rerun(recorded, folder / "again").same),
    )
