"""What `penstock assets` reports: everything there, everything wrong, nothing changed by looking."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.assets import AssetStore, FeatureStore, remove_run
from penstock.assets.claims import pending_name
from penstock.assets.sources import path_of
from penstock.assets.store import list_assets, verify_assets
from penstock.cli import main

Picture = Callable[[int], bytes]


def test_the_list_says_which_runs_hold_an_image(tmp_path: Path, picture: Picture) -> None:
    first, second = AssetStore(tmp_path, run="first"), AssetStore(tmp_path, run="second")
    shared, own = first.put(picture(1)), first.put(picture(2))
    second.put(picture(1))
    rows = {row.hash: row for row in list_assets(first)}
    assert rows[shared.hash].runs == ("first", "second")
    assert rows[own.hash].runs == ("first",)
    assert rows[own.hash].num_bytes == len(picture(2))
    assert remove_run(first.blobs, "first") == [own.hash]
    assert [row.hash for row in list_assets(first)] == [shared.hash]


def test_verify_finds_damage_and_absence_and_changes_nothing(store: AssetStore, picture: Picture) -> None:
    good, damaged, gone = (store.put(picture(i)) for i in range(3))
    assert verify_assets(store).ok
    Path(path_of(store.url(damaged))).write_bytes(picture(1)[:-5])
    Path(path_of(store.url(gone))).unlink()
    before = sorted(info.name for info in store.blobs.list(""))
    seen: list[int] = []
    report = verify_assets(store, progress=seen.append)
    assert not report.ok
    assert report.checked == 2
    assert len(report.corrupt) == 1
    assert damaged.hash in report.corrupt[0]
    assert report.missing == (gone.hash,)
    assert seen[-1] == report.num_bytes == good.num_bytes + damaged.num_bytes - 5
    assert sorted(info.name for info in store.blobs.list("")) == before


def test_a_claim_whose_writer_was_killed_is_no_damage(
    store: AssetStore, picture: Picture, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kept = store.put(picture(1))
    other = AssetStore(tmp_path / "other").put(picture(2))  # to know its hash
    store.blobs.put_if_absent(pending_name(store.run, other.hash), b"")
    report = verify_assets(store)
    assert report.ok and report.unfinished == 1 and report.missing == ()
    assert other.hash not in store and kept.hash in store
    assert main(["assets", "verify", str(path_of(store.url(kept)).rsplit("/", 3)[0])]) == 0
    assert "healthy, 1 left unfinished" in capsys.readouterr().out
    assert store.put(picture(2)).hash in store  # the next writer finishes it
    assert verify_assets(store).unfinished == 0
    assert remove_run(store.blobs, store.run) == sorted([kept.hash, other.hash])


def test_the_folder_of_a_run_stands_for_its_store(
    tmp_path: Path, picture: Picture, capsys: pytest.CaptureFixture[str]
) -> None:
    AssetStore(tmp_path / "assets").put(picture(1))
    assert not (tmp_path / "assets" / "assets").exists()
    for folder in (tmp_path, tmp_path / "assets"):
        assert main(["assets", "list", str(folder)]) == 0
        assert "1 images, " in capsys.readouterr().out


@pytest.mark.parametrize("action", ["list", "verify", "sweep"])
def test_a_folder_that_is_no_store_and_no_run_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    assert main(["assets", action, str(tmp_path)]) == 1
    assert "no asset store and no run in it" in capsys.readouterr().err
    (tmp_path / "plane").mkdir()
    (tmp_path / "plane" / "log.sqlite").touch()
    assert main(["assets", action, str(tmp_path)]) == 0  # a run without images
    assert "0 images" in capsys.readouterr().out


def test_a_sweep_reports_what_it_removed_and_kept(
    tmp_path: Path, picture: Picture, capsys: pytest.CaptureFixture[str]
) -> None:
    store = AssetStore(tmp_path)
    ref = store.put(picture(1))
    FeatureStore(store).put(fingerprint="0" * 32, image=ref.hash, payload=b"x", placeholder_length=1)
    for words, removed in (([], 0), (["--ttl=1e-9"], 1)):
        assert main(["assets", "sweep", str(tmp_path), "--json", *words]) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["features_removed"], report["images_kept"]) == (removed, 1)
