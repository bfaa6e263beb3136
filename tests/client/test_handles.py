"""Handles travel: what is pickled is an address, and where it arrives it is a connection of that process."""

from __future__ import annotations

import multiprocessing
import pickle  # noqa: TID251 - what others ship handles with
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.client.handles import usable_url
from penstock.errors import ConfigError
from penstock.testing import draw_screenshot
from penstock.transport.keys import make_keys
from tests.support.groups import named_group
from tests.support.planes import FAST, OpenPlane
from tests.support.torture import address

pytestmark = pytest.mark.process

SPAWN = multiprocessing.get_context("spawn")


def put_there(plane: ps.Plane, names: list[str], answers: Any) -> None:
    with plane:
        answers.put([plane.url, [plane.put(named_group(name)) for name in names]])


def train_there(source: ps.Source, answers: Any) -> None:
    with source:
        step = source.step(timeout=60)
        source.commit(step, policy_version=1)
        source.flush()
        answers.put([source.rank, step.number, step.digest])


def spawned(body: Callable[..., None], *args: Any) -> Any:
    answers = SPAWN.SimpleQueue()
    process = SPAWN.Process(target=body, args=(*args, answers))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    return answers.get()


@pytest.mark.parametrize("kind", ["tcp", "ipc", "file"])
def test_a_plane_handed_to_another_process_is_a_line_to_it(open_plane: OpenPlane, tmp_path: Path, kind: str) -> None:
    plane = open_plane(ranks=1, listen=[address(kind, tmp_path)])
    url, taken = spawned(put_there, plane, ["a", "b"])
    assert url == plane.url and taken == [True, True]
    assert not plane.put(named_group("a"))  # it is there already
    with ps.open(plane.url, timeouts=FAST) as line:
        assert spawned(put_there, line, ["b", "c"]) == [plane.url, [False, True]]
    assert plane.ledger.accepted == 6


def test_a_handle_carries_the_path_of_the_keys_and_no_key(open_plane: OpenPlane, tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    plane = open_plane(ranks=1, listen=["tcp://127.0.0.1:*"], keys=tmp_path / "keys")
    data = pickle.dumps(plane)
    assert str(tmp_path / "keys").encode() in data
    for path in (tmp_path / "keys").rglob("*.secret"):
        assert path.read_bytes().strip() not in data
    assert spawned(put_there, plane, ["a"])[1] == [True]


def test_a_handle_keeps_the_run_that_it_was_opened_for(open_plane: OpenPlane, tmp_path: Path) -> None:
    plane = open_plane(ranks=1, run="A", listen=[f"ipc://{tmp_path}/s"])
    with pickle.loads(pickle.dumps(plane)) as line, ps.open(plane.url, run="B", timeouts=FAST) as other:
        assert line.put(named_group("a"))
        with pickle.loads(pickle.dumps(other)) as again, pytest.raises(ps.PenstockError, match=r"'B'.*'A'"):
            again.put(named_group("b"))


def test_a_source_goes_on_in_another_process_after_its_last_commit(open_plane: OpenPlane, tmp_path: Path) -> None:
    plane = open_plane(ranks=1, groups_per_step=1, listen=[f"ipc://{tmp_path}/s"])
    for name in "abc":
        plane.put(named_group(name))
    ways: list[Callable[[], ps.Source]] = [
        lambda: plane.source(0),
        lambda: ps.connect(plane.url, rank=0, world=1, timeouts=FAST),
    ]
    for connect in ways:
        source = connect()
        first = source.step(timeout=60)
        source.commit(first)
        source.flush()
        second = source.step(timeout=60)
        source.close()
        assert spawned(train_there, source) == [0, second.number, second.digest] and second.number == first.number + 1
        if second.number == 2:
            plane.put(named_group("d"))
    assert plane.ledger.committed == 8


def test_a_plane_that_listens_nowhere_says_so_when_it_should_travel(open_plane: OpenPlane) -> None:
    plane = open_plane(ranks=1)
    with plane.source(0) as source:
        for handle in (plane, source):
            with pytest.raises(ConfigError, match=r"listens nowhere.*listen="):
                pickle.dumps(handle)


def test_an_asset_store_arrives_as_the_same_folder(tmp_path: Path) -> None:
    store = ps.AssetStore(tmp_path / "assets", run="a", files_from=[tmp_path])
    ref = store.put(draw_screenshot(seed=1, width=64, height=36))
    other = pickle.loads(pickle.dumps(store))
    assert other.get(ref.hash) == store.get(ref.hash) and other.run == "a" and other.limits == store.limits
    assert other.put(draw_screenshot(seed=2, width=64, height=36)).hash in store


# ------------------------------------------------------------------ the address of a plane that listens


@pytest.mark.parametrize("kind", ["tcp", "ipc", "file"])
def test_the_url_of_a_plane_that_listens_is_one_that_others_can_use(
    open_plane: OpenPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    plane = open_plane(ranks=1, listen=["tcp://127.0.0.1:*" if kind == "tcp" else f"{kind}://here"])
    assert plane.url.startswith(f"{kind}://") and "*" not in plane.url
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with ps.open(plane.url, timeouts=FAST) as line:
        assert line.put(named_group("a"))


def test_a_plane_that_listens_on_all_interfaces_names_one_that_can_be_reached(
    open_plane: OpenPlane, tmp_path: Path
) -> None:
    make_keys(tmp_path / "keys")
    plane = open_plane(ranks=1, listen=["tcp://0.0.0.0:*"], keys=tmp_path / "keys")
    assert "0.0.0.0" not in plane.url
    with ps.open(plane.url, keys=tmp_path / "keys", timeouts=FAST) as line:
        assert line.put(named_group("a"))


def test_a_plane_that_listens_nowhere_has_the_url_it_was_opened_with(open_plane: OpenPlane, tmp_path: Path) -> None:
    assert open_plane(ranks=1).url == "memory:"
    assert open_plane(str(tmp_path / "run"), ranks=1).url == str(tmp_path / "run")


def test_an_address_that_others_can_use_already_stays_as_it_is() -> None:
    for url in ("tcp://host.example:7440", "ipc:///tmp/x", "ipc://@abstract", f"ipc://{'x' * 100}", "ray://plane"):
        assert usable_url(url) == url
    assert usable_url("tcp://[::]:7").startswith("tcp://[")
