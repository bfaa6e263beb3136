"""A folder that cannot be made, read or written is our error, with the path and a remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import penstock as ps
from penstock.assets import AssetStore
from penstock.errors import ConfigError, InvalidInput, StorageError
from penstock.view import Export, TokenExporter
from tests.support.groups import named_group


def use(where: str | Path, **settings: str | Path | list[str]) -> None:
    with ps.open(where, ranks=1, seq_len=64, groups_per_step=1, **settings) as plane:  # type: ignore[arg-type]
        plane.put(named_group("a"))


def with_file(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("a file")
    return folder


def with_folder(folder: Path, name: str) -> Path:
    (folder / name).mkdir(parents=True)
    return folder


def linked_to_itself(link: Path) -> Path:
    link.symlink_to(link)
    return link


ODD: dict[str, Callable[[Path], object]] = {
    "a file": lambda at: use(with_file(at, "run") / "run"),
    "under a file": lambda at: use(with_file(at, "run") / "run" / "deeper"),
    "not to be made": lambda _: use("/proc/penstock"),
    "not to be written": lambda _: use("/sys/penstock"),
    "NUL": lambda at: use(f"{at}/a\0b"),
    "too long": lambda at: use(at / ("x" * 300)),
    "lock is a folder": lambda at: use(with_folder(at, "lock")),
    "log is a folder": lambda at: use(with_folder(at, "log.sqlite")),
    "write-ahead log is a folder": lambda at: use(with_folder(at, "log.sqlite-wal")),
    "marker is a folder": lambda at: use(with_folder(at, "storage/marker")),
    "storage= is NUL": lambda at: use(at, storage="a\0b"),
    "storage= is a link to itself": lambda at: use(at, storage=linked_to_itself(at / "link")),
    "a link to itself": lambda at: use(linked_to_itself(at / "link")),
    "assets too long": lambda at: AssetStore(at / ("x" * 300)),
    "storage is a file": lambda at: use(with_file(at, "storage")),
    "file:// of a file": lambda at: use("memory:", listen=[f"file://{with_file(at, 'mail')}/mail"]),
    "file:// not to be made": lambda _: use("memory:", listen=["file:///proc/penstock"]),
    "client, file:// of a file": lambda at: ps.open(f"file://{with_file(at, 'mail')}/mail").close(),
    "source, file:// not to be made": lambda _: ps.connect("file:///proc/penstock", rank=0, world=1).close(),
    "export not to be made": lambda _: TokenExporter("/proc/penstock").close(),
}


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_folder_is_our_error(tmp_path: Path, kind: str) -> None:
    with pytest.raises(StorageError, match=r".+: .+"):
        ODD[kind](tmp_path)


def test_a_name_that_no_folder_can_have_is_our_error_where_one_is_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="not a folder"):
        Export(tmp_path / ("x" * 300))
    with pytest.raises(ConfigError, match=r"keys 'a\\x00b': embedded null byte; give the folder"):
        ps.open("tcp://127.0.0.1:1", keys="a\0b")


def test_a_folder_in_the_place_of_the_log_is_named_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"log\.sqlite: a folder, and the log is a file; move it away"):
        use(with_folder(tmp_path, "log.sqlite"))


def test_what_was_in_the_way_can_be_moved_away(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"storage.*a file is where a folder should be"):
        use(with_file(tmp_path, "storage"))
    (tmp_path / "storage").unlink()
    use(tmp_path)  # nothing of the failed open is left, the lock included
