"""Frames that were written once decode to the same samples forever."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import penstock as ps
from penstock.errors import CorruptFrame
from penstock.frames.codings import Profile
from scripts.make_golden import BATCHES, DIGESTS, PROFILES, WITHOUT_ITEMS, digest
from tests.frames.frames import FRAMES, REFUSED
from tests.support.reference import record


@pytest.mark.parametrize("path", FRAMES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_golden_frame_decodes_to_the_recorded_samples(path: Path) -> None:
    recorded = json.loads((path.parent / DIGESTS).read_text())
    samples = ps.decode(path.read_bytes())
    assert digest(samples) == recorded[path.name]


@pytest.mark.parametrize("path", FRAMES, ids=lambda path: f"{path.parent.name}/{path.stem}")
@pytest.mark.parametrize("profile", PROFILES)
def test_golden_samples_encoded_today_come_back_equal(path: Path, profile: str) -> None:
    samples = ps.decode(path.read_bytes())
    again = ps.decode(ps.encode(samples, profile))  # type: ignore[arg-type]
    assert [record(sample) for sample in again] == [record(sample) for sample in samples]


NEWEST = [path for path in FRAMES if path.stem.rpartition("_")[0] not in WITHOUT_ITEMS]


@pytest.mark.parametrize("path", NEWEST, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_golden_samples_encoded_today_give_the_golden_bytes(path: Path) -> None:
    profile: Profile = "small" if path.stem.endswith("small") else "fast"
    assert ps.encode(ps.decode(path.read_bytes()), profile) == path.read_bytes()


@pytest.mark.parametrize("path", REFUSED, ids=lambda path: path.stem)
def test_a_frame_with_a_policy_version_beyond_the_limit_is_refused(path: Path) -> None:
    with pytest.raises(CorruptFrame, match=rf"policy_version: {2**63 - 1}; must be from 0 to 2\*\*53"):
        ps.decode(path.read_bytes())


def test_a_version_that_nobody_gave_is_none_and_the_prompt_comes_back() -> None:
    batch = BATCHES[[b.__name__ for b in BATCHES].index("prompts_and_unknown_versions")]()
    again = ps.decode(ps.encode(batch))
    assert [sample.policy_version for sample in again] == [7, None, None, 0, None]
    assert [sample.prompt for sample in again] == ["17"] * 4 + [""]


def test_every_batch_has_a_golden_frame_in_both_profiles_and_a_digest() -> None:
    names = {f"{batch.__name__}_{profile}.frame" for batch in BATCHES for profile in PROFILES}
    newest = FRAMES[-1].parent
    assert names == {path.name for path in newest.glob("*.frame")}
    assert names == set(json.loads((newest / DIGESTS).read_text()))
