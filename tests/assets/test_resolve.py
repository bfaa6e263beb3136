"""What an inference server gets for a reference: the right patches, or an error with a status and a reason."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from penstock.assets import (
    QWEN2_5_VL,
    QWEN3_VL,
    AssetStore,
    FeatureStore,
    ImageRef,
    Slot,
    describe,
    feature_fingerprint,
    processor_fingerprint,
    raw_reference,
    resolve,
    retry_in_full,
    sweep,
)
from penstock.assets.features import pack_patches, unpack_patches
from penstock.assets.image_files import decode_rgb
from penstock.assets.sources import path_of
from penstock.errors import AssetError, ConfigError, CorruptAsset, IncompatibleAsset, InvalidReference, MissingAsset
from tests.support.reference import reference_patches

Picture = Callable[[int], bytes]
OURS = processor_fingerprint(QWEN3_VL)


def slot_of(ref: ImageRef) -> Slot:
    return Slot(hash=ref.hash, placeholder_length=describe(ref, QWEN3_VL)[1])


def test_a_raw_reference_resolves_to_the_patches_of_its_image(store: AssetStore, picture: Picture) -> None:
    ref = store.put(picture(1))
    text = str(raw_reference(store, ref, QWEN3_VL))
    got = resolve(text, store=store, layout=QWEN3_VL, slot=slot_of(ref), fingerprint=OURS)
    assert got.grid == describe(ref, QWEN3_VL)[0]
    assert np.array_equal(got.patches, reference_patches(decode_rgb(picture(1)), QWEN3_VL))


def fails(store: AssetStore, text: str, slot: Slot, fingerprint: str = OURS) -> AssetError:
    with pytest.raises(AssetError) as caught:
        resolve(text, store=store, layout=QWEN3_VL, slot=slot, fingerprint=fingerprint)
    answer = caught.value.answer()
    assert json.loads(json.dumps(answer))["error_type"] == caught.value.error_type
    return caught.value


def test_each_wrong_claim_of_a_raw_reference_has_its_own_answer(store: AssetStore, picture: Picture) -> None:
    ref = store.put(picture(1))
    other = store.put(picture(2))
    good = raw_reference(store, ref, QWEN3_VL)
    slot = slot_of(ref)
    cases = {
        "invalid_mm_raw_ref": [
            (str(good).replace("mmraw", "mmraw2"), slot),
            (str(good), slot_of(other)),
            (str(good), dataclasses.replace(slot, modality="video")),
            (str(dataclasses.replace(good, modality="video")), slot),
            (str(dataclasses.replace(good, raw_image_id=other.file_id)), slot),
            (str(dataclasses.replace(good, raw_image_id=f"{ref.hash}.svg")), slot),
        ],
        "incompatible_mm_raw_fingerprint": [
            (str(dataclasses.replace(good, fingerprint=processor_fingerprint(QWEN2_5_VL))), slot)
        ],
        "raw_mm_grid_mismatch": [
            (str(dataclasses.replace(good, grid=(1, 2, 2))), slot),
            (str(dataclasses.replace(good, grid=good.grid[:1] + good.grid[:0:-1])), slot),
            (str(good), dataclasses.replace(slot, placeholder_length=slot.placeholder_length + 1)),
        ],
    }
    for error_type, attempts in cases.items():
        for text, wanted in attempts:
            error = fails(store, text, wanted)
            assert (error.error_type, error.status) == (error_type, 400)
            assert not retry_in_full(error)


def test_missing_and_foreign_images_get_one_answer(store: AssetStore, tmp_path: Path, picture: Picture) -> None:
    neighbour = AssetStore(tmp_path / "assets", run="neighbour", retries=0)
    foreign = neighbour.put(picture(3))
    ref = store.put(picture(1))
    good = raw_reference(store, ref, QWEN3_VL)
    unknown = dataclasses.replace(good, hash="0" * 64, raw_image_id="0" * 64 + ".png")
    renamed = dataclasses.replace(good, hash=foreign.hash, raw_image_id=foreign.file_id)
    other_run = dataclasses.replace(good, run="neighbour", hash=foreign.hash, raw_image_id=foreign.file_id)
    messages = set()
    for attempt in (unknown, renamed, other_run):
        slot = dataclasses.replace(slot_of(ref), hash=attempt.hash)
        error = fails(store, str(attempt), slot)
        assert (error.error_type, error.status) == ("missing_mm_raw_image", 500)
        assert error.missing[0]["mm_hash"] == attempt.hash
        assert error.missing[0]["raw_image_id"] == attempt.raw_image_id
        messages.add(str(error).replace(attempt.hash, "H"))
    assert len(messages) == 1


def test_a_damaged_image_is_answered_by_what_is_wrong_with_it(store: AssetStore, picture: Picture) -> None:
    ref = store.put(picture(1))
    text = str(raw_reference(store, ref, QWEN3_VL))
    path = Path(path_of(store.url(ref)))
    path.write_bytes(picture(2))
    assert fails(store, text, slot_of(ref)).error_type == "raw_mm_hash_mismatch"
    path.symlink_to("/etc/passwd")
    assert fails(store, text, slot_of(ref)).error_type == "corrupt_mm_raw_image"


def feature(store: AssetStore, ref: ImageRef, fingerprint: str, kind: str = "penstock.patches") -> str:
    patches = reference_patches(decode_rgb(store.get(ref.hash)), QWEN3_VL)
    grid, tokens = describe(ref, QWEN3_VL)
    payload = pack_patches(patches, grid)
    features = FeatureStore(store, kind=kind)
    put = features.put(fingerprint=fingerprint, image=ref.hash, payload=payload, placeholder_length=tokens)
    return str(put)


def test_a_feature_reference_resolves_to_what_was_kept(store: AssetStore, picture: Picture) -> None:
    ref = store.put(picture(1))
    made_by = feature_fingerprint(QWEN3_VL, {"pillow": "12"})
    text = feature(store, ref, made_by)
    legacy = text.replace(f":{store.run}:", ":")
    for given in (text, legacy):
        got = resolve(given, store=store, layout=QWEN3_VL, slot=slot_of(ref), fingerprint=made_by)
        assert np.array_equal(got.patches, reference_patches(decode_rgb(picture(1)), QWEN3_VL))
        assert not got.patches.flags.writeable


def test_each_wrong_feature_has_its_own_answer(store: AssetStore, picture: Picture) -> None:
    ref = store.put(picture(1))
    made_by = feature_fingerprint(QWEN3_VL, {"pillow": "12"})
    text = feature(store, ref, made_by)
    slot = slot_of(ref)
    (name,) = [info.name for info in store.blobs.list("mm_features")]

    error = fails(store, text, slot, fingerprint="f" * 32)
    assert (error.error_type, error.status) == ("incompatible_mm_feature_artifact", 400)
    error = fails(store, text, dataclasses.replace(slot, placeholder_length=1), made_by)
    assert error.error_type == "incompatible_mm_feature_artifact"
    assert fails(store, text[:-1], slot, made_by).error_type == "invalid_mm_feature_ref"
    assert fails(store, text.replace("demo", "other"), slot, made_by).error_type == "missing_mm_feature_artifact"

    good = store.blobs.get(name, max_bytes=1 << 30)
    file = msgspec.msgpack.decode(good)
    damaged = {
        "cut": good[:-1],
        "garbage": b"\x90" * 100,
        "payload": msgspec.msgpack.encode({**file, "payload": file["payload"][:-1] + b"\x00\x01"}),
        "unknown field": msgspec.msgpack.encode({**file, "envelope": {**file["envelope"], "x": 1}}),
        "not utf-8": good.replace(b"image", b"\xff\xff\xff\xff\xff"),
    }
    for what, content in damaged.items():
        store.blobs.delete(name)
        store.blobs.put_if_absent(name, content)
        error = fails(store, text, slot, made_by)
        assert (error.error_type, error.status) == ("corrupt_mm_feature_artifact", 500), what
        assert retry_in_full(error)
    for field, value in {"kind": "other", "run_id": "x", "modality": "video", "mm_hash": "0" * 64}.items():
        store.blobs.delete(name)
        envelope = {**file["envelope"], field: value}
        store.blobs.put_if_absent(name, msgspec.msgpack.encode({**file, "envelope": envelope}))
        assert fails(store, text, slot, made_by).error_type == "incompatible_mm_feature_artifact"
    store.blobs.delete(name)
    error = fails(store, text, slot, made_by)
    assert (error.error_type, error.status) == ("missing_mm_feature_artifact", 500)
    assert retry_in_full(error)
    assert error.missing == ({"run_id": "demo", "modality": "image", "mm_hash": ref.hash, "fingerprint": made_by},)


def test_patch_payloads_that_do_not_add_up_are_refused() -> None:
    patches = np.arange(24, dtype=np.float32).reshape(4, 6)
    back, grid = unpack_patches(pack_patches(patches, (1, 2, 2)))
    assert np.array_equal(back, patches)
    assert grid == (1, 2, 2)
    for bad in (pack_patches(patches, (1, 2, 3)), b"", msgspec.msgpack.encode([[1, 1, 1], 1, 0, b""])):
        with pytest.raises(CorruptAsset):
            unpack_patches(bad)


def test_a_sweep_removes_features_by_last_use_and_never_an_image(store: AssetStore, picture: Picture) -> None:
    import os

    old, used, fresh = (store.put(picture(i)) for i in range(3))
    made_by = feature_fingerprint(QWEN3_VL, {})
    texts = [feature(store, ref, made_by) for ref in (old, used, fresh)]
    now = 2_000_000_000.0
    root = Path(path_of(store.blobs.url("mm_features")))
    for path in root.rglob("*.msgpack"):
        os.utime(path, (now - 1801, now - 1801))
    for image in store.list():
        os.utime(Path(path_of(store.blobs.url(image.name))), (1, 1))
    (used_path,) = root.rglob(f"{used.hash}.msgpack")
    resolve(texts[1], store=store, layout=QWEN3_VL, slot=slot_of(used), fingerprint=made_by)
    assert used_path.stat().st_mtime != now - 1801
    os.utime(used_path, (now - 1799, now - 1799))
    feature(store, fresh, made_by)
    (fresh_path,) = root.rglob(f"{fresh.hash}.msgpack")
    assert fresh_path.stat().st_mtime != now - 1801
    os.utime(fresh_path, (now - 1799, now - 1799))
    assert sweep(store, now=now) == 1
    assert {path.stem for path in root.rglob("*.msgpack")} == {used.hash, fresh.hash}
    assert len(list(store.list())) == 3
    assert sweep(store, now=now) == 0
    with pytest.raises(ConfigError):
        sweep(store, ttl_s=0)


def test_a_sweep_of_nothing_is_nothing(store: AssetStore) -> None:
    assert sweep(store) == 0


def test_only_features_and_cache_misses_are_worth_a_retry() -> None:
    assert retry_in_full(MissingAsset("x", error_type="missing_mm_cache_item"))
    assert not retry_in_full(MissingAsset("x", error_type="missing_mm_cache_item"), sent_hash_only=False)
    assert not retry_in_full(MissingAsset("x"))
    assert not retry_in_full(InvalidReference("x"))
    assert not retry_in_full(IncompatibleAsset("x"))
