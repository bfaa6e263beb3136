"""One image is the same pixels on every rank, whatever its mode; Pillow itself is asked for the expected ones."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps

from penstock.assets.image_files import decode_rgb
from penstock.errors import ConfigError, CorruptAsset


def save(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def gradient(width: int = 24, height: int = 16) -> Image.Image:
    y, x = np.mgrid[:height, :width].astype(np.uint8)
    return Image.fromarray(np.stack([x * 9, y * 13, x * 5 + y * 3], axis=2))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_as_pillow_does(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = save(gradient(), kind, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert np.array_equal(decode_rgb(data), np.asarray(upright.convert("RGB")))


def test_transparency_is_flattened_onto_white() -> None:
    clear = gradient().convert("RGBA")
    clear.putalpha(Image.fromarray(np.linspace(0, 255, 24 * 16).astype(np.uint8).reshape(16, 24)))
    white = Image.new("RGBA", clear.size, "white")
    expected = np.asarray(Image.alpha_composite(white, clear).convert("RGB"))
    assert np.array_equal(decode_rgb(save(clear, "PNG")), expected)
    assert np.array_equal(decode_rgb(save(clear, "WEBP", lossless=True, exact=True)), expected)


def test_a_palette_with_a_clear_colour_is_flattened_onto_white() -> None:
    image = Image.new("P", (4, 2), 0)
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.putpixel((3, 1), 1)
    rgb = decode_rgb(save(image, "PNG", transparency=0))
    assert rgb[0, 0].tolist() == [255, 255, 255]
    assert rgb[1, 3].tolist() == [0, 255, 0]
    assert decode_rgb(save(image, "GIF", transparency=0))[0, 0].tolist() == [255, 255, 255]


def test_sixteen_bit_grey_keeps_its_high_byte() -> None:
    values = np.array([[0, 255, 256, 0x1234, 0x8000, 0xFFFF]], np.uint16)
    rgb = decode_rgb(save(Image.fromarray(values), "PNG"))
    assert rgb[0, :, 0].tolist() == [0, 0, 1, 0x12, 0x80, 0xFF]
    assert (rgb == rgb[:, :, :1]).all()


def test_cmyk_grey_and_two_colour_images_become_rgb() -> None:
    cmyk = save(gradient().convert("CMYK"), "JPEG", quality=95)
    assert np.array_equal(decode_rgb(cmyk), np.asarray(Image.open(io.BytesIO(cmyk)).convert("RGB")))
    for mode in ("L", "1", "LA"):
        data = save(gradient().convert(mode), "PNG")
        rgb = decode_rgb(data)
        assert rgb.shape == (16, 24, 3)
        assert (rgb == rgb[:, :, :1]).all()


def test_the_first_frame_of_an_animation_is_taken_when_allowed() -> None:
    from penstock.assets import Limits

    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    data = save(frames[0], "PNG", save_all=True, append_images=frames[1:])
    assert decode_rgb(data, Limits(max_frames=2))[0, 0].tolist() == [255, 0, 0]


def test_damaged_pixels_raise_and_name_no_object() -> None:
    data = bytearray(save(gradient(), "PNG"))
    at = data.index(b"IDAT") + 12
    data[at : at + 8] = b"\xff" * 8
    with pytest.raises(CorruptAsset, match="does not decode") as caught:
        decode_rgb(bytes(data), where="image x")
    assert str(caught.value).startswith("image x: ")
    assert caught.value.status == 500


def test_a_process_that_lets_truncated_images_pass_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(ConfigError, match="LOAD_TRUNCATED_IMAGES"):
        decode_rgb(save(gradient(), "PNG"))
