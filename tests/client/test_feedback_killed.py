"""The feedback stream while plane and reader are killed: no event is missing, none comes twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock as ps
from penstock.errors import PenstockError
from penstock.protocol import FeedbackEvent, Timeouts
from penstock.server import PlaneProcess
from tests.support.groups import named_group
from tests.support.pace import eventually

pytestmark = pytest.mark.process

PATIENT = Timeouts(plane_s=120.0)
STEPS, PER_STEP = 40, 2
NAMES = [f"g{number:03}" for number in range(STEPS * PER_STEP)]
DISCARDS = [f"d{number:03}" for number in range(STEPS)]
READER = """
import os, sys
import penstock as ps
from penstock.errors import PenstockError
path = sys.argv[2]
lines = open(path, "a+")
lines.seek(0)
complete = [line for line in lines.read().splitlines(True) if line.endswith("\\n")]
lines.truncate(sum(map(len, complete)))
cursor = complete[-1].split()[0] if complete else ""
with ps.open(sys.argv[1]) as plane:
    for event in plane.feedback(after=cursor, follow=True):
        lines.write(f"{event.cursor} {event.outcome} {event.group} {event.step}\\n")
        lines.flush()
"""


def until_done(act: Callable[[], None], failed: list[BaseException]) -> threading.Thread:
    """Repeat what a plane that was killed interrupted."""

    def work() -> None:
        try:
            while True:
                try:
                    return act()
                except PenstockError:
                    continue
        except BaseException as error:
            failed.append(error)
            raise

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.mark.timeout(600)
def test_no_event_is_missing_or_doubled_while_plane_and_reader_are_killed(tmp_path: Path) -> None:
    url, noted = f"ipc://{tmp_path}/s", tmp_path / "noted"
    arguments = [
        str(tmp_path / "run"),
        "--ranks=1",
        "--seq-len=64",
        f"--groups-per-step={PER_STEP}",
        f"--listen={url}",
        "--snapshot-every=20",
        "--retain-steps=2",
    ]

    def put() -> None:
        with ps.open(url, timeouts=PATIENT) as plane:
            for name, discarded in zip(NAMES, [name for name in DISCARDS for _ in range(PER_STEP)], strict=True):
                plane.put(named_group(name))
                plane.discard("zero variance", 4, key=discarded, group=discarded)

    def train() -> None:
        with ps.connect(url, rank=0, world=1, timeouts=PATIENT) as source:
            for _ in range(STEPS):
                step = source.step(timeout=120)
                source.commit(step)
                if step.number == STEPS:
                    break
            source.flush()

    def read() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", READER, url, str(noted)], env=dict(os.environ))

    def lines() -> list[str]:
        return noted.read_text().splitlines() if noted.exists() else []

    failed: list[BaseException] = []
    plane, reader = PlaneProcess(arguments), read()
    total = len(NAMES) + len(DISCARDS)
    try:
        threads = [until_done(put, failed), until_done(train, failed)]
        for place, after in enumerate((10, 25, 45, 60, 80, 100)):
            eventually(lambda: len(lines()) >= after)  # noqa: B023
            if place % 2:
                plane.kill()
                plane = PlaneProcess(arguments)
            else:
                reader.send_signal(signal.SIGKILL)
                reader.wait(60)
                reader = read()
        for thread in threads:
            thread.join(240)
            assert not thread.is_alive()
        eventually(lambda: len(lines()) >= total)
        with ps.open(url, timeouts=PATIENT) as line:
            events = list(line.feedback())
    finally:
        reader.kill()
        reader.wait(60)
        plane.stop(60)
    assert not failed
    check([line.split() for line in lines()], events)


def check(found: list[list[str]], events: list[FeedbackEvent]) -> None:
    """`found` is what the readers wrote down, `events` what the plane has in the end."""
    assert [int(cursor.rpartition(".")[2]) for cursor, *_ in found] == list(range(1, len(found) + 1))
    assert [cursor for cursor, *_ in found] == [event.cursor for event in events][: len(found)]
    assert Counter(event.group for event in events if event.outcome == "filtered") == Counter(DISCARDS)
    # A step that a new session trains again is announced by a rewind; without one each group is trained once.
    rewinds = sum(event.outcome == "rewound" for event in events)
    trained = Counter(event.group for event in events if event.outcome == "trained")
    assert trained.keys() == set(NAMES)
    assert rewinds or trained == Counter(NAMES)
