"""Headers are read without decoding, agree with Pillow, and refuse what is cut short, too large or more than one."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from penstock.assets.image_files import EXTENSIONS, Limits, decode_rgb, probe, upright_size
from penstock.errors import CorruptAsset, ImageRefused

FORMATS = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}


def written(kind: str, size: tuple[int, int] = (9, 7), mode: str = "RGB", **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size, None if mode in ("P", "1") else 77 if mode == "L" else (200, 10, 60, 128)[: len(mode)]).save(
        buffer, format=kind, **options
    )
    return buffer.getvalue()


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, *, pixels: bytes = b"", extra: bytes = b"", depth: int = 1) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0)
    data = chunk(b"IDAT", zlib.compress(pixels, 9))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + extra + data + chunk(b"IEND", b"")


def animated_gif(frames: int) -> bytes:
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00"
    head = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(6)
    return head + frame * frames + b"\x3b"


@settings(max_examples=60)
@given(
    kind=st.sampled_from(sorted(FORMATS)),
    width=st.integers(1, 300),
    height=st.integers(1, 300),
    mode=st.sampled_from(["RGB", "L"]),
    orientation=st.integers(1, 8),
)
def test_headers_agree_with_pillow(kind: str, width: int, height: int, mode: str, orientation: int) -> None:
    options: dict[str, Any] = {}
    if kind != "GIF":
        exif = Image.Exif()
        exif[0x0112] = orientation
        options["exif"] = exif
    header = probe(written(kind, (width, height), mode, **options))
    assert (header.media_type, header.width, header.height) == (FORMATS[kind], width, height)
    assert header.orientation == (orientation if kind != "GIF" else 1)
    assert upright_size(header) == ((height, width) if header.orientation >= 5 else (width, height))


@pytest.mark.parametrize(
    ("kind", "options"),
    [("WEBP", {"lossless": True}), ("WEBP", {"quality": 40}), ("JPEG", {"progressive": True}), ("PNG", {})],
)
def test_every_variant_of_a_container_is_read(kind: str, options: dict[str, Any]) -> None:
    header = probe(written(kind, (33, 21), **options))
    assert (header.width, header.height, header.frames) == (33, 21, 1)


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_a_file_cut_anywhere_is_refused(kind: str) -> None:
    data = written(kind)
    probe(data)
    for length in range(len(data)):
        with pytest.raises(ImageRefused):
            probe(data[:length])


@pytest.mark.parametrize("kind", sorted(FORMATS))
@pytest.mark.parametrize("tail", [b"<html><script>alert(1)</script></html>", b"PK\x03\x04zip", b"\x00\x01"])
def test_a_file_with_something_behind_the_image_is_refused(kind: str, tail: bytes) -> None:
    with pytest.raises(ImageRefused):
        probe(written(kind) + tail)


@pytest.mark.parametrize(
    "data",
    [b"", b"\x89PNG", b"%PDF-1.7", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"II*\x00", b"8BPS\0\1", b"SIMPLE  ="],
    ids=["empty", "stub", "pdf", "svg", "tiff", "psd", "fits"],
)
def test_other_formats_are_refused(data: bytes) -> None:
    with pytest.raises(ImageRefused, match="complete PNG, JPEG, WebP or GIF"):
        probe(data)


@pytest.mark.parametrize(
    "data",
    [
        png(13_000, 13_000, pixels=bytes(1626 * 13_000)),
        png(65_535, 65_535),
        png(0, 0),
        png(1, 1_000_000),
        png(16_385, 1),
        b"\xff\xd8\xff\xc0\x00\x0b\x08\xff\xff\xff\xff\x01\x01\x11\x00\xff\xda\x00\x02\x00\xff\xd9",
    ],
    ids=["169 MP in 20 kB", "65535 x 65535 png", "0 x 0", "1 x 10^6", "one side too long", "65535 x 65535 jpeg"],
)
def test_sizes_are_judged_before_anything_is_decoded(data: bytes) -> None:
    assert len(data) < 25_000
    tracemalloc.start()
    with pytest.raises(ImageRefused, match="pixels; must be"):
        decode_rgb(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000


def test_a_file_larger_than_allowed_is_not_even_parsed() -> None:
    with pytest.raises(ImageRefused, match="1025 bytes; at most 1024"):
        probe(b"\x89PNG\r\n\x1a\n" + bytes(1017), Limits(max_bytes=1024))


def test_animations_are_refused_unless_asked_for() -> None:
    with pytest.raises(ImageRefused, match="10000 frames"):
        probe(animated_gif(10_000))
    assert probe(animated_gif(10_000), Limits(max_frames=10_000)).frames == 10_000
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "lime", "blue")]
    for kind in ("WEBP", "PNG", "GIF"):
        buffer = io.BytesIO()
        frames[0].save(buffer, format=kind, save_all=True, append_images=frames[1:])
        with pytest.raises(ImageRefused, match="3 frames"):
            probe(buffer.getvalue())


def test_walking_a_hostile_container_is_bounded() -> None:
    tiny_blocks = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0, 0, 0) + b"\x21\xfe" + b"\x01\x00" * 1
    cases = [
        tiny_blocks[:-1] + b"a" + b"\x01a" * 3_000_000 + b"\x00\x3b",
        b"RIFF" + struct.pack("<I", 8 * 2_000_000 + 4) + b"WEBP" + b"JUNK\0\0\0\0" * 2_000_000,
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", bytes(13)) + chunk(b"teSt", b"") * 1_000_000,
        b"\xff\xd8" + b"\xff\xe0\x00\x02" * 1_000_000,
    ]
    for data in cases:
        with pytest.raises(ImageRefused, match="too many"):
            probe(data)


def test_scans_of_a_jpeg_are_bounded() -> None:
    """Each scan decodes all pixels again: 188 kB of 5,000 scans kept a rank busy for minutes."""
    plain = written("JPEG", (40, 30), progressive=True)
    assert decode_rgb(plain).shape == (30, 40, 3)
    last = plain.rindex(b"\xff\xda")
    with pytest.raises(ImageRefused, match="the JPEG has 5010 scans, and must have 1 to 64"):
        probe(plain[:-2] + plain[last:-2] * 5000 + b"\xff\xd9")


# Pillow warns of odd metadata it skips; the pixels are what counts here.
@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@settings(max_examples=300)
@given(
    kind=st.sampled_from(sorted(FORMATS)),
    edits=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=6),
)
def test_a_damaged_file_decodes_to_its_size_or_raises_our_error(kind: str, edits: list[tuple[float, int]]) -> None:
    data = bytearray(written(kind, (23, 17), exif=Image.Exif()) if kind != "GIF" else written(kind, (23, 17)))
    for where, value in edits:
        data[min(int(where * len(data)), len(data) - 1)] = value
    limits = Limits(max_pixels=100_000, max_side=2000)
    raised = ""
    try:
        header = probe(bytes(data), limits)
        width, height = upright_size(header)
        assert decode_rgb(bytes(data), limits).shape == (height, width, 3)
    except (ImageRefused, CorruptAsset) as error:
        raised = str(error)
    assert len(raised) < 300
    assert "object at 0x" not in raised


@settings(max_examples=300)
@given(st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"RIFF\x10\0\0\0WEBP"]), st.binary())
def test_random_bytes_never_raise_anything_else(magic: bytes, tail: bytes) -> None:
    try:
        header = probe(magic + tail)
    except ImageRefused:
        return
    assert header.media_type in EXTENSIONS


def test_text_bombs_inside_a_png_are_not_inflated() -> None:
    bomb = chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(50_000_000), 9))
    profile = chunk(b"iCCP", b"p\0\0" + zlib.compress(bytes(50_000_000), 9))
    for extra in (bomb, profile):
        data = png(8, 8, pixels=bytes(2 * 8), extra=extra)
        tracemalloc.start()
        with pytest.raises(CorruptAsset, match="does not open"):
            decode_rgb(data)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 8_000_000
