"""The journal of a TransferQueue: what was acknowledged is replayed, whatever was killed, on a folder and on S3."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.cli import main
from penstock.errors import Conflict, Fenced
from penstock.integrations.transfer_queue.backend import read_columns
from penstock.integrations.transfer_queue.journal import (
    ClearNote,
    History,
    Journal,
    RowFront,
    TagNote,
    begin,
    read_history,
)
from penstock.integrations.transfer_queue.typed_cells import cells_of, decode_value, encode_value
from penstock.storage import FolderStorage, Gone, KeptStorage, Marker, ObjectStorage

pytestmark = pytest.mark.deep


@pytest.fixture(params=["folder", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> KeptStorage:
    if request.param == "folder":
        return FolderStorage(tmp_path / "queue")
    return ObjectStorage(f"s3://{request.getfixturevalue('s3_bucket')}/queue")


def row(key: str | None, stamp: tuple[int, float], tag: dict[str, Any], **columns: Any) -> tuple[RowFront, list[Any]]:
    encoded = {name: cells_of(name, [value], 1) for name, value in columns.items()}
    front = RowFront(
        "train", key, stamp, encode_value(tag, "tag"), {name: cell for name, ([cell], _) in encoded.items()}
    )
    return front, [piece for _, [piece] in encoded.values()]


def state(history: History, storage: KeptStorage) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Key -> tag and values."""
    found = {}
    for key, kept in history.rows.get("train", {}).items():
        values = read_columns(storage, {name: [place] for name, place in kept.columns.items()})
        found[key] = (
            decode_value(kept.tag),
            {name: torch.as_tensor(value.unbind()[0]).tolist() for name, value in values.items()},
        )
    return found


def test_random_changes_by_several_processes_and_jobs_are_replayed_as_they_were_made(storage: KeptStorage) -> None:
    choose = random.Random(7)
    wanted: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    clock = 1000.0
    for job in range(1, 4):
        assert begin(storage) == job
        clock -= 50  # the next controller may be on a host whose clock is behind
        ends = [Journal(storage, job) for _ in range(3)]
        if job > 1:  # as `restore` does
            history = read_history(storage)
            ends[0].write_snapshot((job, 0.0), history.replayed(before=job).rows).result()
            storage.delete(history.dead(job))
        for _ in range(40):
            clock += 0.25
            end, key = choose.choice(ends), f"k{choose.randrange(6)}"
            tag, columns = wanted.get(key, ({}, {}))
            if (what := choose.choice(["put", "put", "tag", "clear"])) == "put":
                some = {choose.choice("ab"): torch.full((choose.randrange(1, 50),), choose.randrange(99))}
                end.write_rows([row(key, (job, clock), {**tag, "put": clock}, **some)]).result()
                wanted[key] = (
                    {**tag, "put": clock},
                    {**columns, **{name: value.tolist() for name, value in some.items()}},
                )
            elif what == "tag":
                end.write_note(TagNote("train", (job, clock), {key: encode_value({"t": clock}, "tag")})).result()
                wanted[key] = ({"t": clock}, columns)
            else:
                rows = read_history(storage).rows.get("train", {})
                places = {text.split(" ")[0] for text in rows[key].columns.values()} if key in rows else set()
                end.write_note(ClearNote("train", (job, clock), [key], sorted(places))).result()
                end.free(places).result()
                wanted.pop(key, None)
        for end in ends:
            end.close()
        assert state(read_history(storage), storage) == wanted


def test_rows_that_were_cleared_take_no_space_after_the_next_start(tmp_path: Path) -> None:
    storage = FolderStorage(tmp_path / "queue")
    journal = Journal(storage, begin(storage))
    places = journal.write_rows([row(f"k{i}", (1, 1.0), {}, x=torch.zeros(1 << 16)) for i in range(8)]).result()
    journal.write_rows([row(None, (1, 1.5), {}, x=torch.zeros(9))]).result()
    gone = sorted({text.split(" ")[0] for one in places[:7] for text in one.values()})
    journal.write_note(ClearNote("train", (1, 2.0), [f"k{i}" for i in range(7)], gone)).result()
    journal.close()  # killed before it freed them
    after = Journal(storage, begin(storage))
    history = read_history(storage)
    after.write_snapshot((2, 0.0), history.replayed(before=2).rows).result()
    storage.delete(history.dead(2))
    after.close()
    again = read_history(storage)
    assert list(again.rows["train"]) == ["k7"] and len(again.keyless) == 1
    assert sum(storage.segments().values()) < 2 << 18
    assert again.dead(2) == [] and [name for name in again.dead(3) if ":" not in name], "the notes go at the next start"


def test_a_full_segment_is_removed_with_its_last_row_where_holes_cannot_be_punched(tmp_path: Path) -> None:
    storage = FolderStorage(tmp_path / "queue")
    storage.segment_bytes = 1 << 16
    journal = Journal(storage, begin(storage))
    rows = [row(f"k{i}", (1, 1.0), {}, x=torch.zeros(5000)) for i in range(8)]
    # The last two rows lie beyond the size at which a segment is full: they were written with those before them.
    locations = [next(iter(one.values())).split(" ")[0] for one in journal.write_rows(rows).result()]
    journal.free(locations[:6]).result()
    assert list(storage.segments()) == [locations[0].split(":")[0]]
    journal.free(locations[6:]).result()
    assert not storage.segments()
    journal.close()


def test_a_torn_and_a_damaged_row_are_reported_and_the_others_read(tmp_path: Path) -> None:
    storage = FolderStorage(tmp_path / "queue")
    journal = Journal(storage, begin(storage))
    journal.write_rows([row(f"k{i}", (1, float(i)), {"i": i}, x=torch.arange(100)) for i in range(4)]).result()
    journal.close()
    [file] = (tmp_path / "queue" / "segments").iterdir()
    data = bytearray(file.read_bytes())
    data[len(data) // 4 * 2 - 20] ^= 1  # in the body of the second row
    file.write_bytes(data[:-7])
    history = read_history(storage)
    assert sorted(history.rows["train"]) == ["k0", "k2"] and len(history.damaged) == 2
    assert "checksum" in history.damaged[0] and "torn" in history.damaged[1]
    gone = sorted({text.split(" ")[0] for kept in history.rows["train"].values() for text in kept.columns.values()})
    again = Journal(storage, begin(storage))
    again.write_note(ClearNote("train", (1, 9.0), ["k0", "k2"], gone)).result()
    again.close()
    assert file.name not in read_history(storage).dead(3), "what cannot be read may be a row that exists"


def test_a_storage_of_a_plane_is_rejected_and_one_job_at_a_time_writes(tmp_path: Path) -> None:
    storage = FolderStorage(tmp_path / "queue")
    old = Journal(storage, begin(storage))
    new = Journal(storage, begin(storage))
    with pytest.raises(Fenced, match="another job started on this storage"):
        old.write_note(TagNote("train", (1, 1.0), {})).result()
    new.write_note(TagNote("train", (2, 1.0), {})).result()
    old.close()
    new.close()
    other = FolderStorage(tmp_path / "plane")
    other.set_marker(Marker(run_id="f" * 32, epoch=1, commits=0, run="demo").to_bytes(), None)
    with pytest.raises(Conflict, match="holds run 'demo'; give the queue a storage of its own"):
        begin(other)


def test_what_was_deleted_is_said_to_be_gone(storage: KeptStorage) -> None:
    journal = Journal(storage, begin(storage))
    [places] = journal.write_rows([row("k", (1, 1.0), {}, x=torch.arange(3))]).result()
    assert read_columns(storage, {"x": [places["x"]]})["x"].unbind()[0].tolist() == [0, 1, 2]
    storage.delete([places["x"].split(":")[0]])
    with pytest.raises(Gone):
        read_columns(storage, {"x": [places["x"]]})
    journal.close()


def test_view_prints_the_first_rows_and_says_what_it_does_not_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = FolderStorage(tmp_path / "queue")
    journal = Journal(storage, begin(storage))
    values = {"input_ids": torch.arange(5000), "hidden": torch.zeros(4).bfloat16(), "text": "\x1b[31m" * 500}
    journal.write_rows(
        [row(f"k{i:02}", (1, float(i)), {"status": "done", "i": i}, **values) for i in range(30)]
    ).result()
    journal.write_rows([row(None, (1, 99.0), {}, x=torch.zeros(1))]).result()
    journal.write_note(ClearNote("train", (1, 100.0), ["k01"], [])).result()
    journal.close()
    assert main(["view", str(tmp_path / "queue")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0] == f"file://{tmp_path}/queue: 29 keys (train 29)" and lines[1] == "1 rows without a key are not shown"
    )
    assert lines[3] == "train k00  {'status': 'done', 'i': 0}" and lines[-1] == "9 more keys are not shown"
    assert lines[4] == "  input_ids  int64[5000]       0 1 2 3 4 5 6 7 ..."
    assert lines[5] == "  hidden     bfloat16[4]       (8 bytes)"
    assert "\x1b" not in "".join(lines) and max(map(len, lines[3:])) <= 200
    assert not any("k01" in line for line in lines)


WRITER = """
import sys
from concurrent.futures import ThreadPoolExecutor
from penstock.integrations.transfer_queue.journal import Journal
from penstock.storage import open_storage
from tests.integrations.test_queue_journal import row
import torch
journal, name = Journal(open_storage(sys.argv[1]), 1), sys.argv[2]
def put(number):
    value = torch.full((300,), number)
    journal.write_rows([row(f"{name}-{number}", (1, float(number)), {"n": number}, x=value)]).result()
    print(f"{number}\\n", end="", flush=True)  # with one write: there are other threads
with ThreadPoolExecutor(4) as pool:
    list(pool.map(put, range(100_000)))
"""


@pytest.mark.process
def test_a_killed_writer_loses_nothing_that_it_acknowledged(tmp_path: Path) -> None:
    storage = FolderStorage(tmp_path / "queue")
    begin(storage)
    logs = [tmp_path / f"log-{i}" for i in range(2)]
    writers = []
    for i, log in enumerate(logs):
        with log.open("w") as file:
            command = [sys.executable, "-c", WRITER, str(tmp_path / "queue"), f"w{i}"]
            writers.append(subprocess.Popen(command, stdout=file, env={**os.environ, "PYTHONPATH": ":".join(sys.path)}))
    deadline = time.monotonic() + 120
    while min(len(log.read_text().split()) for log in logs) < 50:
        assert time.monotonic() < deadline and all(one.poll() is None for one in writers)
        time.sleep(0.05)
    for one in writers:
        one.send_signal(signal.SIGKILL)
        one.wait()
    found = state(read_history(storage), storage)
    for i, log in enumerate(logs):
        for number in map(int, log.read_text().split()):
            assert found[f"w{i}-{number}"] == ({"n": number}, {"x": np.full(300, number).tolist()})
