"""The page of a run in real Chromium: curves, one cursor through all of them, several runs together.

Pictures are left in artifacts/, at two widths and in both themes.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import keep_pictures, wait_until
from tests.view.run_pages import ARTIFACTS, STEPS, address, keys, metrics

pytestmark = pytest.mark.process


def test_the_run_page_draws_every_step_that_was_written_down(at: Any) -> None:
    page = at("run/runs/alpha/3", ".chart")
    titles = page.eval_on_selector_all(".chart h2", "all => all.map(e => e.textContent)")
    wanted = ["Reward", "Loss", "Grad norm", "Entropy", "Mismatch KL", "Clipped or masked", "Staleness", "Memory"]
    wanted += ["Wait against compute", "Tokens per second", "Padding and waste", "Held", "Dropped, by reason"]
    assert set(wanted) <= set(titles) and titles[:2] == ["Reward", "Loss"]
    assert keys(page, "Tokens per second") == {"": "1,060"}, "as the trainer measured it"
    assert keys(page, "Wait against compute") == {"waiting for samples": "0.5", "computing": "1.5"}
    assert keys(page, "Dropped, by reason") == {"stale": "120", "overflow": "60"}
    assert keys(page, "Memory") == {"": "460 MB"}
    assert keys(page, "Held") == {"": "40"} and keys(page, "mine/own number") == {"": "120"}
    assert page.text_content("#live") == "finished" and page.text_content("#state").startswith("Finished at")
    verdict = page.text_content("#verdict")
    assert verdict.startswith("Reward went from ") and "the trainer waits 25 % of the time" in verdict
    assert "samples are 1.5 policy versions old" in verdict and "mismatch KL has risen" in verdict
    keep_pictures(page, ARTIFACTS, "run")


def test_one_cursor_reads_all_charts_and_the_keyboard_moves_it(at: Any) -> None:
    page = at("run/runs/alpha/3", ".chart")
    box = page.locator('[data-curve="Loss"]').bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
    step = int(page.text_content("#at-step").split()[1])
    assert 20 < step < 40
    assert keys(page, "Tokens per second") == {"": f"{1000 + step:,}"} and keys(page, "mine/own number") == {
        "": str(2 * step)
    }
    assert page.locator(".rule:visible").count() == page.locator(".chart:visible").count()
    page.mouse.move(5, 300)
    assert page.text_content("#at-step") == "latest values"
    page.focus('[data-curve="Reward"]')
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert page.text_content("#at-step") == "step 2" and keys(page, "mine/own number") == {"": "4"}
    assert "latest 0.86" in page.get_attribute('[data-curve="Reward"]', "aria-label")


def test_what_a_page_notes_in_the_address_does_not_undo_a_click(at: Any) -> None:
    page = at("samples/runs/alpha/3", ".holder")
    page.evaluate("location.hash = '#/run/runs/alpha/3'; ps.query.set({ colour: 'entropy' })")
    page.wait_for_selector(".chart")
    address(page, "#/run/runs/alpha/3")


def test_dragging_looks_closer_and_the_address_remembers_it(at: Any) -> None:
    page = at("run/runs/alpha/3", ".chart")
    box = page.locator('[data-curve="Reward"]').bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 200, box["y"] + 60, steps=4)
    page.mouse.up()
    found = address(page, "range=")
    assert page.is_visible("#whole")
    low, high = (int(part) for part in found.split("range=")[1].split("&")[0].split("-"))
    assert 1 < low < high < STEPS
    page.evaluate(
        "const box = document.querySelector('#smooth'); box.value = 0.9; box.dispatchEvent(new Event('input'))"
    )
    page.check("#log")
    address(page, "smooth=0.9", "log=1")
    page.reload()
    page.wait_for_selector(".chart")
    address(page, f"range={low}-{high}")
    assert page.is_checked("#log") and page.input_value("#smooth") == "0.9"
    keep_pictures(page, ARTIFACTS, "run-zoomed")
    page.click("#whole")
    address(page, without="range=")


def test_several_runs_are_drawn_over_one_another(at: Any) -> None:
    page = at("run/runs/alpha/3", ".chart")
    page.check('[data-run="runs/beta"]')
    wait_until(page, "document.querySelectorAll('.chart:has([data-curve=\"Reward\"]) .key').length === 2")
    found = keys(page, "Reward")
    assert set(found) == {"alpha", "beta"}
    assert float(found["alpha"]) - float(found["beta"]) == pytest.approx(0.2, abs=1e-3)
    address(page, "with=runs")
    keep_pictures(page, ARTIFACTS, "run-together")


def test_curves_are_saved_as_csv_and_as_a_picture(at: Any, tmp_path: Path) -> None:
    page = at("run/runs/alpha/3", ".chart")
    with page.expect_download() as found:
        page.click("#csv")
    rows = list(csv.DictReader(io.StringIO(Path(found.value.path()).read_text())))
    assert len(rows) == STEPS and found.value.suggested_filename == "alpha.csv"
    assert float(rows[9]["Reward / trained"]) == pytest.approx(metrics(10)["train/reward"])
    assert rows[9]["Dropped, by reason / stale"] == "20"
    with page.expect_download() as found:
        page.click("#png")
    assert Path(found.value.path()).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
