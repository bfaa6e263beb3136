"""Files of a run's folder: texts for its tokens, metrics, the plane's numbers; and the page that shows them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from penstock.demo.processes import worker_environment
from penstock.demo.screen import live_page
from penstock.demo.tasks import COLOR, REVERSE, write_tokenizer
from penstock.train.metrics_sinks import memory
from penstock.view.run_files import Metrics, PlaneLines, rows_since
from penstock.view.vocabulary import open_vocabulary

LEDGER = {"accepted": 9, "committed": 4, "held": 3, "dropped": {"stale": 2}}


def test_the_demos_tokens_have_texts(tmp_path: Path) -> None:
    for task, tokens in (("reverse", REVERSE), ("color", COLOR)):
        folder = tmp_path / task
        folder.mkdir()
        write_tokenizer(folder, task)
        vocabulary = open_vocabulary(folder)
        assert [(vocabulary.text(i) or "").strip() for i in range(len(tokens))] == list(tokens)
    text = "".join(vocabulary.text(COLOR.index(word)) or "" for word in ("<bos>", "what", "color", "is", "the", "?"))
    assert text == "<bos> what color is the?"


def test_a_tokenizer_that_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    write_tokenizer(tmp_path, "reverse")
    assert (tmp_path / "tokenizer.json").read_text() == "{}"


def test_the_planes_numbers_are_written_once_for_each_step_it_comes_to(tmp_path: Path) -> None:
    lines = PlaneLines(tmp_path / "plane.jsonl")
    for next_step, accepted in ((1, 5), (2, 6), (2, 8), (4, 9)):
        lines.note({"next_step": next_step, "ledger": {**LEDGER, "accepted": accepted}})
    rows, _ = rows_since(tmp_path, {})
    assert [(row["step"], row["gen/accepted"]) for row in rows] == [(1, 6), (3, 9)]
    assert rows[0]["buffer/dropped/stale"] == 2 and rows[0]["buffer/held"] == 3


def test_memory_is_that_of_this_process() -> None:
    first = memory()["perf/memory_bytes"]
    held = bytearray(200_000_000)
    held[::4096] = b"x" * len(held[::4096])
    assert 1e7 < first < memory()["perf/memory_bytes"] - 1e8


def test_the_page_of_a_run_is_there_before_its_first_file(tmp_path: Path) -> None:
    from http.client import HTTPConnection

    from penstock.view.access import cookie_name

    with live_page(tmp_path) as url:
        port, token = int(url.split(":")[2].split("/")[0]), url.split("token=")[1]
        connection = HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request("GET", "/api/overview", headers={"Cookie": f"{cookie_name(token)}={token}"})
        (run,) = json.loads(connection.getresponse().read())["exports"][0]["runs"]
        connection.close()
    assert run == {"run": "", "steps": [], "state": None, "events": 0, "last": None}
    with pytest.raises(ConnectionRefusedError):
        HTTPConnection("127.0.0.1", port, timeout=5).connect()


def test_of_old_steps_a_running_launcher_keeps_the_reward_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s, "train/reward": None, "perf/x": s}) + "\n" for s in range(1, 6)))
    rows = Metrics(path, whole_rows=2).read()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [sorted(row) for row in rows[:3]] == [["step", "train/reward"]] * 3 and rows[3]["perf/x"] == 4
    assert Metrics(path).read()[0]["perf/x"] == 1


def test_worker_processes_get_one_thread_and_the_parent_keeps_its_own() -> None:
    before = dict(os.environ)
    environment = worker_environment({**before, "MKL_NUM_THREADS": "32"})
    assert {environment[n] for n in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")} == {"1"}
    assert environment["MALLOC_ARENA_MAX"] == "2"
    assert environment["PATH"] == before["PATH"]
    assert dict(os.environ) == before
