"""A plane with trees: planned from metadata, filled on the ranks, the same micro-batches as packing in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import penstock as ps
from penstock.cli import main
from penstock.frames.metadata import GroupMetadata, check_group, join_metadata
from penstock.packing import Packing, pack_with, plan
from tests.support.packable import branching, tree_packings
from tests.support.planes import OpenPlane

PROMPT = 80


def answers(group: str, count: int = 4) -> list[ps.Sample]:
    """Answers to one prompt, and one that goes on from the first of them."""
    rng = np.random.default_rng(list(group.encode()))
    prompt = rng.integers(1, 100, PROMPT)
    out: list[ps.Sample] = []
    for i in range(count):
        ids = np.concatenate([prompt, rng.integers(1, 100, 20 + i)])
        if i == count - 1:
            ids = np.concatenate([out[0]["token_ids"], rng.integers(1, 100, 9)])
        mask = np.arange(len(ids)) >= PROMPT
        columns: dict[str, Any] = {"logprobs": -rng.random(len(ids)), "advantages": float(rng.normal())}
        out.append(ps.Sample(id=f"{group}/{i}", group=group, token_ids=ids, loss_mask=mask, **columns))
    return out


def test_ranks_fill_the_forests_that_packing_in_one_process_gives(open_plane: OpenPlane) -> None:
    plane = open_plane(seq_len=256, trees=True)
    groups = [answers("a"), answers("b")]
    for group in groups:
        assert plane.put(group)
    ranks = [plane.source(rank, world=2) for rank in range(2)]
    expected = pack_with(Packing(ranks=2, seq_len=256, trees=True), [s for group in groups for s in group])
    assert expected.accounting.total.shared_tokens > 0
    for rank, source in enumerate(ranks):
        step = source.step()
        assert [batch.digest for batch in step] == [batch.digest for batch in expected.ranks[rank]]
        assert any(batch.forest is not None for batch in step)
        assert step.accounting.total.shared_tokens == expected.accounting.total.shared_tokens
        source.close()


@settings(max_examples=40, deadline=None)
@given(branching(), tree_packings())
def test_a_plan_from_metadata_is_that_of_the_samples(samples: list[ps.Sample], packing: Packing) -> None:
    groups: dict[str, list[ps.Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    metadata = [check_group(ps.encode(g), group=name, seq_len=packing.seq_len) for name, g in groups.items()]
    metadata = [GroupMetadata.from_bytes(own.to_bytes()) for own in metadata]
    planned = plan(join_metadata(metadata), packing)
    expected = pack_with(packing, [sample for group in groups.values() for sample in group]).plan
    assert [part.to_bytes() for part in planned.rank_plans] == [part.to_bytes() for part in expected.rank_plans]


@pytest.mark.parametrize("name", ["step.svg", "step.png"])
def test_inspect_draws_the_last_step_of_a_run(
    open_plane: OpenPlane, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[bench]'")
    plane = open_plane(tmp_path / "run", ranks=1, seq_len=256, groups_per_step=1, trees=True)
    assert plane.put(answers("a"))
    with plane.source(0, world=1) as source:
        source.step()
        assert main(["inspect", str(tmp_path / "run"), "--plot", str(tmp_path / name)]) == 0
    assert "step 1, 4 samples, 412 tokens, 260 not computed twice" in capsys.readouterr().out
    assert (tmp_path / name).stat().st_size > 1000
    assert main(["inspect", str(tmp_path / "run"), "--plot", str(tmp_path / name), "--step", "7"]) == 1
    assert "step 7: no plan of it" in capsys.readouterr().err


def test_inspect_draws_the_samples_of_a_frame(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[bench]'")
    (tmp_path / "a.frame").write_bytes(ps.encode(answers("a")))
    words = ["inspect", str(tmp_path / "a.frame"), "--plot", str(tmp_path / "a.svg"), "--ranks", "2"]
    assert main([*words, "--cap", "512"]) == 0 and "not computed twice" not in capsys.readouterr().out
    assert main([*words, "--cap", "512", "--trees"]) == 0 and "not computed twice" in capsys.readouterr().out
    assert "<svg" in (tmp_path / "a.svg").read_text()
    assert main(["inspect", str(tmp_path / "a.frame"), "--plot", str(tmp_path / "a.txt")]) == 1
    assert "is not a .svg or .png file; use one of these suffixes" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "b.frame"), "--plot", str(tmp_path / "b.svg")]) == 1
