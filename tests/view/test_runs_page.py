"""A folder of runs in real Chromium: the table, runs that begin and end while it is open, events, newest steps."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.view import Export, note_death
from penstock.view.library import Library, run_folders
from penstock.view.run_files import at_work
from penstock.view.web import runs_table, serving
from tests.support.browser import wait_until
from tests.support.exports import make_export
from tests.view.run_pages import address, metrics, write_lines

pytestmark = pytest.mark.process


def text_of(page: Any, run: str) -> list[str]:
    found: list[str] = page.eval_on_selector_all(
        f'#runs tr:has([data-open="{run}/"]) td', "all => all.map(one => one.textContent)"
    )
    return found


def test_a_folder_of_runs_is_a_table_that_follows_them(page: Any, tmp_path: Path) -> None:
    write_lines(tmp_path / "old" / "metrics.jsonl", [metrics(step) for step in range(1, 41)])
    os.utime(tmp_path / "old" / "metrics.jsonl", (1e9, 1e9))
    (tmp_path / "notes").mkdir()
    now = tmp_path / "now"
    now.mkdir()
    with at_work(now):
        make_export(now, steps=2, ranks=1, groups=2, size=2)
        with serving(Library(folder=tmp_path)) as (url, _, _):
            page.goto(url)
            page.wait_for_selector("#runs")
            assert page.locator("#runs tbody tr").count() == 2 and page.locator("#tab-runs.on").count() == 1
            assert text_of(page, "now")[2:4] == ["live", "2"]
            assert text_of(page, "old")[2:5] == ["–", "40", "0.7364"] and text_of(page, "old")[6].endswith("days ago")
            write_lines(tmp_path / "later" / "metrics.jsonl", [metrics(1)])
            page.wait_for_selector('[data-open="later/"]')
            page.click('[data-open="now/"]')
            page.wait_for_selector(".chart")
            assert page.text_content("#live") == "live"
            page.click("#tab-step")
            page.wait_for_selector("#step-counts table")
            page.click("#follow")
            address(page, "follow=1")
            make_export(now, steps=3, ranks=1, groups=2, size=2)
            address(page, "/3?")
            wait_until(page, "document.querySelector('#step').value === '3'")
            page.keyboard.press("0")
            page.wait_for_selector("#runs")
            for name in ("old", "later"):
                page.check(f'#runs tr:has([data-open="{name}/"]) input')
            page.click("#draw-together")
            page.wait_for_selector(".chart")
            wait_until(page, "document.querySelectorAll('.chart .key').length > 2")
    assert page.errors == []


def test_a_late_answer_does_not_replace_the_page_opened_meanwhile(page: Any, tmp_path: Path) -> None:
    (tmp_path / "now").mkdir()
    make_export(tmp_path / "now", steps=2, ranks=1, groups=2, size=2)
    held: list[Any] = []
    with serving(Library(folder=tmp_path)) as (url, _, _):
        page.goto(url)
        page.wait_for_selector("#runs")
        page.route("**/api/step?*", lambda request: held.append(request))
        page.goto(url + "#/step/now/~/2")
        page.wait_for_selector("#tab-step.on")
        page.keyboard.press("0")
        page.wait_for_selector("#runs")
        for request in held:
            with page.expect_response("**/api/step?*") as answer:
                request.continue_()
            answer.value.finished()
        page.evaluate("fetch('api/overview').then((later) => later.text())")  # what follows the answer is done
        assert len(held) == 1 and page.locator("#runs").count() == 1 and page.locator("#step-counts").count() == 0
    assert page.errors == []


def test_a_run_is_no_folder_of_runs_and_what_is_no_run_is_left_out(tmp_path: Path) -> None:
    write_lines(tmp_path / "runs" / "a" / "metrics.jsonl", [{"step": 3, "train/reward": 0.5}, {"step": 4}])
    (tmp_path / "runs" / "empty").mkdir()
    assert list(run_folders(tmp_path / "runs")) == ["a"] and run_folders(tmp_path / "runs" / "a") == {}
    library = Library(folder=tmp_path / "runs")
    (row,) = runs_table(library)["runs"]
    assert (row["export"], row["step"], row["reward"], row["state"]) == ("a", 4, 0.5, None)
    write_lines(tmp_path / "runs" / "b" / "metrics.jsonl", [{"step": 1}])
    assert [row["export"] for row in runs_table(library)["runs"]] == ["a", "b"]


def test_events_are_marked_on_the_curves_and_constant_charts_wait_behind_one_line(page: Any, tmp_path: Path) -> None:
    home = tmp_path / "run"
    write_lines(home / "metrics.jsonl", [metrics(step) for step in range(1, 41)])
    note_death(home, step=12, what="worker-0 was killed (SIGKILL)")
    with serving(Library(folder=tmp_path)) as (url, _, _):
        page.goto(url + "#/run/run/~/0")
        page.wait_for_selector('[data-curve="Reward"] ~ .marks .event')
        assert page.text_content("#events summary").startswith("1 kill: ")
        mark = page.locator('[data-curve="Reward"] ~ .marks .event')
        assert "step 12: worker-0 was killed (SIGKILL)" in mark.get_attribute("data-text")
        mark.hover()
        style = "getComputedStyle(document.querySelector('.event:hover'), '::after').content"
        wait_until(page, f"{style}.includes('worker-0')")
        note_death(home, step=30, what="plane was killed (SIGKILL)")
        wait_until(page, "document.querySelectorAll('[data-curve=\"Reward\"] ~ .marks .event').length === 2")
        assert page.text_content("#constant summary") == "5 charts with constant values"
        assert page.locator('#constant [data-curve="Staleness"]').count() == 1 and not page.is_visible(
            "#constant canvas"
        )
        page.click("#constant summary")
        page.wait_for_selector("#constant canvas")
        wait_until(page, "document.querySelector('#constant canvas').height > 100")
        address(page, "constant=1")
    assert page.errors == []


def put(plane: ps.Plane, reward: float) -> None:
    with plane.group("prompt", policy_version=0) as group:
        for own in (0.0, reward):
            turns = [ps.Turn([1, 2]), ps.Turn([3], logprobs=[-0.5])]
            group.add(ps.Trajectory(turns=turns, reward=own, env="math"))


def test_the_steps_of_a_plane_appear_by_themselves_and_its_end_is_said(page: Any, tmp_path: Path) -> None:
    with serving(Library(exports={"run": Export(tmp_path, awaited=True)})) as (url, _, _):
        with (
            ps.open(tmp_path / "plane", ranks=1, seq_len=16, groups_per_step=1) as plane,
            plane.source(0, prefetch=0) as source,
        ):
            put(plane, 1.0)
            source.commit(source.step(timeout=60))
            source.flush(60)
            page.goto(url)
            page.wait_for_selector(".chart")
            assert page.text_content("#live") == "live" and "Its plane runs since" in page.text_content("#state")
            assert page.text_content(".chart .key b") == "0.5"
            assert "seq_len = 16" in page.text_content("#settings pre")
            for reward in (2.0, 3.0):
                put(plane, reward)
                source.commit(source.step(timeout=60))
            source.flush(60)
            wait_until(page, "document.querySelector('.chart .key b').textContent === '1.5'")
            assert page.eval_on_selector_all("#step option", "all => all.map(o => o.value)") == ["3", "2", "1"]
        wait_until(page, "document.querySelector('#live').textContent === 'stopped'")
        assert "Its plane was closed at" in page.text_content("#state")
    assert page.errors == []


def test_a_run_whose_launcher_was_killed_is_said_to_be_gone(page: Any, tmp_path: Path) -> None:
    home = tmp_path / "run"
    write_lines(home / "metrics.jsonl", [metrics(step) for step in range(1, 4)])
    with at_work(home), serving(Library(folder=tmp_path)) as (url, _, _):
        page.goto(url + "#/run/run/~/0")
        wait_until(page, "document.querySelector('#live')?.textContent === 'live'")
        state = json.loads((home / "state.json").read_text())
        (home / "state.json").write_text(json.dumps(state | {"pid": 2**22 - 3}))
        wait_until(page, "document.querySelector('#live')?.textContent === 'gone'")
        assert "Its process is gone, and left no reason. Last sign of it" in page.text_content("#state")
        assert page.text_content("#age").endswith(" ago")
    assert page.errors == []
