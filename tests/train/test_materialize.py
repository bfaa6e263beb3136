"""Pixels on the rank: the right ones, each decoded once, and a bad image costs its own sample only."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.arrays import ImageSpan
from penstock.assets import QWEN2_5_VL, QWEN3_VL, AssetStore, FromCallable, Layout, Limits, span
from penstock.assets.image_files import decode_rgb
from penstock.assets.sources import path_of
from penstock.errors import AssetError, ConfigError, CorruptAsset, IncompatibleAsset, InvalidInput, MissingAsset
from penstock.testing import draw_screenshot
from penstock.train.materialize import Fail, MaskSample, Materializer, check_image_tokens, mask_segments, sum_metrics
from tests.support.reference import reference_patches

LAYOUT = Layout(
    family="small", patch=4, min_pixels=16 * 16, max_pixels=96 * 96, mean=(0.5, 0.4, 0.3), std=(0.5, 0.25, 0.2)
)


@pytest.fixture
def store(tmp_path: Path) -> AssetStore:
    return AssetStore(tmp_path / "assets", retries=0)


def picture(seed: int) -> bytes:
    return draw_screenshot(seed=seed, width=40 + 7 * seed, height=50)


def row(store: AssetStore, segments: list[list[int]]) -> tuple[list[ImageSpan], list[int]]:
    """Segments of one text token before and after each image, images given by seed."""
    spans, lengths, at = [], [], 0
    for seeds in segments:
        start = at
        at += 1
        for seed in seeds:
            placed = span(store.put(picture(seed)), LAYOUT, offset=at)
            spans.append(placed)
            at = placed.end + 1
        lengths.append(at - start)
    return spans, lengths


def eager(spans: list[ImageSpan], store: AssetStore, layout: Layout = LAYOUT) -> NDArray[np.float32]:
    return np.concatenate([reference_patches(decode_rgb(store.get(s.hash)), layout) for s in spans])


def test_pixels_equal_the_eager_path_bit_for_bit(store: AssetStore) -> None:
    spans, lengths = row(store, [[1, 2], [3], [], [2, 2, 4]])
    with Materializer(store, LAYOUT) as materializer:
        got = materializer.materialize(spans, lengths)
    assert got.pixel_values.tobytes() == eager(spans, store).tobytes()
    assert got.pixel_values.flags.c_contiguous
    assert got.image_grid_thw.tolist() == [list(s.grid) for s in spans]
    assert got.masked == ()


@pytest.mark.parametrize("layout", [QWEN2_5_VL, QWEN3_VL], ids=lambda layout: layout.family)
def test_a_screenshot_in_a_real_layout_equals_the_eager_path(layout: Layout, store: AssetStore) -> None:
    ref = store.put(draw_screenshot(seed=1, width=640, height=360))
    placed = span(ref, layout, offset=0)
    with Materializer(store, layout) as materializer:
        got = materializer.materialize([placed], [placed.length])
    assert got.pixel_values.tobytes() == eager([placed], store, layout).tobytes()


def test_each_image_is_decoded_once_and_fills_all_its_slots(store: AssetStore) -> None:
    calls: list[int] = []

    def process(rgb: NDArray[np.uint8]) -> tuple[NDArray[np.float32], tuple[int, int, int]]:
        calls.append(1)
        return reference_patches(rgb, LAYOUT), LAYOUT.grid(rgb.shape[1], rgb.shape[0])

    spans, lengths = row(store, [[1, 2, 1], [1], [2, 3]])
    with Materializer(store, FromCallable(function=process, row_size=LAYOUT.row_size)) as materializer:
        first = materializer.materialize(spans, lengths)
        second = materializer.materialize(spans, lengths)
    assert len(calls) == 3
    assert first.pixel_values.tobytes() == second.pixel_values.tobytes() == eager(spans, store).tobytes()
    assert (first.metrics.unique_images, first.metrics.slots, first.metrics.cache_hits) == (3, 6, 0)
    assert first.metrics.bytes_read == sum(len(picture(i)) for i in (1, 2, 3))
    assert first.metrics.bytes_out == first.pixel_values.nbytes
    assert first.metrics.decode_s > 0
    assert (second.metrics.cache_hits, second.metrics.bytes_read) == (3, 0)
    total = sum_metrics([first.metrics, second.metrics])
    assert (total.slots, total.cache_hits, total.unique_images) == (12, 3, 6)


def test_callers_on_many_threads_share_the_work(store: AssetStore) -> None:
    spans, lengths = row(store, [[1, 2, 3, 4]])
    with Materializer(store, LAYOUT, workers=2) as materializer, ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda _: materializer.materialize(spans, lengths), range(12)))
    assert sum(r.metrics.unique_images - r.metrics.cache_hits for r in results) == 4
    assert len({r.pixel_values.tobytes() for r in results}) == 1


def test_a_row_without_images_has_no_pixels(store: AssetStore) -> None:
    with Materializer(store, LAYOUT) as materializer:
        got = materializer.materialize([], [5, 3])
    assert got.pixel_values.shape == (0, LAYOUT.row_size)
    assert got.image_grid_thw.shape == (0, 3)


def test_nothing_but_the_bounded_cache_keeps_pixels_alive(store: AssetStore) -> None:
    spans, lengths = row(store, [[1, 2, 3]])
    with Materializer(store, LAYOUT, cache_bytes=5000) as materializer:
        got = materializer.materialize(spans, lengths)
        alive = weakref.ref(got.pixel_values)
        del got
        gc.collect()
        assert alive() is None
        assert materializer._cache.num_bytes <= 5000
    assert materializer._cache.num_bytes == 0


def damage(store: AssetStore, image: ImageSpan, how: str) -> None:
    (name,) = [info.name for info in store.list() if image.hash in info.name]
    path = Path(path_of(store.blobs.url(name)))
    if how == "missing":
        path.unlink()
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-20])
    elif how == "other":
        path.write_bytes(picture(9))
    else:
        path.unlink()
        path.symlink_to("/etc/passwd")


DAMAGES = ["missing", "cut", "other", "link"]


@pytest.mark.parametrize("how", DAMAGES)
def test_an_unreadable_image_is_an_error_by_default(how: str, store: AssetStore) -> None:
    spans, lengths = row(store, [[1], [2]])
    damage(store, spans[1], how)
    with Materializer(store, LAYOUT) as materializer, pytest.raises((MissingAsset, CorruptAsset), match=spans[1].hash):
        materializer.materialize(spans, lengths)


@pytest.mark.parametrize("how", DAMAGES)
def test_a_masking_policy_costs_the_affected_sample_only(how: str, store: AssetStore) -> None:
    spans, lengths = row(store, [[1, 2], [3, 4], [1], [3]])
    damage(store, spans[2], how)
    with Materializer(store, LAYOUT, policy=MaskSample(max_fraction=0.02)) as materializer:
        got = materializer.materialize(spans, lengths)
    assert got.masked == (1, 3)
    assert (got.metrics.placeholders, got.metrics.masked_samples) == (2, 2)
    mask = mask_segments(np.ones(sum(lengths), np.bool_), lengths, got.masked)
    assert [mask[a:b].all() for a, b in _edges(lengths)] == [True, False, True, False]
    assert [mask[a:b].any() for a, b in _edges(lengths)] == [True, False, True, False]
    rows = np.cumsum([0, *(s.num_patches for s in spans)])
    for i, placed in enumerate(spans):
        part = got.pixel_values[rows[i] : rows[i + 1]]
        if i in (2, 5):
            assert not part.any()
        else:
            assert part.tobytes() == eager([placed], store).tobytes()


def _edges(lengths: list[int]) -> list[tuple[int, int]]:
    ends = np.cumsum(lengths).tolist()
    return [(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def test_too_many_masked_samples_are_an_error(store: AssetStore) -> None:
    spans, lengths = row(store, [[1], [2], [3]])
    for placed in spans[:2]:
        damage(store, placed, "missing")
    policy = MaskSample(max_fraction=0.01)
    with Materializer(store, LAYOUT, policy=policy) as materializer:
        assert materializer.materialize([spans[0]], lengths).masked == (0,)
        with pytest.raises(MissingAsset, match="2 of 2 samples"):
            materializer.materialize([spans[1]], lengths)
    assert (policy.seen, policy.masked) == (2, 2)
    policy = MaskSample(max_fraction=0.01)
    policy.judge(199, {})
    assert policy.judge(1, {0: AssetError("a")}) == (0,)
    assert policy.judge(1, {0: AssetError("b")}) == (0,)
    with pytest.raises(AssetError, match="3 of 202"):
        policy.judge(1, {0: AssetError("c")})


@pytest.mark.parametrize("options", [{"max_fraction": 0.0}, {"max_fraction": 1.0}, {"max_fraction": 0.001}])
def test_a_masking_limit_that_means_nothing_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="max_fraction"):
        MaskSample(**options)  # type: ignore[arg-type]


def test_another_layout_on_the_rank_is_an_error_under_every_policy(store: AssetStore) -> None:
    spans, lengths = row(store, [[1]])
    for policy in (Fail(), MaskSample(max_fraction=0.5)):
        with (
            Materializer(store, QWEN3_VL, policy=policy) as materializer,
            pytest.raises(IncompatibleAsset, match="use the same layout on both sides") as caught,
        ):
            materializer.materialize(spans, lengths)
        assert caught.value.error_type == "raw_mm_grid_mismatch"


def test_a_descriptor_that_does_not_add_up_is_an_error(store: AssetStore) -> None:
    spans, lengths = row(store, [[1]])
    wrong = msgspec.structs.replace(spans[0], length=spans[0].length - 1)
    with Materializer(store, LAYOUT) as materializer:
        with pytest.raises(IncompatibleAsset):
            materializer.materialize([wrong], lengths)
        with pytest.raises(InvalidInput, match="of a row of 3"):
            materializer.materialize(spans, [3])
    with pytest.raises(ConfigError, match="workers"):
        Materializer(store, LAYOUT, workers=0)


def test_a_processor_that_returns_another_number_of_rows_is_an_error(store: AssetStore) -> None:
    def short(rgb: NDArray[np.uint8]) -> tuple[NDArray[np.float32], Any]:
        return reference_patches(rgb, LAYOUT)[:-1], LAYOUT.grid(rgb.shape[1], rgb.shape[0])

    spans, lengths = row(store, [[1]])
    processor = FromCallable(function=short, row_size=LAYOUT.row_size)
    with Materializer(store, processor) as materializer, pytest.raises(IncompatibleAsset, match="patch rows"):
        materializer.materialize(spans, lengths)


def test_an_error_of_the_processor_itself_is_not_swallowed(store: AssetStore) -> None:
    def broken(rgb: NDArray[np.uint8]) -> tuple[NDArray[np.float32], Any]:
        raise ZeroDivisionError

    spans, lengths = row(store, [[1], [2]])
    processor = FromCallable(function=broken, row_size=LAYOUT.row_size)
    policy = MaskSample(max_fraction=0.5)
    with Materializer(store, processor, policy=policy) as materializer, pytest.raises(ZeroDivisionError):
        materializer.materialize(spans, lengths)


def test_an_image_beyond_this_readers_limits_is_unreadable(store: AssetStore, tmp_path: Path) -> None:
    spans, lengths = row(store, [[1]])
    strict = AssetStore(tmp_path / "assets", limits=Limits(max_side=20), retries=0)
    with Materializer(strict, LAYOUT) as materializer, pytest.raises(CorruptAsset, match="pixels; must be"):
        materializer.materialize(spans, lengths)


def test_image_tokens_and_features_are_counted_against_each_other(store: AssetStore) -> None:
    spans, lengths = row(store, [[1]])
    with Materializer(store, LAYOUT) as materializer:
        got = materializer.materialize(spans, lengths)
    ids = np.zeros(sum(lengths), np.uint32)
    ids[spans[0].offset : spans[0].end] = 151655
    check_image_tokens(ids, 151655, got, merge=2)
    ids[-1] = 151655  # a placeholder the model sampled
    with pytest.raises(InvalidInput, match=rf"{spans[0].length + 1} in the row for {spans[0].length} image features"):
        check_image_tokens(ids, 151655, got, merge=2)


def test_a_processor_that_returns_bfloat16_tensors_is_taken() -> None:
    torch = pytest.importorskip("torch")
    processor = FromCallable(function=lambda _: (torch.full((4, 2), 0.5, dtype=torch.bfloat16), (1, 2, 2)), row_size=2)
    out = np.zeros((4, 2), np.float32)
    processor.fill(processor.prepare(np.zeros((2, 2, 3), np.uint8)), out)
    assert (out == 0.5).all()


def test_a_processor_that_returns_no_numbers_is_our_error() -> None:
    processor = FromCallable(function=lambda _: ([["x"]], (1, 1, 1)), row_size=1)  # type: ignore[arg-type,return-value]
    with pytest.raises(IncompatibleAsset, match=r"list of patch rows, grid .*; return numbers"):
        processor.prepare(np.zeros((2, 2, 3), np.uint8))
