"""Pictures to try things with: screenshots that are drawn, and images as they arrive in messages."""

from __future__ import annotations

import base64
import io
import random

import numpy as np


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
