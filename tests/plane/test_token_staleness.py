"""Tokens older than `max_token_staleness` are not trained: same masks on every rank, right denominators, counted."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

import penstock as ps
from penstock.arrays import MODE_WEIGHTS, WEIGHTS, Samples
from penstock.commands.top import _from_plane, page
from penstock.errors import ConfigError, CorruptFrame, InvalidInput
from penstock.frames import GroupMetadata, encode_group, join_metadata, mask_stale, metadata_of_pieces
from penstock.packing import Packing, RankPlan, fill, plan
from penstock.plane import PlaneSettings
from penstock.plane.settings import Replay, Target
from penstock.plane.step_builder import StepBuilder
from penstock.runs import RecordedRun, read_run, rerun
from penstock.server.prometheus import render
from penstock.storage import MemoryStorage
from tests.support.pace import pace
from tests.support.planes import OpenPlane

PATIENCE_S = 60 * pace()


def sample(name: str, versions: Sequence[int] | None, length: int = 9, **given: object) -> ps.Sample:
    """All but the first token trained. `versions` are those of its tokens."""
    known = {} if versions is None else {"weight_versions": np.array(versions, np.int32)}
    return ps.Sample(
        id=f"{name}",
        group=name.split("/")[0],
        token_ids=range(1, length + 1),
        loss_mask=[False] + [True] * (length - 1),
        **{"logprobs": [-0.5] * length, "advantages": 1.0, **known, **given},  # type: ignore[arg-type]
    )


def trained(samples: Samples, i: int, oldest: int, cut: int) -> np.ndarray:
    """What a sample trains, token by token: the plain definition."""
    mask = np.array(samples.columns["loss_mask"][i][:cut])
    column = samples.columns.get("weight_versions")
    own = column[i] if column is not None and len(column[i]) else np.full(cut, samples.policy_versions[i])
    return mask & ~((own[:cut] >= 0) & (own[:cut] < oldest))


@pytest.mark.parametrize("seed", range(12))
def test_counts_from_metadata_are_those_of_the_filled_batches(seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = []
    for g in range(5):
        has, weighted = rng.random() < 0.6, rng.random() < 0.4
        members = []
        for i in range(3):
            length = int(rng.integers(2, 24))
            weights = {name: rng.choice([0.0, 1.0], length) for name in WEIGHTS} if weighted else {}
            versions = np.sort(rng.integers(-1, 6, length)).tolist() if has and rng.random() < 0.8 else None
            version = None if rng.random() < 0.2 else int(rng.integers(0, 6))
            mode = str(rng.choice(["rl", "sft"]))
            members.append(sample(f"g{g}/{i}", versions, length, policy_version=version, mode=mode, **weights))
        groups.append(members)
    seq_len, oldest = 16, int(rng.integers(0, 7))
    metadata = [metadata_of_pieces(encode_group(one), group=f"g{g}", seq_len=seq_len) for g, one in enumerate(groups)]
    samples = Samples.of([one for members in groups for one in members])
    packing = Packing(ranks=2, seq_len=seq_len, trees=seed % 2 == 0)
    made = plan(mask_stale(join_metadata(metadata), metadata, oldest), packing)
    made.accounting.check()
    masks = [trained(samples, i, oldest, min(int(samples.lengths[i]), seq_len)) for i in range(len(samples))]
    assert made.totals.step.loss_tokens == sum(int(mask.sum()) for mask in masks)
    terms = np.zeros(3, np.int64)
    for i, mask in enumerate(masks):
        for k, name in enumerate(WEIGHTS):
            row = samples.columns[name][i] if name in samples.columns else ()
            by_mode = np.full(len(mask), MODE_WEIGHTS[samples.text["mode"][i]][k])
            terms[k] += int((mask & ((row[: len(mask)] if len(row) else by_mode) != 0)).sum())
    step = made.totals.step
    assert (step.rl_tokens, step.ce_tokens, step.ref_kl_tokens) == tuple(terms.tolist())
    for rank, rank_plan in enumerate(made.rank_plans):
        sent = RankPlan.from_bytes(rank_plan.relative().to_bytes())
        batches = fill(Samples.of([samples[int(i)] for i in rank_plan.needs]), sent)  # may lack columns of others
        assert sum(batch.loss_tokens for batch in batches) == made.accounting.ranks[rank].loss_tokens
        for batch in batches:
            for one in batch.samples():
                expected = masks[samples.ids.index(one.id)]
                assert one.loss_mask.tolist() == expected.tolist()


def test_counts_that_cannot_be_are_refused() -> None:
    found = metadata_of_pieces(encode_group([sample("g/0", [0] * 4 + [1] * 5)]), group="g", seq_len=64)
    assert found.versions == (((0, 3), (1, 5)),)
    for wrong in (
        {"versions": ((), ())},
        {"versions": (((0, 9),),)},
        {"versions": (((0, -1),),)},
        {"version_terms": (((9, 0, 0), (0, 0, 0)),)},
        {"version_terms": (((1, 0, 0),),)},
    ):
        with pytest.raises(CorruptFrame, match="versions"):
            GroupMetadata.from_bytes(msgspec.structs.replace(found, **wrong).to_bytes())


def test_a_rank_with_other_samples_than_planned_is_refused() -> None:
    old, new = ([sample("g/0", versions)] for versions in ([0] * 9, [5] * 9))
    metadata = [metadata_of_pieces(encode_group(old), group="g", seq_len=64)]
    made = plan(mask_stale(join_metadata(metadata), metadata, 3), Packing(ranks=1, seq_len=64))
    assert made.totals.step.loss_tokens == 0 and made.accounting.stale_loss_tokens == 8
    builder = StepBuilder(Packing(ranks=1, seq_len=64), MemoryStorage())
    assert builder.plan(metadata, 3).digests == builder.plan(metadata, 3).digests != builder.plan(metadata).digests
    with pytest.raises(InvalidInput, match="8 trained tokens of policy version 3 or later, the rank plan counted 0"):
        fill(Samples.of(new), made.rank_plans[0])


def life(plane: ps.Plane) -> list[list[tuple[str, list[bool]]]]:
    """Train three steps, a version each. Returns what each trains."""
    plane.put([sample("a/0", [0] * 9, policy_version=0), sample("a/1", [0] * 9, policy_version=0)])
    plane.put([sample("b/0", [0] * 5 + [1] * 4), sample("b/1", None, policy_version=1)])
    plane.put([sample("c/0", [0] * 3 + [1] * 3 + [2] * 3), sample("c/1", None, policy_version=0)])
    found = []
    with plane.source(0, prefetch=0) as source:
        for version in range(1, 4):
            step = source.step(timeout=PATIENCE_S)
            found.append(sorted((one.id, one.loss_mask.tolist()) for one in step.samples()))
            assert step.loss_tokens == sum(sum(mask) for _, mask in found[-1])
            source.commit(step, policy_version=version)
    return found


def expected_tokens(most: int) -> list[int]:
    """Trained tokens of the steps: version 0 samples a and c/1, versions 0 and 1 sample b, 0 to 2 sample c/0."""
    return {0: [16, 4 + 8, 3], 1: [16, 8 + 8, 6]}[most]


@pytest.mark.parametrize("most", [0, 1])
def test_direct_and_inline_ranks_train_the_same_and_a_rerun_agrees(
    open_plane: OpenPlane, tmp_path: Path, caplog: pytest.LogCaptureFixture, most: int
) -> None:
    settings = {"groups_per_step": 1, "max_token_staleness": most, "retain": "all", "ranks": 1}
    found = []
    for direct in (True, False):
        folder = tmp_path / str(direct)
        with caplog.at_level(logging.WARNING):
            plane = open_plane(folder, direct=direct, **settings)
            found.append(life(plane))
        tokens = [sum(sum(mask) for _, mask in step) for step in found[-1]]
        assert tokens == expected_tokens(most)
        status = plane.status()
        masked = {"stale_tokens": 48 - sum(tokens), "stale_samples": 3 if most == 0 else 2}
        assert status["ledger"]["masked"] == masked and plane.ledger.balanced
        assert status["counts"]["tokens_masked"] == masked["stale_tokens"]
        line = f"{masked['stale_tokens']} tokens of {masked['stale_samples']} samples"
        assert any(line in text for text in page(_from_plane(status), {}))
        assert f'penstock_ledger_masked_stale_tokens_total{{run="run"}} {masked["stale_tokens"]}.0' in render(status)
        assert "older than max_token_staleness" in caplog.text
        plane.close()
        assert read_run(folder)["ledger"]["masked"] == masked
        with open_plane(folder, direct=direct, **settings) as again:  # counted from the log
            assert again.ledger.as_dict()["masked"] == masked
        found_again = rerun(RecordedRun.open(folder), tmp_path / f"rerun-{direct}")
        assert found_again.same and found_again.steps == 3, found_again
    assert found[0] == found[1]


def test_a_prefetched_step_counts_the_versions_that_will_be_published(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1, groups_per_step=1, max_token_staleness=1)
    for name in "ab":
        plane.put([sample(f"{name}/0", [0] * 9)])
    with plane.source(0, prefetch=1) as source:
        for tokens in (8, 8):  # drawn one step ahead, b is one version behind when it is trained
            step = source.step(timeout=PATIENCE_S)
            assert step.loss_tokens == tokens
            source.commit(step, policy_version=step.number)


def test_settings_that_would_never_mask_are_refused() -> None:
    given = {"packing": Packing(ranks=1, seq_len=64), "target": Target(groups=1)}
    with pytest.raises(ConfigError, match="none would ever be masked"):
        PlaneSettings(**given, max_token_staleness=2, replay=Replay(max_staleness=2))  # type: ignore[arg-type]
    PlaneSettings(**given, max_token_staleness=1, replay=Replay(max_staleness=2))  # type: ignore[arg-type]
