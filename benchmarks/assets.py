"""Images by reference against pixels in flight: bytes on each hop, and the memory of the process in the middle.

Eight rollouts of fifteen drawn 1280 x 720 screenshots go from an environment worker through an orchestrator,
a separate process that holds the batch, and on to a rank:

    worker --(hop 1: messages, tokens, images)--> orchestrator --(hop 2: samples, images)--> rank

Once the images are references of the store; once they are the patch rows a model takes (float32, as eager
designs ship them); and, for hop 1, once the original files in base64. The files themselves move once, into the
store and out of it, and that is reported too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

import msgspec
import numpy as np

from benchmarks import ROOT
from benchmarks.report import Row
from penstock.arrays import ImageSpan, Sample
from penstock.assets import QWEN3_VL, AssetStore, offload_messages, span
from penstock.assets.image_files import decode_rgb
from penstock.demo.processes import worker_environment
from penstock.frames import encode
from penstock.testing import as_data_uri, draw_screenshot
from penstock.train.materialize import Materializer

ROLLOUTS, SCREENSHOTS = 8, 15
_TEXT, _COMPLETION = 60, 120
_IMAGE_TOKEN = 151_655
Buffer: TypeAlias = bytes | memoryview


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """What hop 1 carries."""

    messages: list[Any]
    token_ids: bytes
    loss_mask: bytes
    logprobs: bytes
    images: list[ImageSpan]
    num_pixel_frames: int = 0
    """Frames of patch rows that follow, one per image; none when images are references."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    hop1_bytes: int
    hop2_bytes: int
    peak_mb: float
    """Of the orchestrator's resident memory."""


def run(*, full: bool, progress: Callable[[str], None] = lambda _: None) -> list[Row]:
    """The rows of `penstock bench assets`."""
    rollouts = ROLLOUTS * (4 if full else 1)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        store = AssetStore(Path(folder) / "assets", run="bench")
        progress(f"drawing {rollouts * SCREENSHOTS} screenshots")
        files = [[_screenshot(r, s) for s in range(SCREENSHOTS)] for r in range(rollouts)]
        progress("by reference")
        few = _orchestrate(_by_reference(files, store, 1))
        ours = _orchestrate(_by_reference(files, store, SCREENSHOTS))
        progress("shipping pixels")
        pixels_few = _orchestrate(_with_pixels(files[:ROLLOUTS], store, 1))
        pixels = _orchestrate(_with_pixels(files[:ROLLOUTS], store, SCREENSHOTS))
        base64 = sum(len(msgspec.msgpack.encode(_messages(shots))) for shots in files[:ROLLOUTS])
        progress("materializing on a rank")
        rank = _rank_rows(files[0], store)
    scale = rollouts / ROLLOUTS  # pixels are measured on eight rollouts, also in the long run
    stored = sum(len(data) for shots in files for data in shots)
    count = rollouts * SCREENSHOTS
    pixels_growth = (pixels.peak_mb - pixels_few.peak_mb) * scale
    return [
        _fewer("hop 1, worker to orchestrator", ours.hop1_bytes, pixels.hop1_bytes * scale, "pixels", target=50),
        _fewer("hop 2, orchestrator to rank", ours.hop2_bytes, pixels.hop2_bytes * scale, "pixels", target=50),
        _fewer("hop 1 against the files", ours.hop1_bytes, base64 * scale, "base64 files"),
        Row(
            name="orchestrator peak memory",
            ours=ours.peak_mb,
            rival=pixels.peak_mb,
            rival_name="pixels",
            ratio=pixels.peak_mb / ours.peak_mb,
            unit="MB",
        ),
        Row(
            name=f"its growth from {rollouts} to {count} images",
            ours=ours.peak_mb - few.peak_mb,
            rival=pixels_growth,
            rival_name="pixels",
            unit="MB",
            target=16.0,
            bound="max",
            note="tokens, masks and spans of the added turns; the images themselves add nothing",
        ),
        Row(
            name="files into the store, once",
            ours=stored,
            unit="B",
            note=f"{count} PNG files of {stored / count / 1e3:,.0f} kB; what moves instead of pixels, off the hops",
        ),
        *rank,
    ]


def _fewer(name: str, ours: float, rival: float, rival_name: str, *, target: float | None = None) -> Row:
    return Row(name=name, ours=ours, rival=rival, rival_name=rival_name, ratio=rival / ours, unit="B", target=target)


def _screenshot(rollout: int, shot: int) -> bytes:
    return draw_screenshot(seed=1000 * rollout + shot)


def _messages(shots: list[bytes]) -> list[Any]:
    messages: list[Any] = [{"role": "system", "content": "You operate a desktop."}]
    for shot in shots:
        part = {"type": "image_url", "image_url": {"url": as_data_uri(shot)}}
        messages.append({"role": "user", "content": [{"type": "text", "text": "What next?"}, part]})
        messages.append({"role": "assistant", "content": "click(412, 96)"})
    return messages


def _rollout(shots: list[bytes], store: AssetStore) -> Rollout:
    """What the worker sends: images leave the messages first."""
    messages, refs = offload_messages(_messages(shots), store)
    rng = np.random.default_rng(int(refs[0].hash[:8], 16))
    ids, masks, images, at = [], [], [], 0
    for ref in refs:
        placed = span(ref, QWEN3_VL, offset=at + _TEXT)
        text = rng.integers(0, _IMAGE_TOKEN, _TEXT + _COMPLETION, np.uint32)
        ids += [text[:_TEXT], np.full(placed.length, _IMAGE_TOKEN, np.uint32), text[_TEXT:]]
        masks.append(np.arange(_TEXT + placed.length + _COMPLETION) >= _TEXT + placed.length)
        images.append(placed)
        at = placed.end + _COMPLETION
    mask = np.concatenate(masks)
    return Rollout(
        messages=messages,
        token_ids=np.concatenate(ids).tobytes(),
        loss_mask=mask.tobytes(),
        logprobs=np.where(mask, -rng.exponential(0.5, len(mask)), 0).astype(np.float32).tobytes(),
        images=images,
    )


def _by_reference(files: list[list[bytes]], store: AssetStore, shots: int) -> Iterator[Buffer]:
    """The frames of hop 1."""
    for rollout in files:
        yield msgspec.msgpack.encode(_rollout(rollout[:shots], store))


def _with_pixels(files: list[list[bytes]], store: AssetStore, shots: int) -> Iterator[Buffer]:
    """The frames of hop 1, with the patch rows of each image behind its rollout."""
    for rollout in files:
        sent = _rollout(rollout[:shots], store)
        yield msgspec.msgpack.encode(msgspec.structs.replace(sent, num_pixel_frames=len(sent.images)))
        for image, data in zip(sent.images, rollout, strict=False):
            rows = np.empty((image.num_patches, QWEN3_VL.row_size), np.float32)
            QWEN3_VL.fill(QWEN3_VL.prepare(decode_rgb(data)), rows)
            yield rows.data.cast("B")


def _orchestrate(frames: Iterator[Buffer]) -> Measured:
    """Send the frames to an orchestrator process and ask what it took."""
    command = [sys.executable, "-m", "benchmarks.assets"]
    environment = worker_environment({"PATH": "", "PYTHONPATH": ":".join(filter(None, sys.path))})
    sent = 0
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for frame in frames:
            process.stdin.write(len(frame).to_bytes(8))
            process.stdin.write(frame)
            sent += len(frame)
        process.stdin.close()
        answer = json.loads(process.stdout.read())
    return Measured(hop1_bytes=sent, hop2_bytes=answer["hop2_bytes"], peak_mb=answer["peak_kb"] / 1024)


def _rank_rows(shots: list[bytes], store: AssetStore) -> list[Row]:
    images = _rollout(shots, store).images
    lengths = [images[-1].end + _COMPLETION]
    with Materializer(store, QWEN3_VL) as materializer:
        began = time.perf_counter()
        cold = materializer.materialize(images, lengths).metrics
        middle = time.perf_counter()
        materializer.materialize(images, lengths)
        warm_s = time.perf_counter() - middle
    cold_s = middle - began
    note = f"{cold.slots} screenshots, {cold.bytes_out / 1e6:,.0f} MB of patches from {cold.bytes_read / 1e6:.1f} MB"
    return [
        Row(name="materialize a screenshot, first time", ours=cold_s / len(images) * 1e3, unit="ms", note=note),
        Row(name="materialize a screenshot, cached", ours=warm_s / len(images) * 1e3, unit="ms"),
    ]


def _be_the_orchestrator(source: IO[bytes]) -> dict[str, int]:
    """Receive rollouts, hold the batch, encode it for the ranks; returns bytes sent on and peak memory."""
    samples: list[Sample] = []
    pixels: list[bytes] = []
    while head := source.read(8):
        rollout = msgspec.msgpack.decode(source.read(int.from_bytes(head)), type=Rollout)
        samples.append(_sample(rollout))
        pixels += [source.read(int.from_bytes(source.read(8))) for _ in range(rollout.num_pixel_frames)]
    return {"hop2_bytes": len(encode(samples)) + sum(map(len, pixels)), "peak_kb": _peak_kb()}


def _sample(rollout: Rollout) -> Sample:
    ids = np.frombuffer(rollout.token_ids, np.uint32)
    return Sample(
        token_ids=ids,
        loss_mask=np.frombuffer(rollout.loss_mask, np.bool_),
        logprobs=np.frombuffer(rollout.logprobs, np.float32),
        mm_token_type_ids=(ids == _IMAGE_TOKEN).astype(np.uint8),
        images=rollout.images,
    )


def _peak_kb() -> int:
    """Peak resident memory of this process. Not ru_maxrss: across exec it keeps the peak of the parent that forked."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    raise AssertionError("no VmHWM in /proc/self/status")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_be_the_orchestrator(sys.stdin.buffer)))
