"""Samples with images share a micro-batch only where the trainer declared what that needs."""

from __future__ import annotations

from itertools import product

import pytest

from penstock.arrays import ImageSpan, Sample
from penstock.errors import ConfigError
from penstock.packing import Modalities, PackedImages, PackedStep, Packing, pack

SAFE = PackedImages(explicit_boundaries=True, varlen_attention=True)


def picture(name: str) -> Sample:
    span = ImageSpan(hash="0" * 64, grid=(1, 4, 4), offset=1, length=4)
    return Sample(id=name, token_ids=range(8), images=[span])


def text(name: str) -> Sample:
    return Sample(id=name, token_ids=range(8))


def together(step: PackedStep) -> list[tuple[str, ...]]:
    return sorted(batch.segments.ids for rank in step.ranks for batch in rank if not batch.is_dummy)


def test_samples_with_images_are_alone_unless_the_trainer_declares_what_sharing_needs() -> None:
    samples = [picture("a"), picture("b"), text("c"), text("d")]
    assert together(pack(samples, ranks=1, seq_len=32)) == [("a",), ("b",), ("c", "d")]
    assert together(pack(samples, ranks=1, seq_len=32, packed_images=SAFE)) == [("a", "b"), ("c", "d")]


@pytest.mark.parametrize(("boundaries", "attention", "parallel"), list(product([False, True], [False, True], [1, 2])))
def test_one_declaration_that_is_missing_keeps_them_apart(boundaries: bool, attention: bool, parallel: int) -> None:
    declared = PackedImages(explicit_boundaries=boundaries, varlen_attention=attention, context_parallel=parallel)
    step = pack([picture("a"), picture("b")], ranks=1, seq_len=32, packed_images=declared)
    assert (together(step) == [("a", "b")]) is (declared == SAFE)
    step.accounting.check()


def test_images_alone_count_in_the_lower_bound() -> None:
    step = pack([picture(str(i)) for i in range(8)], ranks=2, seq_len=64)
    assert step.num_micro_batches == 4 and step.accounting.waste == pytest.approx(0.0)


def test_images_beside_text_need_the_declaration_and_the_error_has_every_reason() -> None:
    mixed = Modalities(together=("text", "image"))
    with pytest.raises(ConfigError) as caught:
        Packing(ranks=1, seq_len=8, modalities=mixed, packed_images=PackedImages(context_parallel=2))
    for reason in ("explicit_boundaries", "varlen_attention", "context_parallel is 2"):
        assert reason in str(caught.value)
    Packing(ranks=1, seq_len=8, modalities=mixed, packed_images=SAFE)
