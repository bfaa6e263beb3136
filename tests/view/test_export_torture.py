"""kill -9 during export: at every call that changes the disk, and at random times; nothing half-written is ever shown.

One process prepares a finished step, then forks a child for each point of death. The child exports that step again, as
a restarted run would, and the next one, as two ranks; it dies at its k-th call that writes, syncs, renames, links or
removes. What is left must read as the step before or the step after, and a further attempt must complete.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from penstock.view import Export
from penstock.view.record import Skipped

pytestmark = pytest.mark.process

SCRIPT = '''
import os, pathlib, shutil, signal, sys
import numpy as np
from penstock.packing import pack
from tests.support.exports import Words, samples_of_step, terms_of
from penstock.view import Export, TokenExporter
from penstock.view.step_files import HashedFile

root = pathlib.Path(sys.argv[1])
words = Words()
samples = {n: samples_of_step(np.random.default_rng(n), words, n, groups=2, size=2) for n in (1, 2)}
steps = {n: pack(own, ranks=2, seq_len=512) for n, own in samples.items()}

def made(rank, attempt):
    return [(batch, terms_of(np.random.default_rng(attempt), batch)) for batch in rank]

fed = {(n, a): [made(rank, a) for rank in step.ranks] for n, step in steps.items() for a in (1, 2, 3)}

def export(folder, attempt, numbers):
    exporters = [TokenExporter(folder, rank=rank, world=2, attempt=str(attempt)) for rank in range(2)]
    for number in numbers:
        for rank, exporter in enumerate(exporters):
            for batch, terms in fed[number, attempt][rank]:
                exporter.write(number, batch, terms)
            exporter.flush()
        for exporter in exporters:
            exporter.close_step(number)
            exporter.flush()
    for exporter in exporters:
        exporter.close()

def die_at(k):
    """Count every call that changes the disk; at the k-th, die before it happens."""
    calls = iter(range(1, 10**9))
    def counted():
        if next(calls) == k:
            os.kill(os.getpid(), signal.SIGKILL)
    write, sync = HashedFile.write, os.fsync
    def counted_write(self, data):
        counted()
        if len(data) > 9:  # and once more halfway through: half a record may reach the disk
            self._file.write(data[: len(data) // 2]); self._file.flush()
            counted()
            self._file.seek(-(len(data) // 2), 2); self._file.truncate()
        return write(self, data)
    HashedFile.write = counted_write
    os.fsync = lambda fd: (counted(), sync(fd))[1]
    changing = ("os.rename", "os.remove", "os.link", "os.mkdir")
    sys.addaudithook(lambda event, args: counted() if event in changing else None)

before = root / "before"
export(before, 1, [1])
k, stride = 1, int(sys.argv[2])
while True:
    folder = root / f"at-{k}"
    shutil.copytree(before, folder)
    child = os.fork()
    if child == 0:
        die_at(k)
        export(folder, 2, [1, 2])
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0
        break
    # what a restart finds, and what it makes of it
    found = root / f"found-{k}"
    shutil.copytree(folder, found)
    export(folder, 3, [1, 2])
    k += stride
print(k)
'''


def summary(folder: Path, step: int) -> tuple[frozenset[str], float] | None:
    """What a reader sees of a step: its samples, and a number that tells the attempts apart. None: it is not shown."""
    export = Export(folder)
    if step not in [one.number for one in export.steps()]:
        return None
    shown, skipped = export.step(step), Skipped()
    records = list(shown.records(skipped))
    assert skipped.lines == 0 and shown.altered() == []
    assert len({done.attempt for done in shown.done().values()}) == 1 and len(shown.done()) == 2
    return frozenset(record.label for record in records), float(sum(np.nansum(r.columns["entropy"]) for r in records))


def test_death_at_any_call_leaves_the_step_before_or_the_step_after(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), "11"], capture_output=True, text=True, timeout=250, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    last = int(ran.stdout)
    whole = {1: summary(tmp_path / f"at-{last}", 1), 2: summary(tmp_path / f"at-{last}", 2)}
    first = summary(tmp_path / "before", 1)
    assert first is not None and whole[1] is not None and whole[2] is not None and first[1] != whole[1][1]
    deaths = sorted(tmp_path.glob("found-*"))
    assert len(deaths) > 20
    hidden = 0
    for found in deaths:
        seen = summary(found, 1)
        hidden += seen is None
        assert seen in (first, None, whole[1]) and summary(found, 2) in (None, whole[2])
        old = {path.stat().st_size for path in (found / "token_exports/step_1").glob("rank_0.jsonl*")}
        assert (tmp_path / "before/token_exports/step_1/rank_0.jsonl").stat().st_size in old  # nothing finished is lost
        again = tmp_path / found.name.replace("found", "at")
        done = Export(again).step(1).done()
        assert {mark.attempt for mark in done.values()} == {"3"} and summary(again, 2) is not None
    assert 0 < hidden < len(deaths)


LOOP = """
import pathlib, sys
import numpy as np
from tests.support.exports import make_export
print("ready", flush=True)
make_export(pathlib.Path(sys.argv[1]), steps=100000, ranks=2, groups=3, size=3, seed=int(sys.argv[2]))
"""


def test_death_at_random_times_shows_whole_steps_only(tmp_path: Path) -> None:
    rng = random.Random(4)
    shown = 0
    for seed in range(4):
        folder = tmp_path / str(seed)
        child = subprocess.Popen([sys.executable, "-c", LOOP, str(folder), str(seed)], stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        wait_for_step(folder, rng.randint(1, 6))
        time.sleep(rng.random() * 0.05)  # the point of death, not a wait for anything
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
        export, skipped = Export(folder), Skipped()
        for step in export.steps():
            assert step.altered() == [] and len(list(step.records(skipped))) == 9
            shown += 1
        assert skipped.lines == 0
        visible = [path for path in folder.rglob("rank_*.jsonl") if path.name[0] != "."]
        assert all(json.loads(line) for path in visible for line in path.read_text().splitlines())
    assert shown >= 4


def wait_for_step(folder: Path, number: int) -> None:
    deadline = time.monotonic() + 60
    while not (folder / f"token_exports/step_{number}/STABLE").exists():
        assert time.monotonic() < deadline, "the exporter made no progress in 60 s"
        time.sleep(0.005)
