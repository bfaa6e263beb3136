"""The decoder against a reader that was written from docs/internals/wire-format.md and shares no code with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings

import penstock as ps
from penstock.frames.codings import Profile
from penstock.testing.strategies import batches
from penstock.testing.wire import read_frame
from tests.frames.frames import FRAMES
from tests.support.reference import record


@pytest.mark.parametrize("path", FRAMES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_plain_reader_and_decoder_agree_on_golden_frames(path: Path) -> None:
    frame = path.read_bytes()
    assert read_frame(frame) == [record(sample) for sample in ps.decode(frame)]


@pytest.mark.parametrize("profile", ["fast", "small"])
@settings(max_examples=50)
@given(samples=batches())
def test_plain_reader_gives_what_was_encoded(profile: Profile, samples: list[ps.Sample]) -> None:
    assert read_frame(ps.encode(samples, profile)) == [record(sample) for sample in samples]
