"""The demo's tasks and its sampler: rewards that cannot be hacked, log-probabilities the trainer agrees with."""

from __future__ import annotations

import io
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from penstock.arrays import Samples
from penstock.capture import Trajectory, Turn
from penstock.convert import make_group
from penstock.demo.launch import Progress
from penstock.demo.roles import life_name, sample
from penstock.demo.screen import page, screen, sparkline
from penstock.demo.tasks import EOS, PAD, REVERSE, Prompt, ReverseTask, make_task, model_of
from penstock.packing import pack
from penstock.plane import Ledger
from penstock.train.logits import token_logprobs
from penstock.train.model import build_model, forward
from penstock.train.run_config import PACKED_IMAGES, TaskConfig, image_processor
from penstock.train.tensors import to_torch


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def ids(word: str) -> list[int]:
    return [REVERSE.index(c) for c in word]


def test_only_the_reversed_word_and_its_end_earn_the_whole_reward() -> None:
    task = ReverseTask(3)
    prompt = Prompt("abc", [])
    assert task.reward(prompt, [*ids("cba"), EOS]) == 1.0
    assert task.reward(prompt, ids("cba")) == 0.75
    assert task.reward(prompt, [*ids("abc"), EOS]) == 0.5
    assert task.reward(prompt, [*ids("cba"), PAD, EOS]) == pytest.approx(0.6)
    assert task.reward(prompt, [EOS]) == 0.0


@pytest.mark.deep
@pytest.mark.parametrize("name", ["reverse", "color"])
def test_trainer_logprobs_equal_sampler_logprobs_at_the_same_weights(name: str, tmp_path: Path) -> None:
    task = make_task(TaskConfig(name=name), tmp_path)  # type: ignore[arg-type]
    config = model_of(name)
    model = build_model(config, seed=3).eval()
    rng, generator = random.Random(1), torch.Generator().manual_seed(1)
    prompts = [task.prompt(rng) for _ in range(12)]
    rollouts = sample(
        model,
        [prompt.token_ids for prompt in prompts],
        max_new_tokens=task.max_new_tokens,
        eos=task.eos,
        generator=generator,
        banned=task.banned,
        first=task.model_inputs(prompts, model),
    )
    assert not {token for rollout in rollouts for token in rollout.token_ids} & set(task.banned)
    groups = [
        make_group([Trajectory(turns=[task.turn(p), Turn(r.token_ids, logprobs=r.logprobs)], reward=0.0)], id=f"g{i}")
        for i, (p, r) in enumerate(zip(prompts, rollouts, strict=True))
    ]
    samples = Samples.of(s for group in groups for s in group.samples)
    for batch in pack(samples, ranks=1, seq_len=64, packed_images=PACKED_IMAGES).ranks[0]:
        tensors, extra = to_torch(batch), None
        if batch.images:
            from penstock.assets import AssetStore
            from penstock.train.vision import Vision

            vision = Vision(model, image_processor(config), AssetStore(tmp_path / "assets"))
            extra = vision.inputs(batch, tensors)
            measured = vision.metrics()
            assert measured["perf/images"] and measured["perf/image_s"] > 0
            model.model.rope_deltas = None  # the sampler's
            vision.close()
        with torch.no_grad():
            logits = forward(model, tensors, extra)
            if config.never_sampled:
                logits[..., list(config.never_sampled)] = float("-inf")
            logprobs, _ = token_logprobs(logits, tensors["token_ids"], tensors["sequence_lengths"])
        gap = (logprobs - tensors["logprobs"])[tensors["loss_mask"]].abs().max()
        assert float(gap) < 1e-5


def test_a_sparkline_follows_its_values() -> None:
    assert sparkline([], 5) == ""
    assert sparkline([0, 1], 10) == "▁█"
    assert len(sparkline([0.5] * 1000, 40)) == 40


def test_steps_without_rewards_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    rows: Any = [{"step": step, "train/reward": None} for step in range(1, 30)]
    progress = Progress(rows=rows, status={}, kills={}, seconds=1.0)
    assert "reward" in str(page(progress).renderable.columns[0]._cells)
    with screen("penstock demo", quiet=False) as show:
        show(progress)
    assert "step   29  reward -  staleness" in capsys.readouterr().out


def test_numbers_that_are_none_are_dashes_on_the_page_and_in_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """A loss that diverged is null in metrics.jsonl; that is when people look."""
    names = ("train/entropy", "train/mismatch_kl", "train/masked", "train/staleness", "perf/waste", "train/reward")
    rows: Any = [{"step": 20, "perf/tokens_per_s": 5.0, **dict.fromkeys(names)}]
    progress = Progress(rows=rows, status={}, kills={}, seconds=1.0)
    assert "entropy -   mismatch KL -   clipped -" in str(page(progress).renderable.columns[1]._cells)
    with screen("penstock demo", quiet=False) as show:
        show(progress)
    assert "staleness -  5 tokens/s  padding -" in capsys.readouterr().out


def test_nothing_is_known_before_the_first_step_and_the_page_says_no_zeros() -> None:
    cells = str(page(Progress(rows=[], status={}, kills={}, seconds=0.0)).renderable.columns[1]._cells)
    assert "0.000" not in cells and "accepted 0" not in cells and "- groups held" in cells


def test_every_life_of_a_worker_has_a_name_of_its_own_made_of_the_seed(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    assert [life_name(one, 7, 0), life_name(one, 7, 1), life_name(one, 7, 0)] == ["s7-w0.0", "s7-w1.0", "s7-w0.1"]
    assert life_name(other, 7, 0) == "s7-w0.0"


def test_prompts_of_the_text_task_have_the_name_of_their_word() -> None:
    task = make_task(TaskConfig(), Path("unused"))
    first, again = task.prompt(random.Random(3)), task.prompt(random.Random(3))
    assert first.name == again.name and len(first.name) == 3


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_page_fits_terminals_of_every_width_with_nothing_cut_off(width: int) -> None:
    many, stale = 45_960, Counter(stale=5_368)
    ledger = Ledger(accepted=many, held=many, scheduled=many, delivered=many, committed=many, dropped=stale)
    status = {"ledger": ledger.as_dict(), "waiting_for": "generation: 3 of 32"}
    names = ("train/entropy", "train/mismatch_kl", "train/masked", "train/staleness", "perf/waste", "train/reward")
    rows: Any = [{"step": step, "perf/tokens_per_s": 12_804.0, **dict.fromkeys(names, 0.3)} for step in range(1, 300)]
    progress = Progress(rows=rows, status=status, kills={"plane": 3, "rank": 6, "worker": 7}, seconds=82.0)
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(page(progress, width=width))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in text.splitlines()) and len(text.splitlines()) < 24
    assert "…" not in text
    for label in ("reward", "step", "learning", "buffer", "waits for", "ledger", "killed"):
        assert re.search(rf"│ +{label} ", text), label
    assert re.search(r"reward +0\.300  [▁▂▃▄▅▆▇█]+ +│", text)


def test_the_ledger_on_the_page_names_every_state_that_has_samples() -> None:
    ledger = Ledger(accepted=60, held=8, committed=24, waiting=16, quarantined=8, evaluation=4)
    progress = Progress(rows=[], status={"ledger": ledger.as_dict()}, kills={}, seconds=1.0)
    shown = str(page(progress).renderable.columns[1]._cells)
    for text in ("60 accepted", "16 waiting", "8 quarantined", "4 evaluation", "(balanced)"):
        assert text in shown


def test_the_page_says_what_it_does_before_there_is_a_plane(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(rows=[], status={}, kills={}, seconds=0.0, doing="starting: torch is loaded")
    assert "starting: torch is loaded" in str(page(progress).renderable.columns[1]._cells)
    with screen("penstock demo", quiet=False) as show:
        show(progress)
        show(progress)
    assert capsys.readouterr().out == "starting: torch is loaded\n"
