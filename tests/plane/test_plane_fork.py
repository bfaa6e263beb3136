"""A forked process has the plane's memory and none of its threads: it must say so, and hold nothing."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import penstock as ps
from tests.support.groups import named_group
from tests.support.pace import pace
from tests.support.planes import OpenPlane
from tests.support.torture import address

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")]


def in_child(act: Callable[[], object]) -> str:
    """What a forked child says; it must not take long."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        began = time.monotonic()
        try:
            said = f"returned {act()!r}"
        except BaseException as error:  # noqa: BLE001 - the child has nobody else to tell
            said = f"{type(error).__name__}: {error}"
        late = " late" if time.monotonic() - began > 2 * pace() else ""
        os.write(write, f"{said}{late}".encode())
        os._exit(0)
    os.close(write)
    ready, _, _ = select.select([read], [], [], 60)
    said = os.read(read, 4096).decode() if ready else "nothing"
    os.close(read)
    if not ready:
        os.kill(child, 9)
    os.waitpid(child, 0)
    return said


@pytest.mark.parametrize("where", ["memory:", "ipc"])
def test_a_handle_used_in_a_forked_process_raises_at_once(open_plane: OpenPlane, tmp_path: Path, where: str) -> None:
    url = f"ipc://{tmp_path}/plane.sock"
    local = open_plane(ranks=1, groups_per_step=1, listen=[url])
    plane = local if where == "memory:" else ps.open(url)
    plane.put(named_group("a"))
    source = local.source(0) if where == "memory:" else ps.connect(url, rank=0, world=1)
    step = source.step(timeout=120)
    calls: list[Callable[[], object]] = [
        lambda: plane.put(named_group("b"), timeout=3),
        plane.status,
        lambda: plane.policy_version,
        lambda: plane.source(0),
        lambda: source.step(timeout=3),
        lambda: source.commit(step),
        lambda: source.report(step),
        source.flush,
    ]
    for call in calls:
        said = in_child(call)
        assert said.startswith("Closed: opened in another process"), said
        assert not said.endswith("late"), said
    for close in (plane.close, source.close):
        assert in_child(close) == "returned None"
    source.commit(step)  # here all goes on
    source.flush()
    source.close()
    if plane is not local:
        plane.close()


@contextmanager
def child_that_lives() -> Iterator[None]:
    """A forked process that does nothing, until this is done."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # until the parent is done
        os._exit(0)
    try:
        yield
    finally:
        os.close(write)
        os.close(read)
        os.waitpid(child, 0)


def test_a_forked_child_does_not_keep_the_folder_locked(open_plane: OpenPlane, tmp_path: Path) -> None:
    plane = open_plane(tmp_path / "run", ranks=1)
    with child_that_lives():
        plane.close()
        open_plane(tmp_path / "run", ranks=1).close()


@contextmanager
def still_open(folder: Path) -> Iterator[None]:
    """What is open of a folder, or bound in this process, once more: a forked child has it so until it runs."""
    opened = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            target = str(path.readlink())
            if target.startswith((str(folder), "socket:")):
                opened.append(os.dup(int(path.name)))
    try:
        yield
    finally:
        for descriptor in opened:
            os.close(descriptor)


def test_the_folder_is_free_though_a_child_has_not_run_yet(open_plane: OpenPlane, tmp_path: Path) -> None:
    plane = open_plane(tmp_path / "run", ranks=1)
    with still_open(tmp_path / "run"):
        plane.close()
        open_plane(tmp_path / "run", ranks=1).close()


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_the_address_is_free_though_a_child_has_not_run_yet(open_plane: OpenPlane, tmp_path: Path, kind: str) -> None:
    url = address(kind, tmp_path)
    plane = open_plane(listen=[url])
    with still_open(tmp_path):
        plane.close()
        open_plane(listen=[url])
        with ps.open(url) as client:
            client.put(named_group("a"))


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_a_forked_child_does_not_keep_the_address(open_plane: OpenPlane, tmp_path: Path, kind: str) -> None:
    url = address(kind, tmp_path)
    plane = open_plane(listen=[url])
    with child_that_lives():
        plane.close()
        open_plane(listen=[url])
        with ps.open(url) as client:
            client.put(named_group("a"))


def test_who_is_connected_hears_at_once_that_a_plane_with_forked_children_is_gone(
    open_plane: OpenPlane, tmp_path: Path
) -> None:
    url = address("tcp", tmp_path)
    plane = open_plane(listen=[url])
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60) as peer:
        peer.recv(10)  # ZeroMQ's greeting: the connection is the plane's now
        with child_that_lives():
            plane.close()
            while peer.recv(1 << 16):
                pass
