"""A plane whose frames are with keepers archives them as they were put; a keeper that is away is waited for."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.archive import RecordedRun
from penstock.cli import main
from penstock.encode import encode
from penstock.serve.process.rerun import rerun
from penstock.testing.cluster import Cluster
from penstock.testing.groups import named_group
from tests.archive.conftest import FAST, folder_of, frames_of, put, train
from tests.archive.test_archiving import wait_for


@pytest.mark.parametrize("secured", [False, True])
def test_frames_of_keepers_are_archived_as_they_were_put(tmp_path: Path, secured: bool) -> None:
    where, more = folder_of(tmp_path), {}
    if secured:
        assert main(["keys", str(tmp_path / "keys")]) == 0
        more = {"keys": str(tmp_path / "keys")}
    with Cluster(tmp_path, timeouts=FAST, archive=where, retain_steps=0, **more) as cluster:
        with cluster.client() as client:
            put(client, *"abcd")
            put(client, "e0", evaluation=True)
            train(client, 2)
        wait_for(lambda: cluster.plane.status()["archive"]["step"] == 2)
        wait_for(lambda: cluster.plane.status()["archive"]["waiting_groups"] == 0)
    recorded = RecordedRun.open(where)
    assert frames_of(recorded) == {name: encode(named_group(name)) for name in ("a", "b", "c", "d", "e0")}
    assert rerun(recorded, tmp_path / "again").same


def test_a_keeper_that_is_away_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.serve.process.kept_frames.ANSWER_S", 0.3)
    where, away = folder_of(tmp_path), tmp_path / "archive"
    away.write_text("")  # nothing can be archived yet
    with Cluster(tmp_path, nodes="a", timeouts=FAST, archive=where, copies=1, retain_steps=0) as cluster:
        with cluster.client() as client:
            put(client, *"ab")
            train(client, 1)
        cluster.stop_keeper("a")
        away.unlink()
        wait_for(lambda: "no answer from keeper a." in cluster.plane.status()["archive"]["error"])
        cluster.start_keeper("a")
        wait_for(lambda: cluster.plane.status()["archive"]["step"] == 1)
    assert list(frames_of(RecordedRun.open(where))) == ["a", "b"]
