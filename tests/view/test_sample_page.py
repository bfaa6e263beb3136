"""The viewer in real Chromium, as a person uses it: samples, their tokens, columns and rules.

Chromium comes from the system (`scripts/setup_browser`); without it these tests fail, they are not skipped. Pictures of
what they saw are left in artifacts/.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.view import Record, tallies
from tests.support.browser import wait_until
from tests.view.demo_page import cell, current, keep, names, records

pytestmark = pytest.mark.process


def test_the_page_loads_with_samples_tokens_and_no_token_in_the_address(opened: Any, demo: Path) -> None:
    assert opened.text_content("#count") == f"{len(records(demo))} samples"
    worst = max(records(demo), key=lambda record: record.worst_kl)
    assert opened.text_content("h1") == worst.label
    assert "token=" not in opened.url and "#/samples/demo/~/4/" in opened.url
    text = opened.evaluate("[...document.querySelectorAll('.tokline .tok')].map(t => t.textContent).join('')")
    assert text.startswith("<|im_start|>system↵You are a careful assistant.")
    assert opened.eval_on_selector_all(".gutter b", "all => all.slice(0, 3).map(b => b.textContent)") == [
        "system",
        "user",
        "assistant",
    ]
    keep(opened, "load")


def test_search_filters_and_sorting_narrow_the_list(opened: Any, demo: Path) -> None:
    rows = records(demo)
    opened.fill("#search", "s4-g3")
    assert opened.text_content("#count") == f"3 of {len(rows)} samples"
    opened.fill("#search", "sums-3")  # a prompt's name
    assert opened.text_content("#count") == f"3 of {len(rows)} samples"
    assert "prompt sums-" in opened.text_content(".bar-top p")
    opened.fill("#search", "")
    opened.select_option("#filter-env", "lookup")
    opened.select_option("#filter-rank", "1")
    wanted = [r for r in rows if r.fields["env_name"] == "lookup" and r.fields["rank"] == 1]
    assert opened.text_content("#count") == f"{len(wanted)} of {len(rows)} samples"
    opened.select_option("#filter-env", "")
    opened.select_option("#filter-rank", "")
    opened.select_option("#filter-mode", "opd")
    assert (
        opened.text_content("#count")
        == f"{sum(r.fields['training_mode'] == 'opd' for r in rows)} of {len(rows)} samples"
    )
    opened.select_option("#filter-mode", "")
    opened.fill("#filter-low", "1")
    assert opened.text_content("#count") == f"{sum(r.columns['rewards'][0] == 1 for r in rows)} of {len(rows)} samples"
    opened.fill("#filter-low", "")
    opened.fill("#filter-stale", "3")
    assert opened.text_content("#count") == f"{sum(r.fields['staleness'] >= 3 for r in rows)} of {len(rows)} samples"
    opened.fill("#filter-stale", "")
    opened.check("#only-masked")
    masked = [r for r in rows if "is_masked" in r.columns and r.columns["is_masked"].any()]
    assert opened.text_content("#count") == f"{len(masked)} of {len(rows)} samples"
    opened.uncheck("#only-masked")
    opened.select_option("#sort", label="length")
    longest = sorted(rows, key=lambda r: -r.num_tokens)
    assert [next(r for r in rows if r.label == name).num_tokens for name in names(opened)[:5]] == [
        r.num_tokens for r in longest[:5]
    ]
    opened.select_option("#sort", label="worst mismatch KL")
    assert names(opened)[0] == max(rows, key=lambda r: r.worst_kl).label
    keep(opened, "filter")


def test_colour_follows_the_column_and_the_scale(opened: Any, demo: Path) -> None:
    record = current(opened, demo)
    trained = np.flatnonzero(record.columns["loss_mask"])
    hot = int(trained[np.nanargmax(record.columns["entropy"][trained])])

    def background(token: int) -> str:
        found: str = opened.eval_on_selector(f'[data-i="{token}"]', "e => getComputedStyle(e).backgroundColor")
        return found

    def alpha(token: int) -> float:
        text = background(token)
        return float(text.rstrip(")").replace("/", " ").replace(",", " ").split()[-1]) if "0)" not in text[-4:] else 0.0

    by_kl = background(hot)
    opened.select_option("#colour", "entropy")
    assert alpha(hot) > 0.6 and (background(hot) != by_kl or record.columns["mismatch_kl"][hot] > 1)
    opened.fill("#typed", "1000")
    assert alpha(hot) < 0.2
    opened.fill("#typed", "")
    opened.select_option("#scale", "sample")
    high = np.argsort(record.columns["entropy"][trained])
    assert alpha(int(trained[high[len(trained) * 97 // 100]])) > 0.6
    opened.select_option("#scale", "fixed")
    assert opened.eval_on_selector(".tok.context", "e => e.style.backgroundColor") == ""
    opened.select_option("#colour", "advantages")
    keep(opened, "colour")


def test_masked_tokens_carry_a_line_by_side(opened: Any, demo: Path) -> None:
    record = current(opened, demo)
    for kind, column in (("high", "is_masked_high"), ("low", "is_masked_low")):
        shown = opened.eval_on_selector_all(f".tokens .tok.masked.{kind}", "all => all.map(e => Number(e.dataset.i))")
        assert sorted(shown) == np.flatnonzero(record.columns[column]).tolist()


def test_hovering_shows_every_column_of_the_token(opened: Any, demo: Path) -> None:
    record = current(opened, demo)
    token = int(np.flatnonzero(record.columns["loss_mask"])[5])
    opened.hover(f'[data-i="{token}"]')
    assert cell(opened, "token_ids") == str(record.columns["token_ids"][token])
    for column in (
        "mismatch_kl",
        "importance_ratio",
        "trainer_logprobs",
        "inference_logprobs",
        "entropy",
        "advantages",
    ):
        shown = float(cell(opened, column).replace("−", "-"))
        assert shown == pytest.approx(float(record.columns[column][token]), rel=1e-2, abs=1e-6)
    known = opened.eval_on_selector_all("#token [data-column]", "all => all.map(e => e.dataset.column)")
    assert set(record.columns) <= set(known)


def test_keys_move_between_tokens_samples_steps_and_pages(opened: Any, demo: Path) -> None:
    record = current(opened, demo)
    opened.keyboard.press("Home")
    opened.keyboard.press("ArrowRight")
    opened.keyboard.press("ArrowRight")
    assert opened.get_attribute(".cursor", "data-i") == "2" and opened.url.endswith("/2")
    opened.keyboard.press("ArrowLeft")
    opened.keyboard.press("ArrowDown")
    assert int(opened.get_attribute(".cursor", "data-i")) > 2
    opened.keyboard.press("End")
    assert opened.get_attribute(".cursor", "data-i") == str(record.num_tokens - 1)
    opened.keyboard.press("Home")
    masked = np.flatnonzero(record.columns["is_masked"]).tolist()
    for token in masked[:3]:
        opened.keyboard.press("n")
        assert opened.get_attribute(".cursor", "data-i") == str(token)
    opened.keyboard.press("w")
    kl = np.where(record.columns["loss_mask"], record.columns["mismatch_kl"], -1)
    assert opened.get_attribute(".cursor", "data-i") == str(int(np.nanargmax(kl)))
    order = names(opened)
    opened.keyboard.press("j")
    wait_until(opened, "name => document.querySelector('h1').textContent === name", arg=order[1])
    opened.keyboard.press("k")
    wait_until(opened, "name => document.querySelector('h1').textContent === name", arg=order[0])
    opened.keyboard.press("c")
    assert opened.input_value("#colour") == "importance_ratio"
    opened.keyboard.press("[")
    wait_until(opened, "document.querySelector('#step').value === '3'")
    wait_until(
        opened, "!document.querySelector('#middle').hasAttribute('aria-busy')"
    )  # its list was drawn, with `#search`
    opened.keyboard.press("?")
    assert opened.is_visible("#help")
    keep(opened, "help")
    opened.keyboard.press("Escape")
    opened.keyboard.press("/")
    opened.keyboard.type("opd")
    wait_until(opened, "document.querySelector('#search').value === 'opd'")


@pytest.mark.parametrize("rule", ["dppo", "icepop", "ppo"])
def test_thresholds_recount_as_they_are_typed(opened: Any, demo: Path, rule: str) -> None:
    record = current(opened, demo)

    def judge(record: Record, **thresholds: float) -> Any:
        return np.logical_or(*(tallies.judge(record, rule, thresholds) or ()))

    opened.select_option("#rule", rule)
    exported = int(np.count_nonzero(record.columns["is_masked"]))
    assert opened.text_content("#live-masked") == str(int(judge(record).sum()))
    for low, high in ((0.05, 0.1), (0.5, 1.2), (0.0, 0.0)):
        opened.fill("#threshold-low", str(low))
        opened.fill("#threshold-high", str(high))
        masks = judge(record, low=low, high=high)
        both = int((masks & record.columns["is_masked"]).sum())
        assert opened.text_content("#live-masked") == str(int(masks.sum()))
        assert opened.text_content("#in-both") == str(both)
        assert opened.text_content("#training-only") == str(exported - both)
        assert opened.locator(".tokens .tok.live").count() == int(masks.sum())
    keep(opened, f"thresholds-{rule}")
    opened.click("#reset")
    assert opened.text_content("#live-masked") == str(int(judge(record).sum()))


def test_a_click_in_the_scatter_opens_the_nearest_token(opened: Any, demo: Path) -> None:
    record = current(opened, demo)
    opened.locator("#scatter").scroll_into_view_if_needed()
    opened.click("#scatter", position={"x": 120, "y": 130})
    token = int(opened.get_attribute(".cursor", "data-i"))
    assert record.columns["loss_mask"][token] and opened.url.endswith(f"/{token}")


def test_an_address_leads_back_to_its_token(opened: Any, demo: Path) -> None:
    opened.keyboard.press("w")
    address, name = opened.url, opened.text_content("h1")
    token = opened.get_attribute(".cursor", "data-i")
    opened.goto("about:blank")
    opened.goto(address)
    opened.wait_for_selector(".cursor")
    assert (opened.text_content("h1"), opened.get_attribute(".cursor", "data-i")) == (name, token)


def test_the_step_page_and_the_run_page_draw_and_lead_on(opened: Any, demo: Path) -> None:
    opened.click("#tab-step")
    opened.wait_for_selector("#grid")
    assert "samples" in opened.text_content(".cards") and opened.locator(".panel canvas").count() == 6
    drawn = "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(v => v)"
    assert opened.eval_on_selector("#grid", drawn)
    keep(opened, "step")
    opened.click("#grid", position={"x": 100, "y": 50})
    opened.wait_for_selector("#rows .row")
    rank, micro = int(opened.input_value("#filter-rank")), int(opened.text_content("#micro").split()[1])
    own = [r for r in records(demo) if (r.fields["rank"], r.fields["micro_step"]) == (rank, micro)]
    assert own and opened.text_content("#count") == f"{len(own)} of {len(records(demo))} samples"
    opened.click("#micro")
    assert opened.text_content("#count").startswith(f"{sum(r.fields['rank'] == rank for r in records(demo))} of")
    opened.select_option("#filter-rank", "")
    opened.click("#tab-run")
    opened.wait_for_selector(".curves canvas")
    titles = opened.eval_on_selector_all(".curves h2", "all => all.map(e => e.textContent)")
    assert {"Reward", "Mismatch KL", "Entropy", "Staleness", "Tokens per second", "buffer age s"} <= set(titles)
    keep(opened, "run")
    opened.click('[data-curve="Reward"]', position={"x": 6, "y": 50})
    wait_until(opened, "document.querySelector('#step').value === '1'")


def test_dark_and_light_change_the_paper(opened: Any) -> None:
    light = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    opened.keyboard.press("t")
    assert opened.evaluate("getComputedStyle(document.body).backgroundColor") != light
    keep(opened, "dark")
    opened.keyboard.press("t")
