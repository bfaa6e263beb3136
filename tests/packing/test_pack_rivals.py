"""The packers we compare with keep every sample and the cap, so that the comparison is fair; and ours is not behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.list_path import ToTensors, as_lists, lists_to_tensors, make_samples
from benchmarks.pack import case, ours, score
from benchmarks.packers import RIVALS, first_fit, first_fit_plain, karmarkar_karp
from penstock.packing import Packing


@pytest.mark.parametrize("distribution", ["cot", "agentic", "math", "grpo"])
def test_every_packer_keeps_all_samples_and_the_cap_and_none_wastes_less_than_ours(distribution: str) -> None:
    given = case(distribution, 192, 32_768, 8)
    mine = score(ours(given.lengths, given.costs, given.ranks, given.cap), given).waste
    for packer in RIVALS.values():
        # `score` raises when a sample is missing or the cap is broken.
        assert mine <= score(packer(given.lengths, given.costs, given.ranks, given.cap), given).waste + 0.2


def test_the_fast_first_fit_makes_the_bins_of_the_plain_one() -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 300)
    order = np.argsort(-lengths, kind="stable").tolist()
    assert first_fit(lengths, order, 1000) == first_fit_plain(lengths.tolist(), order, 1000)


def test_karmarkar_karp_splits_a_known_set_evenly() -> None:
    parts = karmarkar_karp([8.0, 7.0, 6.0, 5.0, 4.0], 2, equal_size=False)
    assert sorted(sum([8.0, 7.0, 6.0, 5.0, 4.0][i] for i in part) for part in parts) == [14.0, 16.0]
    equal = karmarkar_karp([float(i) for i in range(12)], 4, equal_size=True)
    assert {len(part) for part in equal} == {3}


def test_both_ways_to_tensors_compute_the_same_samples() -> None:
    pytest.importorskip("torch")
    samples = make_samples(20, 4_000)
    packing = Packing(ranks=2, seq_len=2_048)
    assert ToTensors(samples, packing)() == samples.num_tokens
    assert lists_to_tensors(as_lists(samples), 1, 2_048) >= samples.num_tokens


@pytest.mark.deep
def test_the_picture_of_the_docs_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[bench]'")
    from benchmarks.plot_step import example, tree_example

    for draw in (example, tree_example):
        draw(tmp_path / "step.svg")
        assert (tmp_path / "step.svg").read_text(encoding="utf-8").count("<path") > 100
