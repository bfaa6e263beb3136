"""Files that appear whole or not at all: what a failure leaves, and the order in which things reach the disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.atomic import beside, rename, replacing, sync


def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError, match="halfway"), replacing(path) as file:
        file.write(b"new, half of it")
        raise RuntimeError("halfway")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_nothing_is_visible_before_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "state"
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert not path.exists()
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


def test_bytes_are_synced_before_the_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "state", list[tuple[str, bool]]()
    real = os.fsync

    def noted(descriptor: int) -> None:
        seen.append((os.readlink(f"/proc/self/fd/{descriptor}"), path.exists()))  # noqa: PTH115
        real(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    with replacing(path) as file:
        file.write(b"new")
    assert seen == [(str(beside(path)), False), (str(tmp_path), True)]


def test_a_folder_takes_its_name_whole(tmp_path: Path) -> None:
    part = beside(tmp_path / "step")
    part.mkdir()
    (part / "a").write_bytes(b"1")
    sync(part)
    rename(part, tmp_path / "step")
    assert [path.name for path in tmp_path.iterdir()] == ["step"] and (tmp_path / "step/a").read_bytes() == b"1"
