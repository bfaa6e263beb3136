"""The pages of a run in real Chromium: curves, groups, what was dropped, a step as a whole, narrow screens, tunnels.

Pictures of each are left in artifacts/, at two widths and in both themes.
"""

from __future__ import annotations

import csv
import io
import json
import math
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.arrays import Sample
from penstock.demo.words import write_tokenizer
from penstock.pack import pack
from penstock.testing.browser import keep_pictures, wait_until
from penstock.testing.exports import make_export, terms_of
from penstock.view import Export, Record, TokenExporter, masking_rules
from penstock.view.library import Library
from penstock.view.run_state import at_work
from penstock.view.static_page import make_page
from penstock.view.vocabulary import open_vocabulary
from penstock.view.web import serving

ARTIFACTS = Path(__file__).resolve().parents[2] / "artifacts" / "pages"
STEPS = 60


def metrics(step: int, offset: float = 0.0) -> dict[str, Any]:
    """What a trainer writes of a step."""
    return {
        "step": step,
        "train/reward": offset + 1 - math.exp(-step / 30),
        "train/loss": math.sin(step),
        "train/grad_norm": 1 / step,
        "train/entropy": 2.4 - step / 60,
        "train/mismatch_kl": 0.001 * step,
        "train/max_log_ratio": 0.5,
        "train/masked": 0.01,
        "train/loss_tokens": 900 + step,
        "buffer/staleness": 1.5,
        "buffer/max_staleness": 3,
        "perf/step_s": 2.0,
        "perf/wait_s": 0.5,
        "perf/tokens": 2000,
        "perf/padding_tokens": 100,
        "perf/tokens_per_s": 1000 + step,
        "perf/waste": 0.05,
        "perf/memory_bytes": 4e8 + 1e6 * step,
        "mine/own_number": step * 2,
    }


def ledger(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "gen/accepted": 300 * step,
        "train/committed": 256 * step,
        "buffer/held": 40,
        "buffer/dropped/stale": 2 * step,
        "buffer/dropped/overflow": step,
    }


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs in one folder: one that exports tokens, one that writes numbers only."""
    folder = tmp_path_factory.mktemp("pages") / "runs"
    make_export(folder, steps=3, ranks=2, groups=8, size=4, seed=6, run="alpha")
    write_lines(folder / "alpha" / "metrics.jsonl", [metrics(step) for step in range(1, STEPS + 1)])
    write_lines(folder / "alpha" / "plane.jsonl", [ledger(step) for step in range(1, STEPS + 1)])
    write_lines(folder / "beta" / "metrics.jsonl", [metrics(step, -0.2) for step in range(1, STEPS + 1)])
    with at_work(folder / "alpha"):
        pass
    return folder


@pytest.fixture(scope="module")
def url(home: Path) -> Iterator[str]:
    library = Library(exports={"runs": Export(home)}, vocabulary=open_vocabulary(home))
    with serving(library) as (url, _, _):
        yield url


@pytest.fixture
def at(page: Any, url: str) -> Iterator[Any]:
    """Opens a page of run alpha by the part of its address behind the `#/`."""

    def open_at(where: str, wait: str) -> Any:
        page.goto(url + "#/" + where)
        page.wait_for_selector(wait)
        return page

    yield open_at
    assert page.errors == []


def records(home: Path, step: int = 3) -> list[Record]:
    return list(Export(home).step(step, "alpha").records())


def keys(page: Any, title: str) -> dict[str, str]:
    """The names and values over a chart; a chart of one line has no name."""
    names_and_values: list[tuple[list[str], str]] = page.eval_on_selector_all(
        f'.chart:has([data-curve="{title}"]) .key',
        "all => all.map(e => [[...e.childNodes].map(n => n.textContent), e.lastChild.textContent])",
    )
    return {"".join(parts[:-1]): value for parts, value in names_and_values}


# ---------------------------------------------------------------- the run


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
    assert page.locator(".rule:visible").count() == page.locator(".chart").count()
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
    assert "#/run/runs/alpha/3" in page.url


def test_dragging_looks_closer_and_the_address_remembers_it(at: Any) -> None:
    page = at("run/runs/alpha/3", ".chart")
    box = page.locator('[data-curve="Reward"]').bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 200, box["y"] + 60, steps=4)
    page.mouse.up()
    assert "range=" in page.url and page.is_visible("#whole")
    low, high = (int(part) for part in page.url.split("range=")[1].split("&")[0].split("-"))
    assert 1 < low < high < STEPS
    page.evaluate(
        "const box = document.querySelector('#smooth'); box.value = 0.9; box.dispatchEvent(new Event('input'))"
    )
    page.check("#log")
    assert "smooth=0.9" in page.url and "log=1" in page.url
    page.reload()
    page.wait_for_selector(".chart")
    assert f"range={low}-{high}" in page.url and page.is_checked("#log") and page.input_value("#smooth") == "0.9"
    keep_pictures(page, ARTIFACTS, "run-zoomed")
    page.click("#whole")
    assert "range=" not in page.url


def test_several_runs_are_drawn_over_one_another(at: Any) -> None:
    page = at("run/runs/alpha/3", ".chart")
    page.check('[data-run="runs/beta"]')
    wait_until(page, "document.querySelectorAll('.chart:has([data-curve=\"Reward\"]) .key').length === 2")
    found = keys(page, "Reward")
    assert set(found) == {"alpha", "beta"}
    assert float(found["alpha"]) - float(found["beta"]) == pytest.approx(0.2, abs=1e-3)
    assert "with=runs" in page.url
    keep_pictures(page, ARTIFACTS, "run-together")


def test_curves_are_saved_as_csv_and_as_a_picture(at: Any, tmp_path: Path) -> None:
    page = at("run/runs/alpha/3", ".chart")
    with page.expect_download() as found:
        page.click("#csv")
    rows = list(csv.DictReader(io.StringIO(Path(found.value.path()).read_text())))
    assert len(rows) == STEPS and found.value.suggested_filename == "alpha.csv"
    assert float(rows[9]["Reward / reward"]) == pytest.approx(metrics(10)["train/reward"])
    assert rows[9]["Dropped, by reason / stale"] == "20"
    with page.expect_download() as found:
        page.click("#png")
    assert Path(found.value.path()).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


# ---------------------------------------------------------------- groups


def test_rollouts_of_a_prompt_stand_together_and_open_as_a_tree(at: Any, home: Path) -> None:
    page = at("groups/runs/alpha/3", "#groups")
    assert page.text_content("#group-count").startswith("8 groups")
    page.click('[data-group="s3-g2"]')
    page.wait_for_selector(".tree .leaf")
    own = [r for r in records(home) if r.facts["group_id"] == "s3-g2"]
    shown = page.eval_on_selector_all("tr.open .grid [data-sample]", "all => all.map(e => e.textContent)")
    assert sorted(shown) == sorted(record.label for record in own)
    assert page.locator(".tree details.shared").first.text_content().startswith(tuple("123456789"))
    assert not page.locator(".tree details.shared").first.evaluate("e => e.open"), "what all share is folded"
    assert page.locator(".tree .leaf [data-sample]").count() == len(own)
    assert "group=s3-g2" in page.url
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
        page.goto(url)
        page.wait_for_selector("#counts table")
        page.keyboard.press("4")
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
    wanted = [r for r in records(home) if r.columns["rewards"][0] == 1 and r.facts["staleness"] >= 2]
    assert page.text_content("#group-count") == f"{len(wanted)} samples"
    page.fill("#where", "reward=1 nonsense>2")
    assert page.eval_on_selector("#where", "e => e.validationMessage").startswith("nonsense>2: write NAME>=VALUE")
    page.fill("#where", "reward=1 staleness>=2")
    page.click(".chooser summary")
    page.check('[data-choose="mean_ratio"]')
    page.click(".chooser summary")
    assert page.locator('[data-sort="mean_ratio"]').count() == 1
    address = page.url
    page.goto("about:blank")
    page.goto(address)
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
    assert "search=carry" in page.url
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


# ---------------------------------------------------------------- dropped


def test_what_was_dropped_is_shown_with_the_reason_and_its_tokens(page: Any, dropped_run: Path) -> None:
    with serving(Library(exports={"run": Export(dropped_run, awaited=True)})) as (url, _, _):
        page.goto(url)
        page.wait_for_selector("#state")
        page.keyboard.press("5")
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
        page.select_option("#reason", "stale")
        assert page.locator("#dropped tbody tr").count() == 2 and "reason=stale" in page.url
    assert page.errors == []


# ---------------------------------------------------------------- a step as a whole


def test_rules_are_counted_over_the_whole_step(at: Any, home: Path) -> None:
    page = at("step/runs/alpha/3", "#step-counts table")
    compared = [r for r in records(home) if "importance_ratio" in r.columns]
    masked = sum(int(r.columns["is_masked"].sum()) for r in compared)
    assert f"{masked} tokens" in page.text_content(".cards")
    page.select_option("#step-rule", "icepop")
    for low, high in ((0.2, 5.0), (0.9, 1.1), (0.5, 2.0)):
        page.fill("#step-threshold-low", str(low))
        page.fill("#step-threshold-high", str(high))
        wanted = sum(int(masking_rules.icepop(r, low=low, high=high).sum()) for r in compared)
        wait_until(page, "n => document.querySelector('#step-live-masked').textContent === n", f"{wanted:,}")
        assert page.text_content("#step-trained-masked") == f"{masked:,}"
    before = page.text_content("#step-live-masked")
    page.fill("#step-threshold-low", "-3")
    assert page.eval_on_selector("#step-threshold-low", "e => !e.checkValidity()")
    assert page.text_content("#step-live-masked") == before
    drawn = "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(v => v)"
    assert page.eval_on_selector("#step-ratio", drawn) and page.eval_on_selector("#step-kl", drawn)
    keep_pictures(page, ARTIFACTS, "step")


# ---------------------------------------------------------------- colours and text


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
        page.goto(url)
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
        assert "75%" in shade() and "scale=sample" in page.url
        page.hover('[data-i="0"]')
        assert page.text_content('#token [data-column="mismatch_kl"]') == "–"
        keep_pictures(page, ARTIFACTS, "colour")
    assert page.errors == []


# ---------------------------------------------------------------- screens, readers, tunnels


PAGES = {"samples": "#counts table", "step": "#step-counts table", "run": ".chart", "groups": "#groups"}


@pytest.mark.parametrize("name", PAGES)
def test_pages_fit_a_narrow_screen(at: Any, name: str) -> None:
    page = at(f"{name}/runs/alpha/3", PAGES[name])
    page.set_viewport_size({"width": 700, "height": 900})
    page.wait_for_timeout(150)
    assert page.evaluate("document.documentElement.scrollWidth") <= 700
    if name != "samples":
        return
    panel = page.locator("#token table").bounding_box()
    assert panel["y"] < 900 and panel["width"] > 300, "values can be read"
    assert not page.is_visible("#list")
    page.keyboard.press("l")
    assert page.is_visible("#list")
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
    page.keyboard.press("3")
    page.wait_for_selector(".chart")
    found |= page.evaluate(CONTRAST, [".chart h2", ".key b", ".state", ".word", "label"])
    assert found and {name: ratio for name, ratio in found.items() if ratio < 4.5} == {}


def test_controls_have_names_and_the_token_under_the_cursor_is_said(at: Any) -> None:
    page = at("samples/runs/alpha/3", "#counts table")
    unnamed = """[...document.querySelectorAll('input, select, button, canvas, [role=application]')].filter((e) =>
      !e.getAttribute('aria-label') && !(e.labels && e.labels.length) && !e.textContent.trim())
      .map((e) => e.outerHTML)"""
    for key in "12345":
        page.keyboard.press(key)
        page.wait_for_timeout(300)
        assert page.evaluate(unnamed) == []
    page.keyboard.press("1")
    page.wait_for_selector(".cursor")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    said = page.text_content("#spoken")
    assert "token 1" in said and "context" in said and "mismatch KL –" in said


@contextmanager
def forwarded(port: int) -> Iterator[int]:
    """Another port of this machine that leads to one, as `ssh -L` makes it."""

    def carry(a: socket.socket, b: socket.socket) -> None:
        try:
            while data := a.recv(1 << 16):
                b.sendall(data)
        except OSError:
            pass
        finally:
            for end in (a, b):
                end.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    here, _ = listener.accept()
                except OSError:
                    return
                there = socket.create_connection(("127.0.0.1", port))
                for pair in ((here, there), (there, here)):
                    threading.Thread(target=carry, args=pair, daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)


def test_a_tunnel_with_another_port_leads_to_the_page(page: Any, url: str) -> None:
    port = int(url.split(":")[2].split("/")[0])
    with forwarded(port) as other:
        page.goto(url.replace(f":{port}/", f":{other}/"))
        page.wait_for_selector("#counts table")
        assert f":{other}/#" in page.url and "token" not in page.url.split("#")[0]
        wait_until(page, "document.querySelector('#live').textContent === 'finished'")
        keep_pictures(page, ARTIFACTS, "tunnel")
        page.goto("about:blank")
    assert page.errors == []


def test_a_page_in_a_file_has_groups_rules_and_search_too(page: Any, home: Path, tmp_path: Path) -> None:
    library = Library(exports={"runs": Export(home)}, vocabulary=open_vocabulary(home))
    file = tmp_path / "step.html"
    file.write_bytes(make_page(library, run="alpha", step=3))
    page.goto(file.as_uri())
    page.wait_for_selector("#counts table")
    page.fill("#search", "carry the one")
    wait_until(page, "document.querySelector('#count').textContent.includes(' of ')")
    page.fill("#search", "")
    page.keyboard.press("Escape")
    page.keyboard.press("2")
    page.wait_for_selector("#step-counts table")
    masked = sum(int(r.columns["is_masked"].sum()) for r in records(home) if "is_masked" in r.columns)
    assert page.text_content("#step-trained-masked") == f"{masked:,}"
    page.keyboard.press("4")
    page.wait_for_selector("#groups")
    page.click("[data-group]")
    page.wait_for_selector(".tree .leaf")
    page.keyboard.press("3")
    page.wait_for_selector(".chart")
    assert page.errors == []
