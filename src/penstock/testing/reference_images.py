"""Plain references for images, short enough to check by eye, and images to run them on."""

from __future__ import annotations

import base64
import io
import math
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.arrays import ImageSpan
from penstock.assets import Layout


def draw_screenshot(*, seed: int, width: int = 1280, height: int = 720) -> bytes:
    """Draw a PNG that looks like a desktop: windows, bars of text, a noisy picture."""
    from PIL import Image, ImageDraw

    rng = random.Random(seed)  # noqa: S311 - a picture, not a secret
    image = Image.new("RGB", (width, height), tuple(rng.randrange(256) for _ in range(3)))
    draw = ImageDraw.Draw(image)
    for _ in range(6):
        x, y = rng.randrange(width), rng.randrange(height)
        w, h = rng.randrange(20, 21 + width // 2), rng.randrange(20, 21 + height // 2)
        draw.rectangle((x, y, x + w, y + h), fill=tuple(rng.randrange(256) for _ in range(3)), outline=(0, 0, 0))
        for line in range(y + 8, y + h - 8, 14):
            draw.text((x + 6, line), f"{rng.getrandbits(160):x}"[: max(1, w // 7)], fill=(10, 10, 10))
    # Noise like a photograph: images of flat colour alone would make every compressor look good.
    noise = np.random.default_rng(seed).integers(0, 256, (max(1, height // 4), max(1, width // 4), 3), np.uint8)
    image.paste(Image.fromarray(noise), (width // 2, height // 2))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def as_data_uri(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def reference_patches(rgb: NDArray[np.uint8], layout: Layout) -> NDArray[np.float32]:
    """Resize, scale, normalise and cut one patch at a time."""
    from PIL import Image

    width, height = reference_fit(rgb.shape[1], rgb.shape[0], layout)
    resized = np.asarray(Image.fromarray(rgb).resize((width, height), Image.Resampling.BICUBIC))
    scaled = (resized.astype(np.float64) * (1 / 255)).astype(np.float32)
    normal = (scaled - np.array(layout.mean, np.float32)) / np.array(layout.std, np.float32)
    p, m = layout.patch, layout.merge
    rows = []
    for block_y in range(height // (p * m)):
        for block_x in range(width // (p * m)):
            for y in range(block_y * m, block_y * m + m):
                for x in range(block_x * m, block_x * m + m):
                    patch = normal[y * p : (y + 1) * p, x * p : (x + 1) * p].transpose(2, 0, 1)
                    rows.append(np.stack([patch] * layout.temporal_patch, axis=1).reshape(-1))
    return np.stack(rows)


def reference_fit(width: int, height: int, layout: Layout) -> tuple[int, int]:
    """Return the size in pixels that an image is resized to."""
    factor = layout.patch * layout.merge
    w, h = round(width / factor) * factor, round(height / factor) * factor
    if w * h > layout.max_pixels:
        beta = math.sqrt(height * width / layout.max_pixels)
        w, h = (max(factor, math.floor(side / beta / factor) * factor) for side in (width, height))
    elif w * h < layout.min_pixels:
        beta = math.sqrt(layout.min_pixels / (height * width))
        w, h = (math.ceil(side * beta / factor) * factor for side in (width, height))
    return w, h


def reference_positions(num_tokens: int, spans: Sequence[ImageSpan]) -> list[list[int]]:
    """Return time, height and width position of every token, one token at a time."""
    axes: list[list[int]] = [[], [], []]
    at = {span.offset: span for span in spans}
    token = current = 0
    while token < num_tokens:
        span = at.get(token)
        if span is None:
            for axis in axes:
                axis.append(current)
            token, current = token + 1, current + 1
            continue
        frames, h, w = span.grid[0], span.grid[1] // span.merge, span.grid[2] // span.merge
        for f in range(frames):
            for y in range(h):
                for x in range(w):
                    for axis, step in zip(axes, (f, y, x), strict=True):
                        axis.append(current + step)
        token += span.length
        current += max(span.grid[1], span.grid[2]) // span.merge
    return axes


def reference_delta(before: Sequence[str], after: Sequence[str]) -> Counter[str] | None:
    """Return the multiset of images a step adds, or None if it does not show all earlier ones."""
    held, shown = Counter(before), Counter(after)
    return None if held - shown else shown - held
