"""Every kind of blob storage passes the one conformance suite; the folder also withstands what a disk does."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from penstock.assets import ObjectStore
from penstock.assets.blobs import Blobs
from penstock.assets.local_folder import LocalFolder
from penstock.errors import ConfigError, CorruptAsset, StorageError
from penstock.testing.checks import STORE_CHECKS

by_name = pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)


def unreachable() -> object:
    from obstore.store import S3Store

    retry = {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}
    options = {"endpoint": "http://127.0.0.1:9", "region": "us-east-1", "skip_signature": True}
    return S3Store("x", config=options, client_options={"allow_http": True}, retry_config=retry)


@by_name
def test_local_folder_conforms(check: Callable[[Blobs], None], tmp_path: Path) -> None:
    check(LocalFolder(tmp_path / "root"))


@by_name
def test_memory_object_store_conforms(check: Callable[[Blobs], None]) -> None:
    from obstore.store import MemoryStore

    check(ObjectStore(MemoryStore(), url="memory://test", touch_after_s=0.0))


@pytest.mark.process
@by_name
def test_s3_conforms(check: Callable[[Blobs], None], s3_blobs: ObjectStore) -> None:
    check(s3_blobs)


def test_a_relative_root_becomes_absolute_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blobs = LocalFolder("run/assets")
    monkeypatch.chdir("/")
    assert blobs.put_if_absent("a", b"1")
    assert (tmp_path / "run/assets/a").read_bytes() == b"1"
    assert blobs.url("a") == f"file://{tmp_path}/run/assets/a"


def test_files_are_private(tmp_path: Path) -> None:
    LocalFolder(tmp_path / "root").put_if_absent("a/b", b"1")
    assert (tmp_path / "root").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "root/a").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "root/a/b").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("make", ["file link", "folder link", "fifo", "directory", "link to /dev/zero", "socket"])
def test_what_is_not_a_plain_file_is_refused(make: str, tmp_path: Path) -> None:
    import socket

    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "x").write_bytes(b"secret")
    root = tmp_path / "root"
    blobs = LocalFolder(root)
    (root / "a").mkdir()
    name = "a/x"
    if make == "file link":
        (root / "a/x").symlink_to(secret / "x")
    elif make == "folder link":
        (root / "b").symlink_to(secret)
        name = "b/x"
    elif make == "fifo":
        os.mkfifo(root / "a/x")
    elif make == "directory":
        (root / "a/x").mkdir()
    elif make == "link to /dev/zero":
        (root / "a/x").symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(root / "a/x"))
    with pytest.raises(StorageError) as caught:
        blobs.get(name, max_bytes=100)
    assert isinstance(caught.value, CorruptAsset) or "nothing is stored" in str(caught.value)
    assert (secret / "x").read_bytes() == b"secret"


def test_a_link_swapped_in_while_reading_never_leads_out(tmp_path: Path) -> None:
    import itertools
    import threading
    import time

    (tmp_path / "secret").write_bytes(b"secret!!")
    root = tmp_path / "root"
    blobs = LocalFolder(root)
    blobs.put_if_absent("a/x", b"harmless")
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            (root / "a/link").symlink_to(tmp_path / "secret")
            (root / "a/link").replace(root / "a/x")
            (root / "a/file").write_bytes(b"harmless")
            (root / "a/file").replace(root / "a/x")

    swapper = threading.Thread(target=swap)
    swapper.start()
    seen: set[bytes] = set()
    refused = 0
    try:
        until = time.monotonic() + 60  # on a busy machine the two threads may hardly meet
        for number in itertools.count():
            try:
                seen.add(blobs.get("a/x", max_bytes=100))
            except CorruptAsset:
                refused += 1
            if number >= 3000 and (refused or time.monotonic() > until):
                break
    finally:
        stop.set()
        swapper.join()
    assert seen == {b"harmless"}
    assert refused > 0


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    # RLIMIT_FSIZE is the nearest thing to a full disk that needs no privileges: the write stops short.
    import resource
    import signal

    blobs = LocalFolder(tmp_path / "root")
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        with pytest.raises(StorageError, match="a/x"):
            blobs.put_if_absent("a/x", b"x" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert list((tmp_path / "root/a").iterdir()) == []
    assert blobs.put_if_absent("a/x", b"x" * 10_000)


def test_a_file_system_without_hard_links_works_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    blobs = LocalFolder(tmp_path / "root")
    assert blobs.put_if_absent("a/x", b"1")
    assert not blobs.put_if_absent("a/x", b"2")
    assert blobs.get("a/x", max_bytes=9) == b"1"
    assert [path.name for path in (tmp_path / "root/a").iterdir()] == ["x"]


def test_leftovers_of_killed_writers_are_never_seen_and_are_swept(tmp_path: Path) -> None:
    blobs = LocalFolder(tmp_path / "root")
    blobs.put_if_absent("a/x", b"1")
    left = tmp_path / "root/a/.tmp-123-abc"
    left.write_bytes(b"half")
    assert [info.name for info in blobs.list("")] == ["a/x"]
    modified = left.stat().st_mtime
    assert blobs.remove_temporaries(older_than_s=3600, now=modified + 3599) == 0
    assert blobs.remove_temporaries(older_than_s=3600, now=modified + 3601) == 1
    assert not left.exists()


def test_a_root_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="writable folder"):
        LocalFolder(tmp_path / "file" / "below")
    with pytest.raises(ConfigError):
        LocalFolder("a\0b")
    with pytest.raises(StorageError, match="see its own log"):
        list(ObjectStore(unreachable(), url="s3://x").list(""))
    with pytest.raises(ConfigError, match="s3://"):
        ObjectStore(object(), url="bucket")
