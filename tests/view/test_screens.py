"""Pages on narrow screens, for readers, through tunnels and in files, in real Chromium."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.view import Export
from penstock.view.library import Library
from penstock.view.static_page import make_page
from penstock.view.vocabulary import open_vocabulary
from scripts.build_docs import DOCS, recorded_run
from tests.support.browser import keep_pictures, wait_until
from tests.view.run_pages import ARTIFACTS, records

pytestmark = pytest.mark.process

PAGES = {"samples": "#counts table", "step": "#step-counts table", "run": ".chart", "groups": "#groups"}


CUT = """() => [...document.querySelectorAll(".bar-top > p, #top nav a")]
  .filter((e) => e.scrollHeight > e.clientHeight + 1 || e.getBoundingClientRect().right > innerWidth)
  .map((e) => e.textContent)"""
"""Texts of the header of which a reader sees a part."""


def drawn(page: Any) -> None:
    """Wait until the page was drawn in its new size. A row drawn again under the pointer misses its click."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")


@pytest.mark.parametrize("name", PAGES)
def test_pages_fit_a_narrow_screen(at: Any, name: str) -> None:
    page = at(f"{name}/runs/alpha/3", PAGES[name])
    for width in (420, 700):  # a phone, half a screen
        page.set_viewport_size({"width": width, "height": 900})
        drawn(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(CUT) == []
    if name != "samples":
        return
    panel = page.locator("#token table").bounding_box()
    assert panel["y"] < 900 and panel["width"] > 300, "values can be read"
    assert not page.is_visible("#list")
    page.keyboard.press("l")
    assert page.is_visible("#list")
    drawn(page)
    page.click("#rows .row >> nth=1")
    wait_until(page, "!document.body.classList.contains('listing')")
    keep_pictures(page, ARTIFACTS, "samples")


CONTRAST = """(selectors) => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const paper = (e) => {
    for (; e; e = e.parentElement) {
      const text = getComputedStyle(e).backgroundColor;
      const found = parse(text);
      if (!text.startsWith("color(") && (found.length < 4 || found[3] > 0.99)) return found;
    }
    return [255, 255, 255];
  };
  const worst = {};
  for (const selector of selectors)
    for (const e of [...document.querySelectorAll(selector)].slice(0, 40)) {
      const ink = getComputedStyle(e).color;
      if (ink.startsWith("color(")) continue;
      const [a, b] = [light(parse(ink)), light(paper(e))].sort((x, y) => y - x);
      worst[selector] = Math.min(worst[selector] ?? 99, (a + 0.05) / (b + 0.05));
    }
  return worst;
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_read_in_both_themes(at: Any, theme: str) -> None:
    page = at("samples/runs/alpha/3", "#counts table")
    page.emulate_media(color_scheme=theme)
    found = page.evaluate(CONTRAST, [".dim", ".tok.context", "h1", "h2", "#top nav a", "th", "td", ".gutter", ".row b"])
    page.keyboard.press("1")
    page.wait_for_selector(".chart")
    found |= page.evaluate(CONTRAST, [".chart h2", ".key b", ".state", ".word", "label"])
    assert found and {name: ratio for name, ratio in found.items() if ratio < 4.5} == {}


def test_controls_have_names_and_the_token_under_the_cursor_is_said(at: Any) -> None:
    page = at("samples/runs/alpha/3", "#counts table")
    unnamed = """[...document.querySelectorAll('input, select, button, canvas, [role=application]')].filter((e) =>
      !e.getAttribute('aria-label') && !(e.labels && e.labels.length) && !e.textContent.trim())
      .map((e) => e.outerHTML)"""
    for key in "123456":
        page.keyboard.press(key)
        page.wait_for_timeout(300)
        assert page.evaluate(unnamed) == []
    page.keyboard.press("4")
    page.wait_for_selector(".cursor")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    said = page.text_content("#spoken")
    assert "token 1" in said and "context" in said and "mismatch KL –" in said


def test_a_page_in_a_file_works_alone_with_groups_rules_and_search(page: Any, home: Path, tmp_path: Path) -> None:
    library = Library(exports={"runs": Export(home)}, vocabulary=open_vocabulary(home))
    file = tmp_path / "step.html"
    file.write_bytes(make_page(library, run="alpha", step=3))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    page.wait_for_selector("#counts table")
    page.keyboard.press("j")
    page.keyboard.press("w")
    page.wait_for_selector(".cursor")
    page.fill("#search", "carry the one")
    wait_until(page, "document.querySelector('#count').textContent.includes(' of ')")
    page.fill("#search", "")
    page.keyboard.press("Escape")
    page.keyboard.press("2")
    page.wait_for_selector("#step-counts table")
    masked = sum(int(r.columns["is_masked"].sum()) for r in records(home) if "is_masked" in r.columns)
    assert page.text_content("#step-trained-masked") == f"{masked:,}"
    page.keyboard.press("3")
    page.wait_for_selector("#groups")
    page.click("[data-group]")
    page.wait_for_selector(".tree .leaf")
    page.keyboard.press("1")
    page.wait_for_selector(".chart")
    assert [address for address in asked if not address.startswith(("file:", "data:"))] == []
    assert page.errors == []


def test_the_recorded_run_of_the_site_opens_with_todays_viewer(page: Any, tmp_path: Path) -> None:
    file = tmp_path / "demo-run.html"
    recorded_run(file)
    assert (DOCS / "site" / "demo-run.tar.xz").stat().st_size < 200_000 and file.stat().st_size < 1_500_000
    page.goto(file.as_uri())
    page.wait_for_selector(".cursor")
    page.click("#tab-run")
    page.wait_for_selector(".event")
    assert "kill" in page.text_content("#events summary")
    for name, wait in (("step", "#step-counts table"), ("prompts", "#prompts"), ("dropped", ".cards")):
        page.click(f"#tab-{name}")
        page.wait_for_selector(wait)
        if name == "step":
            assert page.input_value("#step-rule") == "ppo", "the rule of the run"
    assert page.errors == []
