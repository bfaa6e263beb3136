"""The viewer in real Chromium: what a person does, and what hostile model output must not do.

Chromium comes from the system (`scripts/setup_browser`); without it these tests fail, they are not skipped. Pictures of
what they saw are left in artifacts/.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.arrays import ImageSpan, Sample
from penstock.assets import AssetStore
from penstock.commands.diff import place
from penstock.pack import pack
from penstock.testing.browser import keep_pictures, wait_until
from penstock.testing.exports import Words, make_export, terms_of
from penstock.testing.reference_images import draw_screenshot
from penstock.view import Export, Record, TokenExporter, masking_rules
from penstock.view.diff import compare
from penstock.view.library import Library
from penstock.view.static_page import make_page
from penstock.view.vocabulary import Pieces, open_vocabulary
from penstock.view.web import serving

ARTIFACTS = Path(__file__).resolve().parents[2] / "artifacts"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser") / "demo"
    make_export(folder, steps=4, ranks=3, groups=12, size=3, seed=5)
    return folder


@pytest.fixture(scope="module")
def url(demo: Path) -> Iterator[str]:
    library = Library(exports={"demo": Export(demo)}, vocabulary=open_vocabulary(demo))
    with serving(library) as (url, _, _):
        yield url


@pytest.fixture
def opened(page: Any, url: str) -> Iterator[Any]:
    """The last step's worst sample, as the URL opens it."""
    page.goto(url)
    page.wait_for_selector("#counts table")
    yield page
    assert page.errors == []


def keep(page: Any, name: str) -> None:
    ARTIFACTS.mkdir(exist_ok=True)
    page.screenshot(path=str(ARTIFACTS / f"test-{name}.png"))


def records(demo: Path, step: int = 4) -> list[Record]:
    return list(Export(demo).step(step).records())


def current(page: Any, demo: Path, step: int = 4) -> Record:
    name = page.text_content("h1")
    return next(record for record in records(demo, step) if record.label == name)


def names(page: Any) -> list[str]:
    found: list[str] = page.eval_on_selector_all(
        "#rows .row b",
        "all => all.sort((a, b) => a.closest('.row').offsetTop - b.closest('.row').offsetTop).map(b => b.textContent)",
    )
    return found


def cell(page: Any, column: str) -> str:
    text: str = page.text_content(f'#token [data-column="{column}"]')
    return text


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
    wanted = [r for r in rows if r.facts["env_name"] == "lookup" and r.facts["rank"] == 1]
    assert opened.text_content("#count") == f"{len(wanted)} of {len(rows)} samples"
    opened.select_option("#filter-env", "")
    opened.select_option("#filter-rank", "")
    opened.select_option("#filter-mode", "opd")
    assert (
        opened.text_content("#count")
        == f"{sum(r.facts['training_mode'] == 'opd' for r in rows)} of {len(rows)} samples"
    )
    opened.select_option("#filter-mode", "")
    opened.fill("#filter-low", "1")
    assert opened.text_content("#count") == f"{sum(r.columns['rewards'][0] == 1 for r in rows)} of {len(rows)} samples"
    opened.fill("#filter-low", "")
    opened.fill("#filter-stale", "3")
    assert opened.text_content("#count") == f"{sum(r.facts['staleness'] >= 3 for r in rows)} of {len(rows)} samples"
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
    opened.keyboard.press("?")
    assert opened.is_visible("#help")
    keep(opened, "help")
    opened.keyboard.press("Escape")
    opened.keyboard.press("/")
    opened.keyboard.type("opd")
    assert opened.input_value("#search") == "opd"


@pytest.mark.parametrize("rule", ["dppo", "icepop", "ppo"])
def test_thresholds_recount_as_they_are_typed(opened: Any, demo: Path, rule: str) -> None:
    record = current(opened, demo)
    judge: Any = {"dppo": masking_rules.dppo, "icepop": masking_rules.icepop, "ppo": masking_rules.ppo_clip}[rule]
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
    own = [r for r in records(demo) if (r.facts["rank"], r.facts["micro_step"]) == (rank, micro)]
    assert own and opened.text_content("#count") == f"{len(own)} of {len(records(demo))} samples"
    opened.click("#micro")
    assert opened.text_content("#count").startswith(f"{sum(r.facts['rank'] == rank for r in records(demo))} of")
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


# ---------------------------------------------------------------- special exports


def one_sample_export(folder: Path, sample: Sample, **settings: Any) -> Export:
    batch = pack([sample], ranks=1, seq_len=1 << 20, **settings).ranks[0][0]
    with TokenExporter(folder) as exporter:
        exporter.write(1, batch, terms_of(np.random.default_rng(0), batch), policy_version=1)
        exporter.close_step(1)
    return Export(folder)


def test_a_token_that_was_not_sampled_shows_no_numbers_of_the_sampler(page: Any, tmp_path: Path) -> None:
    sample = Sample(
        id="x",
        token_ids=[5, 6, 7, 8],
        loss_mask=[0, 0, 1, 1],
        logprobs=[0, 0, -0.5, -0.25],
        advantages=1.0,
        routed_experts=np.arange(16, dtype=np.uint8).reshape(4, 2, 2),
    )
    with serving(Library(exports={"x": one_sample_export(tmp_path, sample)})) as (url, _, _):
        page.goto(url)
        page.wait_for_selector("#counts table")
        page.hover('[data-i="1"]')
        for column in ("inference_logprobs", "mismatch_kl", "importance_ratio", "log_importance_ratio", "prob_delta"):
            assert cell(page, column) == "–"
        assert cell(page, "entropy") != "–" and cell(page, "loss_mask") == "no"
        page.hover('[data-i="0"]')
        assert cell(page, "trainer_logprobs") == cell(page, "entropy") == "–"
        page.hover('[data-i="2"]')
        assert cell(page, "inference_logprobs") == "−0.5" and cell(page, "mismatch_kl") != "–"
        assert cell(page, "routed_experts") == "[[8,9],[10,11]]"
    assert page.errors == []


def test_a_column_of_the_runs_own_can_be_coloured_by(page: Any, tmp_path: Path) -> None:
    mine = ps.Column("turn_weights", dtype="float32")
    own = {mine: [0, 0, 2.0, -1.0]}
    sample = Sample(
        id="x", token_ids=[5, 6, 7, 8], loss_mask=[0, 0, 1, 1], logprobs=[0, 0, -1, -1], advantages=1.0, columns=own
    )
    with serving(Library(exports={"x": one_sample_export(tmp_path, sample, columns=[mine])})) as (url, _, _):
        page.goto(url)
        page.wait_for_selector("#counts table")
        page.select_option("#colour", "turn_weights")
        shades = [page.locator(f'[data-i="{i}"]').evaluate("node => node.style.backgroundColor") for i in range(4)]
        assert shades[:2] == ["", ""] and "--warm" in shades[2] and "--cool" in shades[3]
    assert page.errors == []


def long_sample(count: int) -> tuple[Sample, Words]:
    words, rng = Words(), np.random.default_rng(1)
    text = words.encode("The quick brown fox jumps over the lazy dog, again and again and again.\n")
    ids = np.resize(text, count)
    mask = np.arange(count) > 100
    return Sample(
        id="long", token_ids=ids, loss_mask=mask, logprobs=-rng.exponential(0.4, count), advantages=1.0
    ), words


def test_a_sample_of_a_hundred_thousand_tokens_scrolls(page: Any, tmp_path: Path) -> None:
    sample, words = long_sample(100_000)
    export = one_sample_export(tmp_path, sample)
    vocabulary = Pieces({index: piece for piece, index in words.ids.items()}, frozenset(words.ids.values()))
    with serving(Library(exports={"long": export}, vocabulary=vocabulary)) as (url, _, _):
        begin = time.perf_counter()
        page.goto(url)
        page.wait_for_selector("#counts table", timeout=60_000)
        loaded = time.perf_counter() - begin
        assert page.locator(".tok").count() < 3000
        page.keyboard.press("End")
        assert page.get_attribute(".cursor", "data-i") == "99999"
        frames = page.evaluate(
            """async () => {
                const view = document.querySelector('#tokens'), times = [];
                for (let i = 0; i < 60; i++) {
                    view.scrollTop = (i * 7919 * 37) % view.scrollHeight;
                    const begin = performance.now();
                    await new Promise(requestAnimationFrame);
                    await new Promise(requestAnimationFrame);
                    times.push(performance.now() - begin);
                }
                return times.sort((a, b) => a - b);
            }"""
        )
        shown = page.locator(".tok").count()
        assert 100 < shown < 3000
        # Jumps anywhere in the sample, with the page being drawn anew each time; generous, for busy machines.
        assert frames[len(frames) // 2] < 250, f"median of two frames {frames[len(frames) // 2]:.0f} ms"
        print(f"100,000 tokens: loaded in {loaded:.1f} s, median of two frames {frames[len(frames) // 2]:.0f} ms")
        keep(page, "long")
    assert page.errors == []


HOSTILE = [
    "<script>window.pwned = 1</script>",
    "<img src=x onerror='window.pwned = 1'>",
    "</script><svg onload=window.pwned=1>",
    "[x](javascript:window.pwned=1) ![y](http://127.0.0.1:9/beacon)",
    "<style>*{background:url(http://127.0.0.1:9/css)}</style>",
    "\u202egnp.exe\u202c\u2066abc\u2069",
    "\x1b[31mred\x1b[0m\x07\x00",
    "a\u200bb\ufeffc\u00add\u2028e",
    "x" * 10_000_000,
    "\U0001f600 caf\u00e9 \u4f60\u597d",
    "{{constructor.constructor('window.pwned=1')()}}",
]


def test_hostile_model_output_is_only_ever_text(page: Any, tmp_path: Path) -> None:
    count = len(HOSTILE)
    hostile_name = "<b onmouseover=window.pwned=1>&amp;\u202e</b>"
    sample = Sample(
        id=hostile_name,
        env=hostile_name,
        group=hostile_name,
        token_ids=range(count),
        loss_mask=[False] + [True] * (count - 1),
        logprobs=[-0.5] * count,
        advantages=1.0,
    )
    export = one_sample_export(tmp_path, sample)
    vocabulary = Pieces(dict(enumerate(HOSTILE)), frozenset(range(count)))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    with serving(Library(exports={"x": export}, vocabulary=vocabulary)) as (url, port, _):
        page.goto(url)
        page.wait_for_selector("#counts table")
        for _ in range(count):
            page.keyboard.press("ArrowRight")
            page.locator(".cursor").hover()
        assert page.evaluate("window.pwned") is None
        assert page.locator("#middle script, #middle img, #middle svg, #middle style, #middle b b").count() == 0
        shown = page.eval_on_selector_all(
            ".tokens .tok", "all => all.sort((a, b) => a.dataset.i - b.dataset.i).map(e => e.textContent)"
        )
        assert shown[:5] == HOSTILE[:5]
        assert shown[5] == "\\u{202e}gnp.exe\\u{202c}\\u{2066}abc\\u{2069}"
        assert shown[6] == "\\u{1b}[31mred\\u{1b}[0m\\u{7}\\u{0}"
        assert shown[7] == "a\\u{200b}b\\u{feff}c\\u{ad}d\\u{2028}e"
        assert len(shown[8]) < 300 and shown[8].endswith("…(+9999760)")
        assert shown[9] == HOSTILE[9]
        assert page.text_content("h1") == hostile_name.replace("\u202e", "\\u{202e}")
        assert page.text_content("#rows .row b") == hostile_name.replace("\u202e", "\\u{202e}")
        page.keyboard.press("4")
        page.click("[data-group]")
        page.wait_for_selector(".tree .leaf")
        assert page.locator("#page script, #page img, #page svg, #page style, #page b b").count() == 0
        assert "<script>window.pwned = 1</script>" in page.text_content(".tree")
        assert "\u202e" not in page.text_content("#page")
        for key in "235":
            page.keyboard.press(key)
            page.wait_for_timeout(200)
        assert page.evaluate("window.pwned") is None
        own = f"http://127.0.0.1:{port}/"
        assert [address for address in asked if not address.startswith((own, "about:", "data:"))] == []
        keep(page, "hostile")
    assert page.errors == []


def test_images_stand_in_place_of_their_tokens(page: Any, tmp_path: Path) -> None:
    store = AssetStore(tmp_path / "assets")
    ref = store.put(draw_screenshot(seed=3, width=320, height=200))
    span = ImageSpan(
        hash=ref.hash, grid=(1, 8, 8), offset=3, length=16, media_type=ref.media_type, width=320, height=200
    )
    count = 30
    sample = Sample(
        id="seen",
        token_ids=range(count),
        loss_mask=np.arange(count) > 20,
        logprobs=[-0.5] * count,
        advantages=1.0,
        mm_token_type_ids=[1 if 3 <= i < 19 else 0 for i in range(count)],
        images=[span],
    )
    export = one_sample_export(tmp_path / "run", sample)
    library = Library(exports={"x": export}, images=store)
    with serving(library) as (url, _, _):
        page.goto(url)
        page.wait_for_selector("figure img")
        wait_until(page, "document.querySelector('figure img').naturalWidth === 320")
        shown = page.eval_on_selector_all(
            ".tokens .tok", "all => all.map(e => Number(e.dataset.i)).sort((a, b) => a - b)"
        )
        assert shown == [0, 1, 2, *range(19, 30)]
        assert page.text_content("figcaption") == "320 × 200 · 16 tokens from 3"
        keep(page, "image")
    file = tmp_path / "page.html"
    file.write_bytes(make_page(library))
    page.goto(file.as_uri())
    wait_until(page, "document.querySelector('figure img').naturalWidth === 320")
    assert page.errors == []


def test_a_page_written_to_a_file_works_alone(page: Any, demo: Path, tmp_path: Path) -> None:
    library = Library(exports={"demo": Export(demo)}, vocabulary=open_vocabulary(demo))
    file = tmp_path / "step.html"
    file.write_bytes(make_page(library, step=2))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    page.wait_for_selector("#counts table")
    page.keyboard.press("j")
    page.keyboard.press("w")
    page.wait_for_selector(".cursor")
    assert page.text_content("#count") == f"{len(records(demo, 2))} samples"
    page.keyboard.press("2")
    page.wait_for_selector("#grid")
    assert [address for address in asked if not address.startswith(("file:", "data:"))] == []
    assert page.errors == []


def test_a_diff_opens_where_the_runs_part(page: Any, demo: Path, tmp_path: Path) -> None:
    import shutil

    other = tmp_path / "b"
    shutil.copytree(demo, other)
    path = other / "token_exports/step_3/rank_1.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[2]["trainer_logprobs"][33] = -7.5
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    parting = compare(Export(demo), Export(other))
    library = Library(exports={"A": Export(demo), "B": Export(other)}, vocabulary=open_vocabulary(demo))
    library.parting = place(library, parting, None)
    with serving(library) as (url, _, _):
        page.goto(url)
        page.wait_for_selector(".cursor")
        assert page.text_content("#notice") == parting.sentence
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
        library.parting = place(library, compare(exports["A"], exports["B"]), None)
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
            page.goto(url)
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


def test_without_the_token_the_browser_is_shown_a_sentence_and_no_data(page: Any, url: str) -> None:
    page.context.clear_cookies()
    page.goto("about:blank")
    for address in (url.split("?")[0], url[:-3], url.split("?")[0] + "api/overview"):
        answer = page.goto(address)
        assert answer.status == 403 and "needs the token" in page.text_content("body")
    page.goto("about:blank")
    page.goto(url.replace("127.0.0.1", "localhost"))
    page.wait_for_selector("#counts table")
    page.errors.clear()


def test_another_name_for_this_machine_is_refused(url: str) -> None:
    port = int(url.split(":")[2].split("/")[0])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/" + url.split("/")[-1], headers={"Host": f"rebound.example:{port}"})
    answer = connection.getresponse()
    assert answer.status == 421 and answer.getheader("set-cookie") is None
    connection.close()
