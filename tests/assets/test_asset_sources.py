"""What an image may be given as, and by which names it is asked for: the rest is refused and nothing is stored."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from penstock.assets import AssetStore
from penstock.assets.sources import file_url, path_of
from penstock.errors import ImageRefused, InvalidReference
from penstock.testing import as_data_uri
from tests.assets.conftest import Picture


@pytest.mark.parametrize(
    ("source", "error", "match"),
    [
        ("data:image/png;base64", ImageRefused, "no comma"),
        ("data:image/png," + "A" * 40, ImageRefused, "base64"),
        ("data:text/html;base64,AAAA", ImageRefused, "image/"),
        ("data:image/png;base64,@@@@", ImageRefused, "not valid base64"),
        ("data:image/png;base64,AAA", ImageRefused, "not valid base64"),
        ("data:image/svg+xml;base64,PHN2Zy8+", ImageRefused, "PNG, JPEG, WebP or GIF"),
        ("", InvalidReference, "nothing is fetched"),
        ("http://169.254.169.254/latest/meta-data", InvalidReference, "nothing is fetched"),
        ("https://[::1]/x.png", InvalidReference, "nothing is fetched"),
        ("FILE:///etc/passwd", InvalidReference, "nothing is fetched"),
        ("/etc/passwd", InvalidReference, "nothing is fetched"),
        ("file:///etc/passwd", InvalidReference, "outside the allowed"),
        (7, ImageRefused, "a int"),
        (b"not an image", ImageRefused, "PNG, JPEG"),
    ],
)
def test_bad_sources_raise_and_nothing_is_stored(
    source: object, error: type[Exception], match: str, store: AssetStore
) -> None:
    with pytest.raises(error, match=match):
        store.put(source)  # type: ignore[arg-type]
    assert list(store.blobs.list("")) == []


def test_a_declared_type_that_the_bytes_are_not_is_refused(store: AssetStore, picture: Picture) -> None:
    with pytest.raises(ImageRefused, match="declared 'image/jpeg' but the bytes are image/png"):
        store.put(as_data_uri(picture(1), "image/jpeg"))
    buffer = io.BytesIO()
    Image.new("RGB", (5, 4)).save(buffer, "JPEG")
    assert store.put(as_data_uri(buffer.getvalue(), "image/jpg")).media_type == "image/jpeg"


def test_a_hundred_megabytes_of_base64_are_refused_before_decoding(store: AssetStore) -> None:
    import tracemalloc

    uri = "data:image/png;base64," + "A" * 100_000_000
    tracemalloc.start()
    with pytest.raises(ImageRefused, match="75000000 bytes"):
        store.put(uri)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


HOSTILE_URLS = [
    "file:///{root}/../secret",
    "file://{root}/a/%2e%2e/%2e%2e/secret",
    "file://{root}/..%252fsecret",
    "file://{root}//x.png",
    "file://{root}/x.png/",
    "file://{root}/x.png%00.txt",
    "file://{root}/x.png?a",
    "file://{root}/x.png#a",
    "file://{root}/x.png\t",
    "file://{root}\\..\\secret",
    "file:{root}/x.png",
    "file:/{root}/x.png",
    "file://host{root}/x.png",
    "file://user@localhost{root}/x.png",
    "file://localhost:80{root}/x.png",
    "file://{root}",
    "file:///proc/self/environ",
    "file:///dev/zero",
    "file://{root}/link.png",
    "file://{root}/folder/x.png",
    "file://{root}/fifo.png",
    "file://{root}/absent.png",
    "file://{root}extra/x.png",
]


@pytest.mark.parametrize("url", HOSTILE_URLS)
def test_hostile_file_urls_are_refused(url: str, tmp_path: Path, picture: Picture) -> None:
    root = tmp_path / "inbox"
    (tmp_path / "inboxextra").mkdir()
    (tmp_path / "inboxextra/x.png").write_bytes(picture(2))
    root.mkdir()
    (root / "x.png").write_bytes(picture(1))
    (tmp_path / "secret").write_bytes(picture(2))
    (root / "link.png").symlink_to(tmp_path / "secret")
    (root / "folder").symlink_to(tmp_path / "inboxextra")
    os.mkfifo(root / "fifo.png")
    store = AssetStore(tmp_path / "assets", files_from=[root])
    with pytest.raises((InvalidReference, ImageRefused)) as caught:
        store.put(url.format(root=root))
    assert caught.value.status == 400
    assert list(store.blobs.list("")) == []
    assert store.put(f"file://{root}/x.png").width == 97


@given(st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=4))
def test_file_urls_round_trip_for_every_path(parts: list[str]) -> None:
    path = "/" + "/".join(parts)
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return
    if "\0" in path or any(part in ("", ".", "..") for part in path.split("/")[1:]):
        with pytest.raises(InvalidReference):
            path_of(file_url(path))
    else:
        assert path_of(file_url(path)) == path


@settings(max_examples=300)
@given(st.text(max_size=60) | st.text("./%2e?#:@\\0fil", max_size=40).map(lambda tail: "file://" + tail))
def test_any_text_is_a_plain_path_or_refused(text: str) -> None:
    try:
        path = path_of(text)
    except InvalidReference:
        return
    assert path.startswith("/")
    assert ".." not in path.split("/")
    assert path_of(file_url(path)) == path


@pytest.mark.parametrize("hash_", ["", "ab" * 31, "AB" * 32, "ab" * 33, "../" + "a" * 61, "g" * 64])
def test_ids_other_than_a_sha256_are_refused(hash_: str, store: AssetStore) -> None:
    with pytest.raises(InvalidReference, match="64 lower-case hex"):
        store.get(hash_)
    assert hash_ not in store
