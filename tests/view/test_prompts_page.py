"""A run without exports in real Chromium: its curves, its prompts and its tokens come from the plane."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.view import Export
from penstock.view.library import Library
from penstock.view.web import serving
from tests.support.browser import keep_pictures, wait_until
from tests.view.run_pages import ARTIFACTS, address

pytestmark = pytest.mark.process


def test_a_run_without_exports_shows_curves_prompts_and_tokens(page: Any, tmp_path: Path) -> None:
    with ps.open(tmp_path / "run", ranks=1, seq_len=16, groups_per_step=2) as plane, plane.source(0) as source:
        for i in range(8):
            with plane.group(f"prompt {i % 4}", id=f"g{i}", policy_version=0) as group:
                for reward in (0.0, i / 8):
                    turns = [ps.Turn([1, 2]), ps.Turn([3, 4, 5], logprobs=[-0.1, -0.2, -0.3])]
                    group.add(ps.Trajectory(turns=turns, reward=reward, env="code" if i % 2 else "math"))
            if i % 2:
                source.commit(source.step(timeout=60))
        source.flush(60)
    with serving(Library(exports={"run": Export(tmp_path / "run")})) as (url, _, _):
        page.goto(url)
        page.wait_for_selector(".chart")
        assert "read from the plane" in page.text_content("#state")
        page.click("#tab-prompts")
        page.wait_for_selector("#prompts")
        assert page.locator("#prompts tbody tr").count() == 4 and page.locator("#envs tbody tr").count() == 2
        page.select_option("#prompt-order", "gained")
        wait_until(page, "document.querySelector('#prompts tbody td').textContent.startsWith('prompt')")
        address(page, "sort=gained")
        page.fill("#find-prompt", "prompt 3")
        wait_until(page, "document.querySelectorAll('#prompts tbody tr').length === 1")
        keep_pictures(page, ARTIFACTS, "prompts")
        page.click('#prompts [data-over="prompt"]')
        page.wait_for_selector(".over-steps")
        assert page.text_content("#page h1") == "Prompt prompt 3"
        titles = page.eval_on_selector_all(".curves h2", "all => all.map(one => one.textContent)")
        assert titles == ["Reward", "Length", "Truncated", "Groups"]
        assert page.locator("#over-steps tbody tr").count() == 2
        page.go_back()
        page.wait_for_selector("#prompts")
        page.click('#envs [data-over="env"] >> nth=0')
        page.wait_for_selector(".over-steps")
        assert page.text_content("#page h1") == "Environment math"
        assert "2trained so far" in page.text_content(".card")
        page.click("#over-steps .link >> nth=0")
        page.wait_for_selector("#groups")
        page.click("#tab-samples")
        page.wait_for_selector(".cursor")
        assert page.text_content("#count") == "4 samples"
    assert page.errors == []
