"""A run watched from its first second to its end, a line that breaks, and how fast a large step opens."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.arrays import Sample
from penstock.packing import pack
from penstock.view import Export, TokenExporter
from penstock.view.access import new_token
from penstock.view.library import Library
from penstock.view.run_files import at_work
from penstock.view.web import serving, static_files, viewer
from tests.support.browser import keep_pictures, wait_until
from tests.support.exports import make_export, terms_of

pytestmark = pytest.mark.process

ARTIFACTS = Path(__file__).resolve().parents[2] / "artifacts" / "pages"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_demo_is_watched_from_its_first_second_to_its_end(page: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock.cli", "demo", "--steps", "6", "--folder", str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{43}", process.stdout.readline())
            assert found is not None
            page.goto(found[0])
            page.wait_for_selector("#state")
            assert "#/run/run/" in page.url and page.text_content("#live") == "live"
            said = page.text_content("#state")
            assert said.startswith("Running since") and "No step has been exported yet" in said
            assert page.locator(".chart").count() == 0 and "No number yet" in page.text_content(".said")
            keep_pictures(page, ARTIFACTS, "live-first-second")
            wait_until(page, "document.querySelectorAll('.chart').length > 10", seconds=400)
            keep_pictures(page, ARTIFACTS, "live-first-step")
            wait_until(page, "document.querySelector('#live').textContent === 'finished'", seconds=200)
            assert page.text_content("#state").startswith("Finished at")
            wait_until(page, "document.querySelector('#step') && document.querySelector('#step').value === '6'")
            length = "JSON.stringify([...document.querySelectorAll('.chart h2')].map(e => e.textContent))"
            assert {"Reward", "Memory", "Held", "Wait against compute"} <= set(json.loads(page.evaluate(length)))
            keep_pictures(page, ARTIFACTS, "live-finished")
            assert process.wait(120) == 0
        finally:
            process.send_signal(signal.SIGINT)
    wait_until(page, "document.querySelector('#state').textContent.includes('shows it again')", seconds=60)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6] and rows[-1]["perf/memory_bytes"] > 1e7
    plane = [json.loads(line) for line in (tmp_path / "run" / "plane.jsonl").read_text().splitlines()]
    assert plane[-1]["step"] == 6 and plane[-1]["train/committed"] == 6 * 256
    ids = [record.fields["sample_id"] for record in Export(tmp_path / "run").step(6).records()]
    assert all(re.fullmatch(r"s0-w[01]\.0-\d+-\d+/\d", name) for name in ids), "from the seed: runs can be compared"
    words = json.loads((tmp_path / "run" / "tokenizer.json").read_text())["model"]["vocab"]
    assert words["<bos>"] == 1 and words["a"] == 4


def test_a_page_opened_before_the_first_step_shows_it_when_it_comes(page: Any, tmp_path: Path) -> None:
    home = tmp_path / "run"
    home.mkdir()
    with at_work(home), serving(Library(exports={"run": Export(home, awaited=True)})) as (url, _, _):
        page.goto(url)
        page.wait_for_selector("#state")
        page.keyboard.press("4")
        wait_until(page, "document.querySelector('#page .empty') !== null")
        assert "the first appears here when it comes" in page.text_content("#page .empty")
        make_export(home, steps=1, ranks=1, groups=2, size=2)
        page.wait_for_selector("#counts table")
        assert page.text_content("#count") == "4 samples" and page.input_value("#step") == "1"
        page.keyboard.press("1")
        page.wait_for_selector(".chart")
        (home / "metrics.jsonl").write_text('{"step": 1, "train/reward": 0.25}\n')
        wait_until(page, "document.querySelector('.chart .key b').textContent === '0.25'")
        with (home / "metrics.jsonl").open("a") as file:
            file.write('{"step": 2, "train/reward": 0.5}\n')
        wait_until(page, "document.querySelector('.chart .key b').textContent === '0.5'")
    assert page.errors == []


def test_curves_of_a_run_that_only_exports_grow_with_its_steps(page: Any, tmp_path: Path) -> None:
    home = tmp_path / "run"
    make_export(home, steps=1, ranks=1, groups=2, size=2)
    with serving(Library(exports={"run": Export(home)})) as (url, _, _):
        page.goto(url + "#/samples")
        page.wait_for_selector("#counts table")
        page.keyboard.press("1")
        page.wait_for_selector(".chart")
        before = page.get_attribute('[data-curve="Grad norm"]', "aria-label")
        assert "over steps 1 to 1, latest 1.5" in before
        make_export(home, steps=2, ranks=1, groups=2, size=2)
        wait_until(
            page, "document.querySelector('[data-curve=\"Grad norm\"]').getAttribute('aria-label').includes('1 to 2')"
        )
        # The page is drawn again with the new step, and for a moment its list of steps is empty.
        wait_until(page, "[...document.querySelectorAll('#step option')].map(o => o.value).join() === '2,1'")
    assert page.errors == []


def test_a_page_finds_its_server_again_and_has_missed_nothing(page: Any, tmp_path: Path) -> None:
    home = tmp_path / "run"
    home.mkdir()
    (home / "metrics.jsonl").write_text('{"step": 1, "train/reward": 0.25}\n')
    token, library = new_token(), Library(exports={"run": Export(home, awaited=True)})

    server = viewer(library, token=token).start()
    port = int(server.url.rpartition(":")[2])
    page.goto(f"{server.url}/?token={token}")
    page.wait_for_selector(".chart")
    server.close()
    wait_until(page, "document.querySelector('#live') && document.querySelector('#live').textContent === 'offline'")
    assert "tries again by itself" in page.text_content("#state")
    with (home / "metrics.jsonl").open("a") as file:
        file.writelines(f'{{"step": {step}, "train/reward": 0.{step}}}\n' for step in range(2, 8))
    server = viewer(library, token=token, port=port).start()
    try:
        wait_until(page, "document.querySelector('.chart .key b').textContent === '0.7'", seconds=60)
        assert "Nobody answers" not in page.text_content("#state")
    finally:
        server.close()
        page.goto("about:blank")
    assert page.errors == []


# ---------------------------------------------------------------- size and speed


def test_the_page_weighs_little() -> None:
    assert sum(len(content) for content in static_files().values()) <= 250_000


def large_step(folder: Path, tokens: int) -> None:
    rng, each = np.random.default_rng(0), 2000
    mask = np.arange(each) > 400
    samples = [
        Sample(
            id=f"s{i}",
            group=f"g{i // 8}",
            env="math",
            policy_version=1,
            token_ids=rng.integers(0, 150_000, each),
            loss_mask=mask,
            logprobs=np.where(mask, -rng.exponential(0.4, each), 0),
            advantages=float(rng.normal()),
            rewards=float(rng.random()),
        )
        for i in range(tokens // each)
    ]
    for rank, own in enumerate(pack(samples, ranks=4, seq_len=1 << 15).ranks):
        with TokenExporter(folder, rank=rank, world=4) as exporter:
            for batch in own:
                exporter.write(1, batch, terms_of(rng, batch), policy_version=1)
            exporter.close_step(1)


def test_a_step_of_a_million_tokens_opens_soon_and_the_page_paints_before(page: Any, tmp_path: Path) -> None:
    large_step(tmp_path, 1_000_000)
    with serving(Library(exports={"large": Export(tmp_path)})) as (url, _, _):
        begin = time.perf_counter()
        page.goto(url + "#/samples")
        page.wait_for_selector(".cursor", timeout=120_000)
        opened = time.perf_counter() - begin
        first = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        assert page.text_content("#count") == "500 samples"
        figures = {"opened_s": round(opened, 2), "first_paint_ms": round(first), "tokens": 1_000_000}
        ARTIFACTS.mkdir(parents=True, exist_ok=True)
        (ARTIFACTS / "large_step.json").write_text(json.dumps(figures))
        print(figures)
        # Meant to be 2 s and 300 ms on two idle cores; generous, for busy ones.
        assert opened < 90 and first < 15_000, figures
        keep_pictures(page, ARTIFACTS, "million")
        page.keyboard.press("2")
        page.wait_for_selector("#step-counts table", timeout=60_000)
    assert page.errors == []
