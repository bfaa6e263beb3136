"""What is known of a rollout, in the viewer in real Chromium."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.view import Export
from penstock.view.library import Library
from penstock.view.web import serving
from tests.support.browser import wait_until
from tests.view.exporting import batch_of, export, sample

pytestmark = pytest.mark.process

KNOWN = {
    "metrics": {"format": 0.5},
    "info": {"task": "<b>17</b>"},
    "stop_condition": "max_turns",
    "truncated": True,
    "seconds": 3.25,
    "roles": {"names": ["user", "assistant"], "runs": [0, 2, 1, 2]},
}


def test_the_sample_page_shows_metrics_info_roles_and_how_it_ended(page: Any, tmp_path: Path) -> None:
    export(tmp_path, batch_of(sample("s1", 4, env="math", rollout=KNOWN)))
    with serving(Library(exports={"run": Export(tmp_path)})) as (url, _, _):
        page.goto(url + "#/samples")
        page.wait_for_selector("#rollout")
        table = page.eval_on_selector_all("#rollout tr", "all => all.map(row => row.textContent)")
        assert table == ["format0.5", "task<b>17</b>"]
        words = page.text_content(".bar-top p")
        assert "truncated" in words and "stopped by max_turns" in words and "3.25 s" in words
        page.hover('[data-i="3"]')
        wait_until(page, "document.querySelector('[data-column=role]')?.textContent === 'assistant'")
    assert page.errors == []
