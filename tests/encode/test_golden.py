"""Frames that were written once decode to the same samples forever."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import penstock as ps
from penstock.testing.reference import record
from scripts.make_golden import BATCHES, DIGESTS, PROFILES, digest
from tests.encode.frames import FRAMES


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


def test_every_batch_has_a_golden_frame_in_both_profiles_and_a_digest() -> None:
    names = {f"{batch.__name__}_{profile}.frame" for batch in BATCHES for profile in PROFILES}
    newest = FRAMES[-1].parent
    assert names == {path.name for path in newest.glob("*.frame")}
    assert names == set(json.loads((newest / DIGESTS).read_text()))
