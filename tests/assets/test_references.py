"""References survive a round trip, and nothing else gets through the parser."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.assets import QWEN2_5_VL, QWEN3_VL, FeatureRef, RawRef, feature_fingerprint, parse, processor_fingerprint
from penstock.errors import InvalidReference

HEX = "0123456789abcdef"
ids = st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,40}", fullmatch=True)
hashes = st.text(HEX, min_size=64, max_size=64)
fingerprints = st.text(HEX, min_size=16, max_size=64)
sides = st.integers(1, 999_999)
raw_refs = st.builds(
    RawRef, run=ids, fingerprint=fingerprints, hash=hashes, raw_image_id=ids, grid=st.tuples(sides, sides, sides)
)
feature_refs = st.builds(FeatureRef, run=ids, fingerprint=fingerprints, hash=hashes)
GOOD_RAW = f"mmraw:v1:demo:{'0' * 32}:image:{'ab' * 32}:{'ab' * 32}.png:1x44x80"
GOOD_FEATURE = f"mmfile:v1:demo:{'0' * 32}:image:{'ab' * 32}"


@given(raw_refs | feature_refs)
def test_references_round_trip(ref: RawRef | FeatureRef) -> None:
    assert parse(str(ref)) == ref


@pytest.mark.parametrize(
    "change",
    [
        ("mmraw", "MMRAW"),
        ("v1", "v2"),
        (":demo:", ":..:"),
        (":demo:", "::"),
        (":demo:", ":a/b:"),
        (":demo:", ":a%2fb:"),
        (":demo:", ":de\0mo:"),
        (":demo:", ":démo:"),
        (":demo:", f":{'x' * 200}:"),
        (":demo:", ":demo:demo:"),
        ("0" * 32, "0" * 15),
        ("0" * 32, "A" * 32),
        (":image:", ":im age:"),
        ("ab" * 32, "AB" * 32),
        (".png", "/../x.png"),
        ("1x44x80", "1x44"),
        ("1x44x80", "0x44x80"),
        ("1x44x80", "-1x44x80"),
        ("1x44x80", "01x44x80"),
        ("1x44x80", "1x44x80x1"),
        ("1x44x80", "1x44x9999999"),
        ("1x44x80", "1x44x٣"),
        ("1x44x80", "1x44x80\n"),
    ],
)
def test_each_broken_part_of_a_raw_reference_is_refused(change: tuple[str, str]) -> None:
    text = GOOD_RAW.replace(*change)
    assert text != GOOD_RAW
    with pytest.raises(InvalidReference) as caught:
        parse(text)
    assert (caught.value.error_type, caught.value.status) == ("invalid_mm_raw_ref", 400)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("text", [None, 7, b"mmraw:v1", "", "mmraw", "mmraw:v1", "mmraw:eyJhIjoxfQ", "x" * 5000])
def test_what_is_no_reference_at_all_is_refused(text: object) -> None:
    with pytest.raises(InvalidReference):
        parse(text)


@settings(max_examples=400)
@given(st.text(max_size=120) | st.text("mraw:v1x0abf./\0\n", max_size=80).map(lambda tail: "mmraw:v1:" + tail))
def test_hostile_strings_are_refused_or_mean_exactly_what_they_say(text: str) -> None:
    try:
        ref = parse(text, default_run="mine")
    except InvalidReference:
        return
    assert str(ref) == text
    assert re.fullmatch(r"(?!\.)[A-Za-z0-9_.-]+", ref.run)


@settings(max_examples=300)
@given(st.integers(0, len(GOOD_RAW) - 1), st.characters())
def test_one_changed_character_is_refused_or_is_another_reference(at: int, character: str) -> None:
    text = GOOD_RAW[:at] + character + GOOD_RAW[at + 1 :]
    try:
        assert str(parse(text)) == text
    except InvalidReference:
        assert text != GOOD_RAW


def test_a_feature_reference_without_a_run_gets_the_readers_own() -> None:
    legacy = GOOD_FEATURE.replace(":demo", "")
    assert parse(legacy, default_run="mine") == FeatureRef(run="mine", fingerprint="0" * 32, hash="ab" * 32)
    with pytest.raises(InvalidReference) as caught:
        parse(legacy)
    assert caught.value.error_type == "invalid_mm_feature_ref"


def test_a_reference_is_checked_when_it_is_made_too() -> None:
    good = parse(GOOD_RAW)
    bad: dict[str, Any] = {"run": "..", "hash": "xyz", "grid": (1, 0, 2), "raw_image_id": "a/b"}
    for field, value in bad.items():
        with pytest.raises(InvalidReference):
            dataclasses.replace(good, **{field: value})


def test_fingerprints_change_with_everything_that_matters() -> None:
    changes: dict[str, Any] = {
        "family": "x",
        "patch": 7,
        "merge": 1,
        "temporal_patch": 1,
        "min_pixels": 9,
        "max_pixels": 10**6,
    }
    seen = {processor_fingerprint(QWEN2_5_VL), processor_fingerprint(QWEN2_5_VL, transformers="5.0")}
    for field, value in changes.items():
        seen.add(processor_fingerprint(dataclasses.replace(QWEN2_5_VL, **{field: value})))
    assert len(seen) == 8
    features = {
        feature_fingerprint(QWEN3_VL, {"pillow": "11"}),
        feature_fingerprint(QWEN3_VL, {"pillow": "12"}),
        feature_fingerprint(QWEN3_VL, {"pillow": "11"}, kind="other"),
        feature_fingerprint(dataclasses.replace(QWEN3_VL, mean=(0.1, 0.1, 0.1)), {"pillow": "11"}),
    }
    assert len(features) == 4
    assert all(re.fullmatch("[0-9a-f]{32}", f) for f in seen | features)
    # A fingerprint is part of stored names: it must never change by accident.
    assert processor_fingerprint(QWEN3_VL) == "9bb9781b7f8e36f4769e39be7d2d4b66"
