"""Each image is stored once, whole, under its own hash, for the runs that claimed it."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from PIL import Image

from penstock.assets import AssetStore, ImageRef, Limits, ObjectStore, remove_run, sweep
from penstock.assets.sources import ImageSource, file_url, path_of
from penstock.errors import ConfigError, CorruptAsset, ImageRefused, MissingAsset
from penstock.testing import as_data_uri
from tests.assets.conftest import Picture, files


def test_bytes_a_data_uri_and_a_file_are_one_image(tmp_path: Path, picture: Picture) -> None:
    inbox = tmp_path / "in box"
    inbox.mkdir()
    (inbox / "ü.png").write_bytes(picture(1))
    store = AssetStore(tmp_path / "assets", files_from=[inbox])
    sources: list[ImageSource] = [
        picture(1),
        bytearray(picture(1)),
        memoryview(picture(1)),
        as_data_uri(picture(1)),
        file_url(str(inbox / "ü.png")),
    ]
    refs = {store.put(source) for source in sources}
    digest = hashlib.sha256(picture(1)).hexdigest()
    expected = ImageRef(hash=digest, media_type="image/png", width=97, height=61, num_bytes=len(picture(1)))
    assert refs == {expected}
    assert files(store) == [f"images/{digest[:2]}/{digest}.png"]
    assert store.get(digest) == picture(1)
    assert (inbox / "ü.png").exists()


def test_a_pillow_image_is_stored_without_loss_and_upright(store: AssetStore) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    Image.effect_noise((20, 10), 90).convert("RGB").save(buffer, "JPEG", exif=exif)
    turned = store.put(Image.open(buffer))
    assert (turned.width, turned.height, turned.media_type) == (10, 20, "image/png")
    for mode in ("CMYK", "YCbCr", "RGBA", "L", "P", "1"):
        assert store.put(Image.new(mode, (5, 4))).width == 5


def test_the_reference_has_the_size_after_orientation(store: AssetStore) -> None:
    exif = Image.Exif()
    exif[0x0112] = 8
    buffer = io.BytesIO()
    Image.new("RGB", (40, 20)).save(buffer, "JPEG", exif=exif)
    assert (store.put(buffer.getvalue()).width, store.put(buffer.getvalue()).height) == (20, 40)


def test_storing_again_renews_the_time_and_writes_nothing(store: AssetStore, tmp_path: Path, picture: Picture) -> None:
    ref = store.put(picture(1))
    path = Path(path_of(store.url(ref)))
    inode = path.stat().st_ino
    for again in (store, AssetStore(tmp_path / "assets", run="demo")):
        os.utime(path, (1000, 1000))
        assert again.put(picture(1)) == ref
        assert path.stat().st_mtime > 1000
        assert path.stat().st_ino == inode


def test_own_urls_are_recognised_and_cost_no_copy(store: AssetStore, picture: Picture) -> None:
    ref = store.put(picture(1))
    assert store.put(store.url(ref)) == ref
    assert AssetStore(Path(path_of(store.url(ref))).parents[2], run="demo", retries=0).put(store.url(ref)) == ref
    assert len(files(store)) == 1


def test_images_with_equal_pixels_but_other_bytes_are_two(store: AssetStore) -> None:
    image = Image.new("P", (30, 100))
    ids = set()
    for palette, size in (([1, 2, 3], (30, 100)), ([3, 2, 1], (30, 100)), ([1, 2, 3], (100, 30))):
        image = Image.new("P", size)
        image.putpalette(palette)
        ids.add(store.put(image).hash)
    assert len(ids) == 3


def test_a_run_sees_only_what_it_claimed(tmp_path: Path, picture: Picture) -> None:
    mine = AssetStore(tmp_path, run="mine", retries=0)
    other = AssetStore(tmp_path, run="other", retries=0)
    ref = other.put(picture(1))
    with pytest.raises(MissingAsset) as foreign:
        mine.get(ref.hash)
    with pytest.raises(MissingAsset) as unknown:
        mine.get("0" * 64)
    assert str(foreign.value).replace(ref.hash, "0" * 64) == str(unknown.value)
    with pytest.raises(MissingAsset):
        mine.put(other.url(ref))
    assert ref.hash not in mine
    mine.put(picture(1))
    assert mine.get(ref.hash) == picture(1)
    assert len(files(mine)) == 1


@pytest.mark.parametrize("damage", ["flipped", "cut", "longer", "other image", "empty"])
def test_bytes_that_are_not_what_the_name_says_are_quarantined(
    damage: str, store: AssetStore, picture: Picture
) -> None:
    ref = store.put(picture(1))
    path = Path(path_of(store.url(ref)))
    good = picture(1)
    bad = {
        "flipped": good[:50] + bytes([good[50] ^ 1]) + good[51:],
        "cut": good[:-1],
        "longer": good + b"x",
        "other image": picture(2),
        "empty": b"",
    }[damage]
    path.write_bytes(bad)
    with pytest.raises(CorruptAsset, match="another hash") as caught:
        store.get(ref.hash)
    assert (caught.value.error_type, caught.value.status) == ("raw_mm_hash_mismatch", 400)
    kept = [store.blobs.get(info.name, max_bytes=1 << 20) for info in store.blobs.list("quarantine")]
    assert kept == [bad]
    with pytest.raises(MissingAsset):
        store.get(ref.hash)
    store.put(good)
    assert store.get(ref.hash) == good


def test_storing_over_a_file_of_another_length_repairs_it(tmp_path: Path, picture: Picture) -> None:
    ref = AssetStore(tmp_path).put(picture(1))
    path = Path(path_of(AssetStore(tmp_path).url(ref)))
    path.write_bytes(b"half")
    fresh = AssetStore(tmp_path)
    fresh.put(picture(1))
    assert fresh.get(ref.hash) == picture(1)
    assert [info.size for info in fresh.blobs.list("quarantine")] == [4]


def test_limits_are_the_stores_own(tmp_path: Path, picture: Picture) -> None:
    store = AssetStore(tmp_path, limits=Limits(max_side=50))
    with pytest.raises(ImageRefused, match="97 x 61"):
        store.put(picture(1))
    with pytest.raises(ConfigError, match="run"):
        AssetStore(tmp_path, run="../x")


def test_many_writers_of_one_image_leave_one_file(tmp_path: Path, picture: Picture) -> None:
    def put(i: int) -> str:
        return AssetStore(tmp_path, run=f"run-{i % 3}").put(picture(i % 2)).hash

    with ThreadPoolExecutor(8) as pool:
        hashes = set(pool.map(put, range(48)))
    store = AssetStore(tmp_path, run="run-0")
    assert len(files(store)) == len(hashes) == 2
    assert all(hashlib.sha256(store.get(h)).hexdigest() == h for h in hashes)
    assert not [name for _, _, names in os.walk(tmp_path) for name in names if name.startswith(".tmp")]


# Forks a writer for every line it is sent and says its pid, so that forty kills cost one interpreter start.
NURSERY = """
import os, sys
from pathlib import Path
from penstock.assets.store import AssetStore
pictures = [Path(name).read_bytes() for name in sys.argv[2:]]
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        while True:
            for picture in pictures:
                store = AssetStore(sys.argv[1], run="demo")
                ref = store.put(picture)
                store.blobs.delete("images/" + ref.hash[:2] + "/" + ref.file_id)
                os.write(1, b"put\\n")
    os.write(1, b"%d\\n" % pid)
    os.waitpid(pid, 0)
    os.write(1, b"dead\\n")
"""


@pytest.mark.process
def test_killed_writers_leave_whole_images_or_none(tmp_path: Path, picture: Picture) -> None:
    import random

    rng = random.Random(7)
    inputs = [tmp_path / f"{seed}.png" for seed in range(3)]
    for seed, path in enumerate(inputs):
        path.write_bytes(picture(seed))
    root = tmp_path / "assets"
    command = [sys.executable, "-c", NURSERY, str(root), *map(str, inputs)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as nursery:
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        for _ in range(40):
            nursery.stdin.write("go\n")
            nursery.stdin.flush()
            pid = 0
            puts = 0
            while not pid or puts < rng.randrange(1, 6):
                line = nursery.stdout.readline().strip()
                puts += line == "put"
                pid = int(line) if line.isdigit() else pid
            for _ in range(rng.randrange(60_000)):  # moves the kill over the whole of a put
                pass
            os.kill(pid, signal.SIGKILL)
            while nursery.stdout.readline().strip() != "dead":
                pass
            store = AssetStore(root, run="demo")
            for info in store.list():
                assert hashlib.sha256(store.blobs.get(info.name, max_bytes=1 << 20)).hexdigest() in info.name
        nursery.stdin.close()
    for seed in range(3):
        assert store.get(store.put(picture(seed)).hash) == picture(seed)


@pytest.mark.process
def test_the_store_works_the_same_on_s3(s3_blobs: ObjectStore, picture: Picture) -> None:
    store = AssetStore(s3_blobs, run="demo", retries=0)
    ref = store.put(picture(1))
    assert store.put(store.url(ref)) == store.put(picture(1)) == ref
    assert store.url(ref).startswith("s3://penstock-")
    assert AssetStore(s3_blobs, run="demo").get(ref.hash) == picture(1)
    with pytest.raises(MissingAsset):
        AssetStore(s3_blobs, run="other", retries=0).get(ref.hash)
    s3_blobs.delete(f"images/{ref.hash[:2]}/{ref.file_id}")
    s3_blobs.put_if_absent(f"images/{ref.hash[:2]}/{ref.file_id}", picture(2))
    with pytest.raises(CorruptAsset):
        store.get(ref.hash)
    assert len(list(s3_blobs.list("quarantine"))) == 1


def test_removing_a_run_keeps_what_other_runs_claim(tmp_path: Path, picture: Picture) -> None:
    first, second = AssetStore(tmp_path, run="first", retries=0), AssetStore(tmp_path, run="second", retries=0)
    shared, own = first.put(picture(1)), first.put(picture(2))
    second.put(picture(1))
    assert remove_run(first.blobs, "first") == [own.hash]
    assert second.get(shared.hash) == picture(1)
    with pytest.raises(MissingAsset):
        first.get(shared.hash)
    assert first.put(picture(2)) == own
    assert first.get(own.hash) == picture(2)
    assert remove_run(first.blobs, "second") == [shared.hash]
    assert remove_run(first.blobs, "nobody") == []
    assert [info.name for info in first.blobs.list("trash")] == []


def test_a_killed_remover_is_finished_by_the_next_sweep(tmp_path: Path, picture: Picture) -> None:
    store = AssetStore(tmp_path, run="mine", retries=0)
    claimed, forgotten = store.put(picture(1)), store.put(picture(2))
    for ref in (claimed, forgotten):
        store.blobs.move(f"images/{ref.hash[:2]}/{ref.file_id}", f"trash/{ref.file_id}")
    store.blobs.delete(f"claims/mine/{forgotten.hash[:2]}/{forgotten.hash}")
    sweep(store)
    assert store.get(claimed.hash) == picture(1)
    assert len(files(store)) == 1
    assert list(store.blobs.list("trash")) == []


def test_an_image_claimed_while_its_run_is_removed_survives(tmp_path: Path, picture: Picture) -> None:
    store = AssetStore(tmp_path, run="second", retries=5)
    for turn in range(10):
        ref = AssetStore(tmp_path, run="first").put(picture(turn))
        with ThreadPoolExecutor(2) as pool:
            removed = pool.submit(remove_run, store.blobs, "first")
            stored = pool.submit(AssetStore(tmp_path, run="second").put, picture(turn))
            stored.result()
            removed.result()
        assert store.get(ref.hash) == picture(turn)
