"""verl over the TransferQueue backend: its settings, its plugin, and a job that is killed and resumes where it was."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT, FOLDER = Path(__file__).parents[2], Path(sys.prefix).parent
JOB = ROOT / "tests" / "upstream" / "verl_job.py"
pytestmark = pytest.mark.filterwarnings("default")  # of packages that are not ours


def test_verl_knows_the_backend_once_it_is_imported() -> None:
    program = (
        "from tests.upstream import conftest\nimport verl\n"
        "from transfer_queue.storage.managers.base import StorageManagerFactory as factory\n"
        "print('Penstock' in factory._registry)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True"


def start(storage: Path, notes: Path, which: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(JOB), str(storage), str(notes), which]
    place = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}:{FOLDER / 'verl'}"}
    with (notes / f"{which}.log").open("wb") as log:
        return subprocess.Popen(command, env=place, stdout=log, stderr=log)


def notes_in(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """What was acknowledged, and by which process."""
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            yield path, json.loads(line)


def names(folder: Path, what: str) -> list[str]:
    return [name for _, (kind, *some) in notes_in(folder) if kind == what for name in some]


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)


@pytest.mark.timeout(1200)  # four processes import verl, and two of them start Ray
def test_a_killed_job_resumes_with_every_acknowledged_key_tag_and_row(tmp_path: Path) -> None:
    """verl's agent loop worker, replay buffer and re-issue of prompts, with invented answers; see verl_job.py."""
    notes = tmp_path / "notes"
    notes.mkdir()
    job = start(tmp_path / "queue", notes, "first")
    deadline = time.monotonic() + 500
    while len(names(notes, "trained")) < 20:
        assert job.poll() is None and time.monotonic() < deadline, (notes / "first.log").read_text()[-3000:]
        time.sleep(0.1)
    workers = [int(path.stem) for path in notes.glob("*.jsonl") if int(path.stem) != job.pid]
    for pid in (job.pid, *workers):
        os.kill(pid, signal.SIGKILL)
    job.wait()
    wait_until_gone(workers)

    prompts, rows, finished = (set(names(notes, what)) for what in ("prompts", "row", "finished"))
    sampled, trained = set(names(notes, "sampled")), set(names(notes, "trained"))
    is_sampling = [kind for path, (kind, *_) in notes_in(notes) if path.stem == str(job.pid)][-1] == "sampling"
    done = start(tmp_path / "queue", notes, "second")
    try:
        assert done.wait(timeout=500) == 0, (notes / "second.log").read_text()[-3000:]
    finally:
        done.kill()
    for one in (job, done):
        shutil.rmtree(f"/tmp/ps-{one.pid}", ignore_errors=True)  # Ray's folder
    found = json.loads((notes / "found.json").read_text())

    # Prompts: each that was registered and not sampled. One may have been sampled without a note of it.
    kept = {key: tag for key, tag in found["keys"].items() if tag.get("is_prompt")}
    lost = (prompts - sampled) - kept.keys()
    assert len(lost) <= is_sampling and lost <= finished
    assert not kept.keys() & sampled
    assert all(tag["status"] == "finished" for key, tag in kept.items() if key in finished), "tags are as acknowledged"
    assert {tag["status"] for tag in kept.values()} >= {"running", "finished"}, "killed in the middle"
    # Rows: each that was put and not cleared after training.
    assert {key for key in rows if key.split("_")[0] not in sampled} <= found["keys"].keys()
    assert not {key for key in found["keys"] if key.split("_")[0] in trained}
    # The second job read each row and compared it with what the first one generated; it generated only what was lost.
    assert sorted(found["trained"]) == sorted(kept)
    again = [
        key
        for path, (kind, *some) in notes_in(notes)
        if kind == "row" and path.stem not in map(str, workers)
        for key in some
    ]
    assert {key.split("_")[0] for key in again} == {key for key, tag in kept.items() if tag["status"] != "finished"}
