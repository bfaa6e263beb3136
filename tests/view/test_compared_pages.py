"""A page in a file, two runs side by side, evaluations, and who is refused, in real Chromium."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.commands.diff import place
from penstock.view import Export
from penstock.view.diff import compare
from penstock.view.library import Library
from penstock.view.vocabulary import open_vocabulary
from penstock.view.web import serving
from tests.support.browser import keep_pictures, wait_until
from tests.view.demo_page import ARTIFACTS, cell, keep

pytestmark = pytest.mark.process


def test_a_diff_opens_where_the_runs_part(page: Any, demo: Path, tmp_path: Path) -> None:
    import shutil

    other = tmp_path / "b"
    shutil.copytree(demo, other)
    path = other / "token_exports/step_3/rank_1.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[2]["trainer_logprobs"][33] = -7.5
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    difference = compare(Export(demo), Export(other))
    library = Library(exports={"A": Export(demo), "B": Export(other)}, vocabulary=open_vocabulary(demo))
    library.difference = place(library, difference, None)
    with serving(library) as (url, _, _):
        page.goto(url)
        page.wait_for_selector(".cursor")
        assert page.text_content("#notice") == difference.sentence
        assert page.text_content("h1") == lines[2]["sample_id"] and page.get_attribute(".cursor", "data-i") == "33"
        both = page.eval_on_selector_all(".half .cursor", "all => all.map(e => e.dataset.i)")
        assert both == ["33", "33"], "A and B stand beside each other, both at the token"
        assert page.locator(".half .tok.differs").count() == 2
        assert page.text_content('#token [data-other="trainer_logprobs"]') == "−7.5" != cell(page, "trainer_logprobs")
        assert page.locator("#token tr.differs").count() == 1
        page.keyboard.press("ArrowRight")
        assert page.eval_on_selector_all(".half .cursor", "all => all.map(e => e.dataset.i)") == ["34", "34"]
        page.keyboard.press("ArrowLeft")
        keep_pictures(page, ARTIFACTS, "diff")
        page.select_option("#export", "B")
        wait_until(page, "document.querySelector('#export').value === 'B' && location.hash.includes('/B/')")
        keep(page, "diff")
    assert page.errors == []


def test_a_diff_shows_a_sample_that_only_one_run_trained(page: Any, demo: Path, tmp_path: Path) -> None:
    import shutil

    other = tmp_path / "b"
    shutil.copytree(demo, other)
    path = other / "token_exports/step_2/rank_0.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[1:]))
    for pair, words in ((("A", "B"), "B did not train"), (("B", "A"), "A did not train")):
        exports = {"A": Export(demo if pair[0] == "A" else other), "B": Export(other if pair[0] == "A" else demo)}
        library = Library(exports=exports, vocabulary=open_vocabulary(demo))
        library.difference = place(library, compare(exports["A"], exports["B"]), None)
        with serving(library) as (url, _, _):
            page.goto(url)
            page.wait_for_selector(".half .cursor")
            assert page.text_content("h1") == json.loads(lines[0])["sample_id"]
            assert words in page.text_content(".half .empty")
    assert page.errors == []


def test_evaluation_groups_are_shown_beside_what_was_trained(page: Any, demo: Path, tmp_path: Path) -> None:
    import shutil

    home = tmp_path / "home"
    shutil.copytree(demo, home)
    with ps.open(home / "plane", ranks=1, seq_len=64, groups_per_step=1) as plane:
        for version in (3, 7):
            with plane.group("a", id=f"a-{version}", policy_version=version, evaluation=True) as group:
                for reward in (0.0, 1.0):
                    turns = [ps.Turn([1, 2]), ps.Turn([3, 4], logprobs=[-0.5, -0.25])]
                    group.add(ps.Trajectory(turns=turns, reward=reward, env="math"))
        with serving(Library(exports={"home": Export(home)}, vocabulary=open_vocabulary(home))) as (url, _, _):
            page.goto(url + "#/samples")
            page.wait_for_selector("#counts table")
            page.select_option("#run", "(evaluation)")
            wait_until(
                page, "document.querySelector('h1') && document.querySelector('h1').textContent.startsWith('a-7/')"
            )
            assert page.text_content("#count") == "2 samples"
            assert page.eval_on_selector_all("#step option", "all => all.map(o => o.textContent)") == [
                "version 7",
                "version 3",
            ]
            page.click(".tokline .tok >> nth=2")
            page.wait_for_selector('#token [data-column="inference_logprobs"]')
            assert float(cell(page, "inference_logprobs").replace("−", "-")) == -0.5
            assert page.locator('#token [data-column="trainer_logprobs"]').count() == 0
            keep(page, "evaluation")
            page.click("#tab-step")
            page.wait_for_selector(".cards")
            page.click("#tab-run")
            page.wait_for_selector(".curves canvas")
            assert "Reward" in page.eval_on_selector_all(".curves h2", "all => all.map(e => e.textContent)")
    assert page.errors == []
