"""Decode images to RGB, with the same pixels on every rank: upright, opaque on white, eight bits.

A model must see in training what it saw when sampling. So these rules apply, in this order:

1. The EXIF orientation is applied.
2. 16-bit greyscale keeps its high byte, as Pillow does for 16-bit colour.
3. Transparency of any kind is flattened onto white.
4. CMYK, palette and greyscale become RGB.
5. The first frame of an animation is taken. Colour profiles are ignored.
"""

from __future__ import annotations

import io
import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.assets.image_header import DEFAULT_LIMITS, Limits, probe
from penstock.errors import ConfigError, CorruptAsset
from penstock.extras import require

if TYPE_CHECKING:
    from PIL.Image import Image

_FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP", "image/gif": "GIF"}
# What Pillow's decoders raise on damaged files; anything else is a bug and should be seen.
_DAMAGED = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, struct.error, zlib.error)


def decode_rgb(data: bytes, limits: Limits = DEFAULT_LIMITS, *, where: str = "image") -> NDArray[np.uint8]:
    """Return [height, width, 3] pixels. Checks the header first, so nothing larger than the limits is allocated."""
    header = probe(data, limits, where=where)
    opened = _open(data, header.media_type, where)
    # Our parser and Pillow must agree on the size, or the limits were checked for another image.
    if opened.size != (header.width, header.height):
        raise CorruptAsset(f"{where}: {opened.size} decoded for {header.width} x {header.height} in the header")
    try:
        opened.load()
        rgb = _rgb(opened)
    except _DAMAGED as error:
        # Pillow's messages may name objects and addresses; the class is enough.
        raise CorruptAsset(f"{where}: does not decode ({type(error).__name__}); store the image again") from None
    return np.ascontiguousarray(_upright(rgb, header.orientation))


def _open(data: bytes, media_type: str, where: str) -> Image:
    require("decoding images", "PIL")
    from PIL import Image, ImageFile, WebPImagePlugin  # noqa: F401 - the plugin registers itself

    if ImageFile.LOAD_TRUNCATED_IMAGES:
        raise ConfigError("PIL.ImageFile.LOAD_TRUNCATED_IMAGES is on: damaged images would train as grey; turn it off")
    try:
        return Image.open(io.BytesIO(data), formats=(_FORMATS[media_type],))
    except (*_DAMAGED, Image.DecompressionBombError) as error:
        raise CorruptAsset(f"{where}: does not open ({type(error).__name__}); store the image again") from None


def _rgb(image: Image) -> NDArray[np.uint8]:
    if image.mode.startswith("I"):
        grey = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        from PIL import Image

        clear = image.convert("RGBA")
        white = Image.new("RGBA", clear.size, (255, 255, 255, 255))
        return np.asarray(Image.alpha_composite(white, clear).convert("RGB"))
    return np.asarray(image.convert("RGB"))


def _upright(rgb: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Undo the EXIF orientation: 2 to 4 mirror and rotate in place, 5 to 8 also swap the sides."""
    if orientation >= 5:
        rgb = rgb.swapaxes(0, 1)
    down, right = {2: (1, -1), 3: (-1, -1), 4: (-1, 1), 6: (1, -1), 7: (-1, -1), 8: (-1, 1)}.get(orientation, (1, 1))
    return rgb[::down, ::right]
