"""One suite over all transports, and what strangers may throw at each of them."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from random import Random

import pytest
import zmq

from penstock.errors import ConfigError
from penstock.protocol.message_header import pack_message, read_from_client
from penstock.protocol.messages import BEHIND, Beat
from penstock.testing.transport_suite import Ends, RestartableSuite, TransportSuite, answer, hear
from penstock.transport.files import FileClient, FilePlane
from penstock.transport.memory import MemoryPlane
from penstock.transport.sockets import SocketClient, SocketPlane
from tests.support.ports import free_port
from tests.support.proxy import Proxy


class TestMemory(TransportSuite):
    def ends(self, folder: Path) -> Ends:
        plane = MemoryPlane()
        return Ends(plane=lambda: plane, client=lambda: plane.connect())


class TestTcp(RestartableSuite):
    def ends(self, folder: Path) -> Ends:
        url = f"tcp://127.0.0.1:{free_port()}"
        return Ends(plane=lambda: SocketPlane(url), client=lambda: SocketClient(url))


class TestIpc(RestartableSuite):
    def ends(self, folder: Path) -> Ends:
        url = f"ipc://{folder}/plane.sock"
        return Ends(plane=lambda: SocketPlane(url), client=lambda: SocketClient(url))


class TestFiles(RestartableSuite):
    def ends(self, folder: Path) -> Ends:
        return Ends(plane=lambda: FilePlane(folder), client=lambda: FileClient(folder))


# ------------------------------------------------------------------ sockets


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\x00", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"\xff" * 70_000],
    ids=["nothing", "zero", "http", "tls", "flood"],
)
def test_garbage_on_the_port_is_ignored(garbage: bytes) -> None:
    plane = SocketPlane()
    host, port = plane.url.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(garbage)
        client = SocketClient(plane.url)
        client.send(b"hello")
        assert [header for _, header, _ in hear(plane, 1)] == [b"hello"]
    client.close()
    plane.close()


def test_messages_of_too_many_parts_are_dropped() -> None:
    plane = SocketPlane()
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(plane.url)
    stranger.send_multipart([b"x"] * 1000)
    stranger.send_multipart([b"after"])
    assert [header for _, header, _ in hear(plane, 1)] == [b"after"]
    stranger.close(linger=0)
    context.term()
    plane.close()


def test_damaged_headers_are_refused_and_whole_ones_are_not() -> None:
    good = pack_message(Beat(session=7))
    assert read_from_client(good) == Beat(session=7)
    rng = Random(3)
    damaged = [good[:n] for n in range(len(good))] + [good + b"x", b"\x90" * 1000]
    damaged += [bytes([*good[:i], good[i] ^ (1 << rng.randrange(8)), *good[i + 1 :]]) for i in range(len(good))]
    for bytes_ in damaged:
        with pytest.raises(ValueError, match="message"):
            read_from_client(bytes_)


def test_a_second_plane_does_not_take_an_address_from_a_live_one(tmp_path: Path) -> None:
    first = SocketPlane(f"ipc://{tmp_path}/plane.sock")
    with pytest.raises(ConfigError, match="another plane"):
        SocketPlane(first.url)
    tcp = SocketPlane()
    with pytest.raises(ConfigError, match="another plane"):
        SocketPlane(tcp.url)
    tcp.close()
    first.close()


def test_the_socket_of_a_plane_is_its_owners_alone(tmp_path: Path) -> None:
    plane = SocketPlane(f"ipc://{tmp_path}/plane.sock")
    assert (tmp_path / "plane.sock").stat().st_mode & 0o777 == 0o600
    plane.close()


# ------------------------------------------------------------------ files


def _one_message(folder: Path) -> tuple[FilePlane, Path, bytes]:
    plane, client = FilePlane(folder), FileClient(folder)
    client.send(b"header", [b"payload" * 20])
    (path,) = (folder / "plane").glob("*.msg")
    return plane, path, path.read_bytes()


def test_a_file_that_is_cut_anywhere_is_ignored_and_removed(tmp_path: Path) -> None:
    plane, path, whole = _one_message(tmp_path)
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        assert plane.receive() == []
        assert not path.exists()
    path.write_bytes(whole + b"x")
    assert plane.receive() == []
    path.write_bytes(whole)
    assert len(plane.receive()) == 1


def test_a_file_with_a_flipped_bit_is_ignored(tmp_path: Path) -> None:
    plane, path, whole = _one_message(tmp_path)
    rng = Random(4)
    for i in range(len(whole)):
        path.write_bytes(bytes([*whole[:i], whole[i] ^ (1 << rng.randrange(8)), *whole[i + 1 :]]))
        assert plane.receive() == []


def test_whatever_else_lies_in_the_folder_stops_nobody(tmp_path: Path) -> None:
    plane = FilePlane(tmp_path)
    inbox, name = tmp_path / "plane", "c" + "0" * 16 + "-" + "0" * 19
    (tmp_path / "secret").write_text("secret")
    os.mkfifo(inbox / f"{name}1.msg")
    (inbox / f"{name}2.msg").mkdir()
    (inbox / f"{name}3.msg").symlink_to(tmp_path / "secret")
    (inbox / "notes.txt").write_text("hello")
    (inbox / ".half-written").write_text("x")
    client = FileClient(tmp_path)
    client.send(b"hello")
    assert [bytes(header) for _, header, _ in plane.receive()] == [b"hello"]
    assert (tmp_path / "secret").read_text() == "secret"


def test_what_nobody_will_read_is_swept_at_the_next_start(tmp_path: Path) -> None:
    FilePlane(tmp_path)
    old, new = FileClient(tmp_path), FileClient(tmp_path)
    (tmp_path / "plane" / ".half-written").write_text("x")
    two_days_ago = time.time() - 2 * 86_400
    for path in (tmp_path / "plane" / ".half-written", *list((tmp_path / "clients").iterdir())[:1]):
        os.utime(path, (two_days_ago, two_days_ago))
    plane = FilePlane(tmp_path)
    assert len(list((tmp_path / "clients").iterdir())) == 1
    assert not list((tmp_path / "plane").iterdir())
    for client in (old, new):  # a client that was only silent makes its folder again
        client.send(b"hello")
    assert len(plane.receive()) == 2


# ------------------------------------------------------------------ slow links


def test_what_is_small_does_not_wait_behind_what_is_large() -> None:
    plane = SocketPlane()
    with Proxy(plane.url) as proxy:
        client = SocketClient(proxy.url)
        client.send(b"hello")
        client.send(b"hello with a payload", [b"x"])
        peer, _, _ = hear(plane, 2)[0]
        proxy.up.bytes_per_s = proxy.down.bytes_per_s = 2_000_000
        large = [b"x" * 2_000_000]
        plane.send(peer, b"step", large)
        plane.send(peer, b"behind the step", BEHIND)
        plane.send(peer, b"pulse")
        assert [answer(client)[0] for _ in range(3)] == [b"pulse", b"step", b"behind the step"]
        client.send(b"group", large)
        client.send(b"beat")
        assert [header for _, header, _ in hear(plane, 2)] == [b"beat", b"group"]
        client.close()
    plane.close()
