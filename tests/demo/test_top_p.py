"""Top-p in the demo: with sampling masks the trainer measures what the sampler did, without them it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from benchmarks.sampling_masks import measure  # noqa: E402
from penstock.cli import main  # noqa: E402
from penstock.demo.roles import nucleus  # noqa: E402


@pytest.mark.deep
def test_trainer_and_sampler_agree_with_masks_and_visibly_not_without(capsys: pytest.CaptureFixture[str]) -> None:
    found = measure(0.7, prompts=16)
    with capsys.disabled():
        print(
            f"\ntop-p 0.7, {found.tokens} tokens, {found.kept:.1f} ids kept of 12: log-probabilities differ by at most"
        )
        print(f"  {found.with_masks.largest:.1e} with masks (mismatch KL {found.with_masks.mismatch_kl:.1e}),")
        print(f"  {found.without.largest:.1e} without (mismatch KL {found.without.mismatch_kl:.1e})")
    assert 1 < found.kept < 12
    assert found.with_masks.largest < 1e-5 and found.with_masks.mismatch_kl < 1e-9
    assert found.without.largest > 0.1 and found.without.mismatch_kl > 1e-2


@pytest.mark.deep
def test_without_top_p_there_are_no_masks_and_no_difference() -> None:
    found = measure(1.0, prompts=4)
    assert found.kept == 12 and found.with_masks == found.without
    assert found.without.largest < 1e-5


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.5, 0.9, 0.999])
def test_the_nucleus_is_the_smallest_set_that_reaches_top_p(top_p: float) -> None:
    p = torch.rand(50, 9, generator=torch.Generator().manual_seed(0)).softmax(-1)
    for row, inside in zip(p, nucleus(p.log(), top_p), strict=True):
        kept = row[inside]
        assert kept.sum() >= top_p - 1e-6 and kept.sum() - kept.min() < top_p
        assert len(kept) == 9 or kept.min() >= row[~inside].max()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_with_top_p_is_on_policy_at_its_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["demo", "--top-p", "0.7", "--steps", "2", "--folder", str(tmp_path / "run"), "--json"])
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert code == 0 and report["ledger"]["balanced"]
    assert report["on_policy_gap"] < 1e-5
