"""Load the pixels of a micro-batch on the rank that trains on it. Each image is decoded once.

    spans of a row -> unique hashes -> read, verify, decode, resize (threads, cached) -> one [rows, size] array

The cache holds resized images as bytes, an eighth of the size of their patches. Floats exist only in the returned
array, so dropping it frees them. Grids are compared with their descriptors before anything is written, so a wrong
number of patches never reaches a model.

A policy decides about samples with an unreadable image: fail the step, or mask the loss of that sample. It never masks
the entire row and never continues silently, because training on blank images hides lost data.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import ImageSpan
from penstock.assets import AssetStore, Processor, decode_rgb
from penstock.errors import (
    AssetError,
    ConfigError,
    CorruptAsset,
    ImageRefused,
    IncompatibleAsset,
    InvalidInput,
    MissingAsset,
)
from penstock.train.tensors import checked_lengths

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class ByteCache(Generic[Key, Value]):
    """Values by key, at most `max_bytes` in total. 0 caches nothing.

    >>> cache = ByteCache(max_bytes=10, size_of=len)
    >>> cache.get("a", lambda: b"12345678"), cache.get("a", lambda: b"never made"), cache.hits
    (b'12345678', b'12345678', 1)
    """

    def __init__(self, *, max_bytes: int, size_of: Callable[[Value], int]) -> None:
        if max_bytes < 0:
            raise ConfigError(f"cache of {max_bytes} bytes: must be 0 or more")
        self._max_bytes = max_bytes
        self._size_of = size_of
        self._lock = threading.Lock()
        self._kept: OrderedDict[Key, Value] = OrderedDict()
        self._making: dict[Key, Future[Value]] = {}
        self.num_bytes = 0
        """Bytes held now."""
        self.hits = 0
        """Requests that computed nothing: the value was cached, or another thread was computing it."""

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """Return the value of `key`. The first caller computes it with `make`."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                self.hits += 1
                return self._kept[key]
            making = self._making.get(key)
            if making is None:
                mine = self._making[key] = Future()
            else:
                self.hits += 1
        if making is not None:
            return making.result()  # outside the lock: other keys must not wait for this one
        return self._make(key, make, mine)

    def clear(self) -> None:
        """Drop all values."""
        with self._lock:
            self._kept.clear()
            self.num_bytes = 0

    def _make(self, key: Key, make: Callable[[], Value], mine: Future[Value]) -> Value:
        try:
            value = make()
        except BaseException as error:
            with self._lock:
                del self._making[key]
            mine.set_exception(error)
            raise
        with self._lock:
            del self._making[key]
            self._keep(key, value)
        mine.set_result(value)
        return value

    def _keep(self, key: Key, value: Value) -> None:
        size = self._size_of(value)
        if size > self._max_bytes:
            return
        self._kept[key] = value
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self.num_bytes -= self._size_of(dropped)


class Policy(Protocol):
    """Decides about samples whose images are missing, truncated or have the wrong hash."""

    def judge(self, num_samples: int, broken: Mapping[int, AssetError]) -> tuple[int, ...]:
        """Return the samples to mask, or raise. `broken` are the affected ones of `num_samples` with images."""


class Fail:
    """Raise for any unreadable image. The default."""

    def judge(self, num_samples: int, broken: Mapping[int, AssetError]) -> tuple[int, ...]:  # noqa: ARG002 - the protocol's
        for error in broken.values():
            raise error
        return ()


class MaskSample:
    """Mask the loss of the affected samples, as long as they are few.

    >>> policy = MaskSample(max_fraction=0.01)
    >>> policy.judge(50, {3: AssetError("image gone")}), policy.masked, policy.seen
    ((3,), 1, 50)
    """

    def __init__(self, *, max_fraction: float, over: int = 100) -> None:
        """Allow at most `max_fraction` of all samples with images so far, counted as if at least `over` were seen.

        Without `over`, one bad image among the first ten samples would exceed any reasonable fraction.
        """
        if not 0 < max_fraction < 1 or over < 1 or max_fraction * over < 1:
            raise ConfigError(
                f"max_fraction {max_fraction} over {over} samples: the fraction must be between 0 and 1 and allow one"
            )
        self._max_fraction = max_fraction
        self._over = over
        self._lock = threading.Lock()
        self.seen = 0
        """Samples with images so far."""
        self.masked = 0
        """Masked samples so far."""

    def judge(self, num_samples: int, broken: Mapping[int, AssetError]) -> tuple[int, ...]:
        with self._lock:
            self.seen += num_samples
            self.masked += len(broken)
            seen, masked = self.seen, self.masked
        if broken and masked > self._max_fraction * max(seen, self._over):
            first = next(iter(broken.values()))
            raise type(first)(
                f"{masked} of {seen} samples with images have unreadable ones; the limit is a fraction of "
                f"{self._max_fraction:g} over at least {self._over} samples. The last error: {first}",
                error_type=first.error_type,
                missing=first.missing,
            ) from first
        return tuple(sorted(broken))


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Counts of one call. `sum_metrics` adds up a step."""

    unique_images: int = 0
    slots: int = 0
    """Positions images were written to. The same image twice counts twice."""
    placeholders: int = 0
    """Slots filled with zeros because their image could not be read."""
    masked_samples: int = 0
    cache_hits: int = 0
    """Unique images found in the cache."""
    bytes_read: int = 0
    """Bytes of image files."""
    bytes_out: int = 0
    """Bytes of the returned array."""
    decode_s: float = 0.0
    """Seconds of reading, decoding and resizing, summed over threads."""
    wall_s: float = 0.0
    """Seconds that the caller waited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Materialized:
    """The pixel input of one forward pass."""

    pixel_values: NDArray[np.float32]
    """[sum of t * h * w, row_size] in the order of the spans."""
    image_grid_thw: NDArray[np.int64]
    """[images, 3]"""
    masked: tuple[int, ...]
    """Segments with an unreadable image. Remove them from the loss with `mask_segments`."""
    metrics: Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    prepared: Any
    bytes_read: int
    seconds: float


class Materializer:
    """Turns the image spans of a row into patch rows. Keep one per rank. Thread-safe.

    >>> import tempfile
    >>> from penstock.assets import QWEN3_VL, AssetStore, span
    >>> from penstock.testing import draw_screenshot
    >>> store = AssetStore(tempfile.mkdtemp())
    >>> image = span(store.put(draw_screenshot(seed=1, width=320, height=320)), QWEN3_VL, offset=1)
    >>> with Materializer(store, QWEN3_VL) as materializer:
    ...     pixels = materializer.materialize([image], [image.length + 2])
    >>> pixels.pixel_values.shape, pixels.image_grid_thw.tolist()
    ((400, 1536), [[1, 20, 20]])
    """

    def __init__(
        self,
        store: AssetStore,
        processor: Processor,
        *,
        policy: Policy | None = None,
        workers: int = 4,
        cache_bytes: int = 512 << 20,
    ) -> None:
        if workers < 1:
            raise ConfigError(f"workers {workers}: must be at least 1")
        self._store = store
        self._processor = processor
        self._policy = Fail() if policy is None else policy
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="penstock-pixels")
        self._cache: ByteCache[str, Any] = ByteCache(max_bytes=cache_bytes, size_of=lambda made: int(made.nbytes))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the threads and drop cached images."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._cache.clear()

    def materialize(
        self, images: Sequence[ImageSpan], sequence_lengths: Sequence[int] | NDArray[np.integer]
    ) -> Materialized:
        """Return the patch rows of a row's images. Spans are in the row's token space, as in a micro-batch."""
        began = time.perf_counter()
        loaded, broken = self._load_all({image.hash for image in images})
        segments = _segments(images, sequence_lengths)
        errors = {s: broken[i.hash] for s, i in zip(segments, images, strict=True) if i.hash in broken}
        masked = self._policy.judge(len(set(segments)), errors)
        pixels = self._fill(images, loaded)
        metrics = Metrics(
            unique_images=len(loaded) + len(broken),
            slots=len(images),
            placeholders=sum(image.hash in broken for image in images),
            masked_samples=len(masked),
            cache_hits=sum(item.bytes_read == 0 for item in loaded.values()),
            bytes_read=sum(item.bytes_read for item in loaded.values()),
            bytes_out=pixels.nbytes,
            decode_s=sum(item.seconds for item in loaded.values()),
            wall_s=time.perf_counter() - began,
        )
        grids = np.array([image.grid for image in images], np.int64).reshape(-1, 3)
        return Materialized(pixel_values=pixels, image_grid_thw=grids, masked=masked, metrics=metrics)

    def _load_all(self, hashes: Iterable[str]) -> tuple[dict[str, _Loaded], dict[str, AssetError]]:
        """Load images in parallel. Returns those loaded and the errors of the rest; other errors are raised."""
        jobs = {image: self._pool.submit(self._load, image) for image in sorted(hashes)}
        loaded: dict[str, _Loaded] = {}
        broken: dict[str, AssetError] = {}
        try:
            for image, job in jobs.items():
                try:
                    loaded[image] = job.result()
                except (MissingAsset, CorruptAsset) as error:
                    broken[image] = error
        finally:
            for job in jobs.values():
                job.cancel()
        return loaded, broken

    def _load(self, image: str) -> _Loaded:
        began = time.perf_counter()
        read = 0

        def make() -> Any:
            nonlocal read
            data = self._store.get(image)
            read = len(data)
            try:
                return self._processor.prepare(decode_rgb(data, self._store.limits, where=f"image {image}"))
            except ImageRefused as error:  # it was stored under other limits than this reader's
                raise CorruptAsset(str(error)) from None

        prepared = self._cache.get(image, make)
        return _Loaded(prepared=prepared, bytes_read=read, seconds=time.perf_counter() - began if read else 0.0)

    def _fill(self, images: Sequence[ImageSpan], loaded: Mapping[str, _Loaded]) -> NDArray[np.float32]:
        for i, image in enumerate(images):
            found = self._processor.grid_of(loaded[image.hash].prepared) if image.hash in loaded else image.grid
            if found != image.grid or image.num_patches != image.length * image.merge**2:
                raise IncompatibleAsset(
                    f"images[{i}] ({image.hash}): grid {image.grid} and {image.length} tokens in the descriptor, "
                    f"grid {found} by this rank's processor; use the same layout on both sides",
                    error_type="raw_mm_grid_mismatch",
                )
        pixels = np.empty((sum(image.num_patches for image in images), self._processor.row_size), np.float32)
        start = 0
        for image in images:
            rows = pixels[start : start + image.num_patches]
            if image.hash in loaded:
                self._processor.fill(loaded[image.hash].prepared, rows)
            else:
                rows[:] = 0
            start += image.num_patches
        return pixels


def _segments(images: Sequence[ImageSpan], sequence_lengths: Sequence[int] | NDArray[np.integer]) -> list[int]:
    """Return the segment of each image."""
    ends = np.cumsum(checked_lengths(sequence_lengths))
    total = int(ends[-1]) if len(ends) else 0
    if images and max(image.end for image in images) > total:
        raise InvalidInput(
            f"images end at token {max(i.end for i in images)} of a row of {total}; pass the lengths of this row"
        )
    # Ends [3, 7], offsets [0, 2, 3]: segments [0, 0, 1]. side="right", because offset 3 begins the second segment.
    found: list[int] = np.searchsorted(ends, [image.offset for image in images], side="right").tolist()
    return found


def mask_segments(
    loss_mask: NDArray[np.bool_], sequence_lengths: Sequence[int] | NDArray[np.integer], masked: Sequence[int]
) -> NDArray[np.bool_]:
    """Return a copy of the loss mask with the masked segments off.

    >>> mask_segments(np.ones(5, np.bool_), [2, 3], [1]).tolist()
    [True, True, False, False, False]
    """
    out, lengths = loss_mask.copy(), checked_lengths(sequence_lengths, len(loss_mask))
    ends = np.cumsum(lengths)
    for segment in masked:
        out[int(ends[segment] - lengths[segment]) : int(ends[segment])] = False
    return out


def check_image_tokens(token_ids: NDArray[np.integer], image_token_id: int, pixels: Materialized, merge: int) -> None:
    """Raise unless the row has exactly one image token per merged patch. Call it before the forward pass."""
    tokens = int(np.count_nonzero(token_ids == image_token_id))
    features = len(pixels.pixel_values) // merge**2
    if tokens != features:
        raise InvalidInput(
            f"image token {image_token_id}: {tokens} in the row for {features} image features "
            f"(pixel_values {pixels.pixel_values.shape}, {len(pixels.image_grid_thw)} images, merge {merge}); "
            "the sampler emitted a placeholder or used another layout: drop the sample or align the layouts"
        )


def sum_metrics(parts: Iterable[Metrics]) -> Metrics:
    """Add up the metrics of a step."""
    items = list(parts)
    fields = [field.name for field in dataclasses.fields(Metrics)]
    return Metrics(**{name: sum(getattr(item, name) for item in items) for name in fields})
