"""Caps of tokens, patches and samples, what is cut to them, and settings that cannot hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.errors import ConfigError, InvalidInput
from penstock.packing import Packing, pack
from tests.packing.small_samples import SAFE, batches_of, image, picture, sample


def test_samples_at_the_cap_fit_and_one_more_token_is_over_it() -> None:
    step = pack([sample(8, "at"), sample(9, "over"), sample(2)], ranks=1, seq_len=16, micro_batch_max_tokens=8)
    assert step.accounting.over_cap == 1 and step.accounting.truncated_samples == 0
    assert sorted(b.num_tokens for b in step.ranks[0]) == [2, 8, 9]


def test_a_strict_cap_names_the_sample_that_breaks_it() -> None:
    with pytest.raises(InvalidInput, match=r"'over'.*9 tokens.*at most 8 tokens"):
        pack([sample(8), sample(9, "over")], ranks=1, seq_len=16, micro_batch_max_tokens=8, over_cap="strict")


def test_padding_counts_towards_the_cap() -> None:
    step = pack([sample(7) for _ in range(8)], ranks=1, seq_len=30, micro_batch_max_tokens=30, pad_to_multiple_of=8)
    assert {b.num_tokens for b in step.ranks[0]} <= {8, 16, 24}
    assert step.accounting.over_cap == 0


def test_the_cap_is_separate_from_truncation() -> None:
    samples = [sample(20, f"s{i}") for i in range(12)]
    whole = pack(samples, ranks=2, seq_len=20)
    small = pack(samples, ranks=2, seq_len=60, micro_batch_max_tokens=20)
    assert whole.accounting.total.tokens == small.accounting.total.tokens == 240
    assert small.accounting.truncated_tokens == 0
    default = pack(samples, ranks=2, seq_len=60)
    assert default.num_micro_batches < small.num_micro_batches
    assert default.loss_tokens == small.loss_tokens


def test_longer_samples_are_cut_in_every_column_and_counted() -> None:
    long = sample(10, "long", logprobs=-np.arange(10.0), advantages=np.arange(10.0), rewards=2.0)
    (batch,) = pack([long], ranks=1, seq_len=6).ranks[0]
    assert {len(values) for values in batch.columns.values()} == {6}
    assert batch["logprobs"].tolist() == [0, -1, -2, -3, -4, -5] and batch["rewards"].tolist() == [2.0] * 6
    accounts = pack([long], ranks=1, seq_len=6).accounting
    assert (accounts.truncated_samples, accounts.truncated_tokens, accounts.truncated_loss_tokens) == (1, 4, 4)


@pytest.mark.parametrize(
    ("seq_len", "tokens", "images"), [(20, 20, 2), (14, 14, 2), (13, 10, 1), (10, 10, 1), (6, 6, 1), (5, 2, 0)]
)
def test_truncation_never_splits_an_image(seq_len: int, tokens: int, images: int) -> None:
    (batch,) = pack([picture(20, image(2), image(10))], ranks=1, seq_len=seq_len).ranks[0]
    assert batch.num_tokens == tokens and len(batch.images) == images
    assert batch.modality == ("image" if images else "text")
    assert int((batch["mm_token_type_ids"] == 1).sum()) == 4 * images


def test_a_sample_that_begins_with_an_image_that_does_not_fit_is_dropped_and_counted() -> None:
    samples = [picture(20, image(0, side=8), name="big"), sample(5, "fine")]
    step = pack(samples, ranks=2, seq_len=10)
    assert step.plan.dropped == {0: "unpackable"}
    accounts = step.accounting
    accounts.check()
    assert accounts.dropped == {"unpackable": 1} and accounts.dropped_tokens == 20
    assert accounts.total.samples == step.denominators.samples == 1
    with pytest.raises(InvalidInput, match=r"'big'.*none of 1 can be packed.*seq_len 10"):
        pack(samples[:1], ranks=2, seq_len=10)


def test_patch_and_sample_caps_hold() -> None:
    pictures = [picture(8, image(1)) for _ in range(9)]
    by_patches = pack(pictures, ranks=1, seq_len=80, max_patches=32, packed_images=SAFE)
    assert max(sum(i.num_patches for i in b.images) for b in by_patches.ranks[0]) == 32
    by_samples = pack([sample(2) for _ in range(10)], ranks=1, seq_len=80, max_samples=3)
    assert sorted(b.sample_count for b in by_samples.ranks[0]) == [2, 2, 3, 3]
    over = pack(pictures, ranks=1, seq_len=80, max_patches=8)
    assert over.accounting.over_cap == 9 and {b.sample_count for b in over.ranks[0]} == {1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"micro_batch_max_tokens": 65}, "micro_batch_max_tokens: 65 with seq_len 64.*long_rows=True"),
        ({"micro_batch_max_tokens": 0}, "micro_batch_max_tokens: 0"),
        ({"micro_batch_max_tokens": -1}, "micro_batch_max_tokens: -1"),
        ({"micro_batch_max_tokens": 8, "pad_to_multiple_of": 16}, "8 with pad_to_multiple_of 16"),
        ({"ranks": 0}, "ranks: 0"),
        ({"seq_len": 0}, "seq_len: 0"),
        ({"max_samples": 0}, "max_samples: 0"),
        ({"max_patches": -3}, "max_patches: -3"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of: 0"),
        ({"pad_id": -1}, "pad_id: -1"),
        ({"over_cap": "loose"}, "over_cap: 'loose'"),
        ({"rows_by": "rank"}, "rows_by: 'rank'"),
        ({"ranks": 2.0}, "ranks: 2.0"),
    ],
)
def test_settings_that_cannot_hold_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Packing(**{"ranks": 2, "seq_len": 64, **settings})


def test_rows_longer_than_a_sample_are_possible_when_asked_for() -> None:
    step = pack([sample(10) for _ in range(8)], ranks=2, seq_len=10, micro_batch_max_tokens=40, long_rows=True)
    assert [b.num_tokens for b in batches_of(step)] == [40, 40]
    assert step.accounting.efficiency == 1.0
