"""Groups, what was dropped, a step's rules and colours, in real Chromium."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.arrays import Sample
from penstock.demo.tasks import write_tokenizer
from penstock.packing import pack
from penstock.view import Export, TokenExporter, tallies
from penstock.view.library import Library
from penstock.view.vocabulary import open_vocabulary
from penstock.view.web import serving
from tests.support.browser import keep_pictures, wait_until
from tests.support.exports import terms_of
from tests.view.run_pages import ARTIFACTS, address, records

pytestmark = pytest.mark.process


def test_rollouts_of_a_prompt_stand_together_and_open_as_a_tree(at: Any, home: Path) -> None:
    page = at("groups/runs/alpha/3", "#groups")
    assert page.text_content("#group-count").startswith("8 groups")
    page.click('[data-group="s3-g2"]')
    page.wait_for_selector(".tree .leaf")
    own = [r for r in records(home) if r.fields["group_id"] == "s3-g2"]
    shown = page.eval_on_selector_all("tr.open .grid [data-sample]", "all => all.map(e => e.textContent)")
    assert sorted(shown) == sorted(record.label for record in own)
    assert page.locator(".tree details.shared").first.text_content().startswith(tuple("123456789"))
    assert not page.locator(".tree details.shared").first.evaluate("e => e.open"), "what all share is folded"
    assert page.locator(".tree .leaf [data-sample]").count() == len(own)
    address(page, "group=s3-g2")
    keep_pictures(page, ARTIFACTS, "groups")
    page.locator(".tree .leaf [data-sample]").first.click()
    page.wait_for_selector(".cursor")
    assert page.text_content("h1") in [record.label for record in own]
    page.click("#to-group")
    page.wait_for_selector("tr.open .grid")


def test_groups_without_a_spread_of_rewards_are_marked(page: Any, tmp_path: Path) -> None:
    samples = [
        Sample(
            id=f"{group}-{i}",
            group=group,
            prompt=f"prompt {group}",
            token_ids=[1, 4, 5 + i, 2],
            loss_mask=[0, 0, 1, 1],
            logprobs=[0, 0, -0.5, -0.25],
            rewards=rewards[i],
            advantages=rewards[i] - sum(rewards) / 2,
        )
        for group, rewards in (("same", (0.75, 0.75)), ("other", (0.0, 1.0)))
        for i in range(2)
    ]
    batch = pack(samples, ranks=1, seq_len=64).ranks[0][0]
    with TokenExporter(tmp_path) as exporter:
        exporter.write(1, batch, terms_of(np.random.default_rng(0), batch), policy_version=1)
        exporter.close_step(1)
    with serving(Library(exports={"x": Export(tmp_path)})) as (url, _, _):
        page.goto(url + "#/samples")
        page.wait_for_selector("#counts table")
        page.keyboard.press("3")
        page.wait_for_selector("#groups")
        assert page.text_content("#group-count") == "2 groups, 1 of them train nothing"
        assert "trains nothing" in page.text_content('tr.group:has([data-group="same"])')
        assert "trains nothing" not in page.text_content('tr.group:has([data-group="other"])')
    assert page.errors == []


def test_the_table_sorts_filters_and_shows_any_column_and_the_address_keeps_it(at: Any, home: Path) -> None:
    page = at("groups/runs/alpha/3", "#groups")
    page.check("#flat")
    page.click('[data-sort="tokens"]')
    lengths = [
        float(t.replace(",", ""))
        for t in page.eval_on_selector_all('td[data-column="tokens"]', "a => a.map(e => e.textContent)")
    ]
    assert lengths == sorted(lengths, reverse=True) and len(lengths) == len(records(home))
    page.fill("#where", "reward=1 staleness>=2")
    wanted = [r for r in records(home) if r.columns["rewards"][0] == 1 and r.fields["staleness"] >= 2]
    assert page.text_content("#group-count") == f"{len(wanted)} samples"
    page.fill("#where", "reward=1 nonsense>2")
    assert page.eval_on_selector("#where", "e => e.validationMessage").startswith("nonsense>2: write NAME>=VALUE")
    page.fill("#where", "reward=1 staleness>=2")
    page.click(".chooser summary")
    page.check('[data-choose="mean_ratio"]')
    page.click(".chooser summary")
    assert page.locator('[data-sort="mean_ratio"]').count() == 1
    here = page.evaluate("location.href")
    page.goto("about:blank")
    page.goto(here)
    page.wait_for_selector("#groups")
    assert page.text_content("#group-count") == f"{len(wanted)} samples" and page.is_checked("#flat")
    assert page.locator('[data-sort="mean_ratio"]').count() == 1
    keep_pictures(page, ARTIFACTS, "table")


def test_search_finds_text_and_ids_in_tokens_and_opens_there(at: Any, home: Path) -> None:
    page = at("samples/runs/alpha/3", "#counts table")
    all_records = records(home)
    vocabulary = open_vocabulary(home)
    texts = ["".join(vocabulary.text(int(i)) or "" for i in r.columns["token_ids"]) for r in all_records]
    wanted = [r.label for r, text in zip(all_records, texts, strict=True) if "carry the one" in text]
    assert 0 < len(wanted) < len(all_records)
    page.fill("#search", "carry the one")
    wait_until(page, "n => document.querySelector('#count').textContent.startsWith(n + ' of')", str(len(wanted)))
    address(page, "search=carry")
    page.click("#rows .row")
    wait_until(
        page, "document.querySelector('.cursor') && document.querySelector('.cursor').textContent.trim() === 'carry'"
    )
    ids = " ".join(str(i) for i in all_records[3].columns["token_ids"][60:66])
    page.fill("#search", ids)
    wait_until(
        page,
        "name => [...document.querySelectorAll('#rows .row b')].some(b => b.textContent === name)",
        all_records[3].label,
    )


def test_what_was_dropped_is_shown_with_the_reason_and_its_tokens(page: Any, dropped_run: Path) -> None:
    with serving(Library(exports={"run": Export(dropped_run, awaited=True)})) as (url, _, _):
        page.goto(url)
        page.wait_for_selector("#state")
        page.keyboard.press("6")
        page.wait_for_selector("#dropped")
        text = page.text_content("#dropped")
        assert text.count("dropped: stale") == 2 and "quarantined: " in text and "this group is without it" in text
        cards = page.text_content(".cards")
        assert "4 stale" in cards and "3 too long" in cards
        page.click('[data-group="odd"]')
        page.wait_for_selector("#dropped-tokens .tok")
        shown = page.eval_on_selector_all("#dropped-tokens .tok", "all => all.map(e => e.textContent)")
        assert shown == ["1", "2", "7", "8"]
        keep_pictures(page, ARTIFACTS, "dropped")
        with page.expect_response("**/dropped*"):  # the table is loaded again, as while a run is live
            page.keyboard.press("t")
        assert page.locator("#dropped-tokens .tok").count() == 4
        assert page.locator("#dropped").count() == 1
        page.select_option("#reason", "stale")
        address(page, "reason=stale")
        assert page.locator("#dropped tbody tr").count() == 2
    assert page.errors == []


def test_rules_are_counted_over_the_whole_step(at: Any, home: Path) -> None:
    page = at("step/runs/alpha/3", "#step-counts table")
    compared = [r for r in records(home) if "importance_ratio" in r.columns]
    masked = sum(int(r.columns["is_masked"].sum()) for r in compared)
    assert f"{masked} tokens" in page.text_content(".cards")
    page.select_option("#step-rule", "icepop")
    for low, high in ((0.2, 5.0), (0.9, 1.1), (0.5, 2.0)):
        page.fill("#step-threshold-low", str(low))
        page.fill("#step-threshold-high", str(high))
        wanted = sum(int(np.sum(tallies.judge(r, "icepop", {"low": low, "high": high}) or 0)) for r in compared)
        wait_until(page, "n => document.querySelector('#step-live-masked').textContent === n", f"{wanted:,}")
        assert page.text_content("#step-trained-masked") == f"{masked:,}"
    before = page.text_content("#step-live-masked")
    page.fill("#step-threshold-low", "-3")
    assert page.eval_on_selector("#step-threshold-low", "e => !e.checkValidity()")
    assert page.text_content("#step-live-masked") == before
    page.click("#step-reset")
    assert page.input_value("#step-threshold-low") == "0.2" and page.input_value("#step-threshold-high") == "5"
    drawn = "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(v => v)"
    assert page.eval_on_selector("#step-ratio", drawn) and page.eval_on_selector("#step-kl", drawn)
    keep_pictures(page, ARTIFACTS, "step")


def test_a_colour_means_the_same_in_every_sample(page: Any, tmp_path: Path) -> None:
    """Two samples, one calm and one wild: the worst token of the calm one is not as red as that of the wild one."""

    def sample(name: str) -> Sample:
        return Sample(
            id=name,
            group=name,
            token_ids=[1, 4, 5, 2],
            loss_mask=[0, 1, 1, 1],
            logprobs=[0, -1, -1, -1],
            advantages=1.0,
        )

    batch = pack([sample("calm"), sample("wild")], ranks=1, seq_len=64).ranks[0][0]
    terms = terms_of(np.random.default_rng(0), batch)
    kl = np.array([0, 1e-5, 2e-5, 1e-6, 0, 0.001, 2.7, 0.2], np.float32)
    assert terms.mismatch_kl is not None and len(terms.mismatch_kl) == 8
    terms.mismatch_kl[:] = kl
    with TokenExporter(tmp_path) as exporter:
        exporter.write(1, batch, terms, policy_version=1)
        exporter.close_step(1)
    write_tokenizer(tmp_path, "reverse")
    library = Library(exports={"x": Export(tmp_path)}, vocabulary=open_vocabulary(tmp_path))

    def shade() -> str:
        found: str = page.eval_on_selector(".cursor", "e => e.style.backgroundColor")
        return found

    with serving(library) as (url, _, _):
        page.goto(url + "#/samples")
        page.wait_for_selector(".cursor")
        assert page.text_content("h1") == "wild" and page.get_attribute(".cursor", "data-i") == "2", "the worst token"
        assert "75%" in shade() and page.text_content("#scale-name") == "(fixed, the same everywhere)"
        text = page.evaluate("[...document.querySelectorAll('.tokline .tok')].map(t => t.textContent).join('')")
        assert text == "<bos>ab<eos>"
        page.keyboard.press("j")
        wait_until(page, "document.querySelector('h1').textContent === 'calm' && document.querySelector('.cursor')")
        assert shade() == "" or float(shade().split(")")[1].split("%")[0]) < 10
        page.select_option("#scale", "step")
        assert page.text_content("#scale-name") == "(95 % of this step)"
        assert shade() == "" or float(shade().split(")")[1].split("%")[0]) < 10
        page.select_option("#scale", "sample")
        address(page, "scale=sample")
        assert "75%" in shade()
        page.hover('[data-i="0"]')
        assert page.text_content('#token [data-column="mismatch_kl"]') == "–"
        keep_pictures(page, ARTIFACTS, "colour")
    assert page.errors == []
