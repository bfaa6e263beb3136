"""What a page is told while a run goes on: numbers of every step, how the run is, and nothing twice."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.view import Export
from penstock.view.access import cookie_name
from penstock.view.library import Library, is_run_folder, runs_of
from penstock.view.run_files import RunState, as_columns, at_work, rows_since, state_of
from penstock.view.web import Watch, parse_read, serving
from tests.support.exports import make_export


def add(folder: Path, name: str, *rows: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _without_last(overview: dict[str, Any]) -> list[dict[str, Any]]:
    (export,) = overview["exports"]
    assert all(run.pop("last") > 0 for run in export["runs"])
    return list(export["runs"])


def told(watch: Watch) -> list[tuple[str, dict[str, Any]]]:
    """The events of a look, as a browser reads them."""
    found = []
    for event in watch.look(at_all=True):
        fields = dict(line.split(": ", 1) for line in event.decode().strip().split("\n"))
        found.append((fields["event"], json.loads(fields["data"])))
    return found


def test_only_what_was_added_is_read_and_a_line_that_is_not_whole_waits(tmp_path: Path) -> None:
    add(tmp_path, "metrics.jsonl", {"step": 1, "train/reward": 0.5}, {"step": 2, "train/reward": None})
    rows, places = rows_since(tmp_path, {})
    assert rows == [{"step": 1, "train/reward": 0.5}, {"step": 2, "train/reward": None}]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "train/re')
    assert rows_since(tmp_path, places) == ([], places)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('ward": 0.75}\n')
    rows, places = rows_since(tmp_path, places)
    assert rows == [{"step": 3, "train/reward": 0.75}] and rows_since(tmp_path, places)[0] == []


def test_a_step_trained_again_counts_with_its_last_line_and_both_files_are_one_row(tmp_path: Path) -> None:
    add(tmp_path, "metrics.jsonl", {"step": 1, "a": 1}, {"step": 2, "a": 2}, {"step": 1, "a": 9})
    add(tmp_path, "plane.jsonl", {"step": 2, "buffer/held": 7})
    rows, _ = rows_since(tmp_path, {})
    assert as_columns(rows) == {"step": [1, 2], "a": [9, 2], "buffer/held": [None, 7]}


def test_lines_that_are_no_rows_are_passed_over_and_a_file_begun_anew_is_read_from_its_start(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('[]\nx\n{"a": 1}\n{"step": true}\n{"step": 4, "a": "text", "b": true}\n')
    rows, places = rows_since(tmp_path, {})
    assert rows == [{"step": 4}]
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 2}\n')
    assert rows_since(tmp_path, places)[0] == [{"step": 1, "a": 2}]


def test_a_run_says_that_it_runs_and_how_it_ended(tmp_path: Path) -> None:
    assert state_of(tmp_path) is None
    with at_work(tmp_path):
        running = state_of(tmp_path)
        assert running is not None and (running.state, running.pid, running.ended) == ("running", os.getpid(), None)
    done = state_of(tmp_path)
    assert done is not None and done.state == "finished" and done.ended is not None and done.ended >= done.began
    for error, word in ((KeyboardInterrupt(), "stopped"), (ValueError("x"), "failed")):
        with pytest.raises(type(error)), at_work(tmp_path):
            raise error
        found = state_of(tmp_path)
        assert found is not None and found.state == word
        assert found.earlier_s == done.seconds and found.seconds >= done.seconds, "starts add up"
        done = found


def test_a_run_whose_process_was_killed_is_gone(tmp_path: Path) -> None:
    with at_work(tmp_path):
        found = state_of(tmp_path)
    assert found is not None
    dead = msgspec.structs.replace(found, state="running", pid=2**22 + 7)
    (tmp_path / "state.json").write_bytes(msgspec.json.encode(dead))
    seen = state_of(tmp_path)
    assert seen is not None and seen.state == "gone"
    elsewhere = msgspec.structs.replace(dead, host="another")
    (tmp_path / "state.json").write_bytes(msgspec.json.encode(elsewhere))
    assert state_of(tmp_path) == elsewhere
    (tmp_path / "state.json").write_bytes(b"{")
    assert state_of(tmp_path) is None
    assert isinstance(elsewhere, RunState)


def test_a_page_is_told_of_new_steps_and_of_new_numbers_of_runs_it_shows(tmp_path: Path) -> None:
    add(tmp_path, "metrics.jsonl", {"step": 1, "a": 1})
    library = Library(exports={"run": Export(tmp_path, awaited=True)})
    watch = Watch(library, {"run\n": library.run("run", "")["at"]})
    ((kind, overview),) = told(watch)
    assert kind == "overview" and _without_last(overview) == [{"run": "", "steps": [], "state": None, "events": 0}]
    assert told(watch) == []
    add(tmp_path, "metrics.jsonl", {"step": 2, "a": 4})
    assert told(watch) == [("rows", {"export": "run", "run": "", "metrics": {"step": [2], "a": [4]}})]
    make_export(tmp_path, steps=1, ranks=1, groups=1, size=1)
    ((kind, overview),) = told(watch)
    assert kind == "overview" and overview["exports"][0]["runs"][0]["steps"] == [1]
    assert told(Watch(library)) == [("overview", overview)], "a page that shows no curves is told of no rows"


def test_what_a_page_says_it_has_read_may_be_anything() -> None:
    assert parse_read('{"a\\n": {"metrics.jsonl": 3}}') == {"a\n": {"metrics.jsonl": 3}}
    for text in ("", "x", "[]", '{"a": 3}', '{"a": {"b": "c"}}', "[" * 5000):
        assert parse_read(text) == {}


def test_the_runs_of_a_folder_are_those_that_export_or_write_numbers(tmp_path: Path) -> None:
    make_export(tmp_path, steps=1, ranks=1, groups=1, size=1, run="alpha")
    add(tmp_path / "beta", "metrics.jsonl", {"step": 1, "a": 1})
    (tmp_path / "other").mkdir()
    export = Export(tmp_path)
    assert runs_of(export) == ["alpha", "beta"] and is_run_folder(tmp_path) and not is_run_folder(tmp_path / "other")
    add(tmp_path, "metrics.jsonl", {"step": 5, "a": 1})
    assert runs_of(export) == ["", "alpha", "beta"]
    library = Library(exports={"all": export})
    assert library.run("all", "beta")["metrics"] == {"step": [1], "a": [1]}
    assert library.run("all", "")["metrics"]["step"] == [5] and library.run("all", "alpha")["metrics"] == {}


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[tuple[Path, int, str]]:
    add(tmp_path, "metrics.jsonl", {"step": 1, "a": 1})
    with serving(Library(exports={"run": Export(tmp_path, awaited=True)})) as (_, port, token):
        yield tmp_path, port, token


def test_the_stream_brings_events_and_goes_on_where_the_page_had_read_to(watched: tuple[Path, int, str]) -> None:
    folder, port, token = watched
    seen: list[str] = []
    for last in ("", '{"run\\n":{"metrics.jsonl":0}}'):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        headers = {"Cookie": f"{cookie_name(token)}={token}", **({"Last-Event-ID": last} if last else {})}
        connection.request("GET", "/events", headers=headers)
        answer = connection.getresponse()
        assert answer.status == 200 and answer.getheader("content-type", "").startswith("text/event-stream")
        while not seen or seen[-1] not in ("event: rows", "event: overview"):
            seen.append(answer.readline().decode().strip())
        if last:
            while not seen[-1].startswith("data: ") or "metrics" not in seen[-1]:
                seen.append(answer.readline().decode().strip())
        connection.close()
        seen.append("")
    assert json.loads(seen[-2].removeprefix("data: "))["metrics"] == {"step": [1], "a": [1]}
    assert "retry: 1000" in seen and folder.exists()
