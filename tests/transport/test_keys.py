"""Who may talk to a plane that other hosts can reach."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

import penstock as ps
from penstock.errors import ConfigError, PeerError
from penstock.testing.transport_suite import hear
from penstock.transport.keys import ClientKeys, Guard, PlaneKeys, _connects, guard, make_keys, refuse_strangers
from penstock.transport.resolving import Address, ResolvingClient
from penstock.transport.sockets import SocketClient, SocketPlane, check_url
from tests.support.pace import eventually


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def plane(folder: Path) -> Iterator[SocketPlane]:
    made = SocketPlane("tcp://127.0.0.1:*", keys=PlaneKeys.load(folder))
    yield made
    made.close()


def _is_heard(plane: SocketPlane, keys: ClientKeys | None) -> bool:
    client = SocketClient(plane.url, keys=keys)
    client.send(b"hello")
    heard = bool(hear(plane, 1, patience_s=2.0 if keys and keys.plane else 0.5))
    client.close()
    return heard


def test_a_client_with_an_allowed_key_connects(plane: SocketPlane, folder: Path) -> None:
    assert _is_heard(plane, ClientKeys.load(folder))


def test_a_client_without_keys_does_not(plane: SocketPlane) -> None:
    assert not _is_heard(plane, None)


def test_a_client_whose_key_is_refused_learns_it_at_once(plane: SocketPlane, folder: Path, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    make_keys(stranger)
    (stranger / "plane.key").write_bytes((folder / "plane.key").read_bytes())
    began = time.monotonic()
    with pytest.raises(PeerError) as refused, ps.open(plane.url, keys=stranger) as opened:
        opened.status()
    assert time.monotonic() - began < 20  # without the refusal it waits `plane_s`, 30 s
    assert (stranger / "client.key").read_text().strip() in str(refused.value)
    with (
        pytest.raises(PeerError, match="refused the key"),
        ps.connect(plane.url, rank=0, world=1, keys=stranger) as one,
    ):
        one.step(timeout=20)


def _error(url: str, keys: Path | None) -> str:
    """What a client waits for in vain, and that it does not wait as for a plane that is away (`plane_s`, 30 s)."""
    began = time.monotonic()
    with pytest.raises(PeerError) as refused, ps.open(url, keys=keys) as opened:
        opened.status()
    assert time.monotonic() - began < 20
    return str(refused.value)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "ipc://{}/sock"])
def test_a_client_with_another_planes_key_learns_it_at_once(address: str, folder: Path) -> None:
    plane = SocketPlane(address.format(folder), keys=PlaneKeys.load(folder))
    make_keys(folder.parent / "other")
    other = (folder.parent / "other" / "plane.key").read_text()
    (folder / "plane.key").write_text(other)
    assert f"the plane has another key than {other.strip()}; copy its plane.key" in _error(plane.url, folder)
    plane.close()


def test_a_client_with_keys_learns_that_the_plane_uses_none(folder: Path) -> None:
    plain = SocketPlane()
    assert "uses no keys" in _error(plain.url, folder)
    plain.close()


def test_a_client_without_keys_learns_that_the_plane_requires_them(plane: SocketPlane) -> None:
    assert "the plane requires keys; pass keys=DIR" in _error(plane.url, None)


def test_the_reason_is_the_same_however_late_it_is_asked_for(plane: SocketPlane) -> None:
    """On a busy machine the refusal comes before the first question."""
    with ps.open(plane.url) as opened, ps.connect(plane.url, rank=0, world=1) as source:
        eventually(lambda: opened._connection.is_closed)
        with pytest.raises(PeerError, match="requires keys"):
            opened.status()
        with pytest.raises(PeerError, match="requires keys"):
            source.step(timeout=60)
        with pytest.raises(PeerError, match="requires keys"):
            source.step(timeout=60)


def test_a_proxy_that_hangs_up_because_its_plane_is_away_is_no_wrong_key(folder: Path) -> None:
    listener, hung_up = socket.create_server(("127.0.0.1", 0)), []

    def hang_up() -> None:
        with suppress(OSError):
            while True:
                listener.accept()[0].close()
                hung_up.append(1)

    threading.Thread(target=hang_up, daemon=True).start()
    client = SocketClient(f"tcp://127.0.0.1:{listener.getsockname()[1]}", keys=ClientKeys.load(folder))
    while len(hung_up) < 10:  # among them the client's own look at what is there
        assert client.receive(0.1) is None
    client.close()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_a_client_of_a_plane_that_moves_asks_again_when_its_key_is_refused(plane: SocketPlane, folder: Path) -> None:
    known = ClientKeys.load(folder)
    public, secret = zmq.curve_keypair()
    addresses = [Address(plane.url, ClientKeys(public=public, secret=secret, plane=known.plane))]
    client = ResolvingClient(lambda: addresses[-1], first=addresses[0], silence_s=0.2)
    client.send(b"lost")
    addresses.append(Address(plane.url, known))
    deadline, heard = time.monotonic() + 60, False
    while not heard and time.monotonic() < deadline:
        assert client.receive(0.05) is None
        client.send(b"again")
        heard = bool(plane.receive())
    client.close()
    assert heard


def test_every_client_named_gets_a_key_of_its_own(tmp_path: Path) -> None:
    make_keys(tmp_path, clients=("trainer", "worker"))
    keys = PlaneKeys.load(tmp_path)
    assert {ClientKeys.load(tmp_path, name).public for name in ("trainer", "worker")} == keys.allowed


def test_the_plane_tells_a_writer_from_a_client_by_its_key(tmp_path: Path) -> None:
    make_keys(tmp_path, writers=("writer",))
    keys = PlaneKeys.load(tmp_path)
    assert keys.writers == {ClientKeys.load(tmp_path, "writer").public} and not keys.writers & keys.allowed
    plane = SocketPlane("tcp://127.0.0.1:*", keys=keys)
    found = {}
    for name in ("client", "writer"):
        client = SocketClient(plane.url, keys=ClientKeys.load(tmp_path, name))
        client.send(name.encode())
        ((peer, header, _),) = hear(plane, 1)
        found[bytes(header).decode()] = plane.is_writer(peer)
        client.close()
    plane.close()
    assert found == {"client": False, "writer": True}


@pytest.mark.parametrize("url", ["tcp://0.0.0.0:7440", "tcp://*:7440", "tcp://10.1.2.3:7440", "tcp://[::]:7440"])
def test_an_address_others_can_reach_needs_keys(url: str) -> None:
    with pytest.raises(ConfigError, match="no keys"):
        check_url(url, secured=False)
    with pytest.raises(ConfigError, match="no keys"):
        SocketPlane(url)
    check_url(url, secured=True)


@pytest.mark.parametrize("url", ["tcp://127.0.0.1:*", "tcp://localhost:1", "tcp://[::1]:5", "tcp://127.9.9.9:1"])
def test_loopback_needs_none(url: str) -> None:
    check_url(url, secured=False)


@pytest.mark.parametrize("url", ["tcp://host", "http://x:1", "inproc://x", "tcp://:1", "ipc://", "tcp://a:b"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="must be"):
        check_url(url, secured=True)


class _Unlocked:
    """A CURVE socket that lets every key in, as one without a ZAP handler does."""

    def __init__(self, keys: PlaneKeys) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.curve_server = True
        self.socket.curve_publickey, self.socket.curve_secretkey = keys.public, keys.secret
        self.socket.bind("tcp://127.0.0.1:*")
        self.url = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()


@pytest.mark.parametrize(
    ("make", "problem"),
    [(_Unlocked, "an unknown key was accepted"), (lambda _: SocketPlane(), "without a key was accepted")],
    ids=["any key", "no keys"],
)
def test_the_self_test_finds_a_socket_that_accepts_everyone(
    make: Callable[[PlaneKeys], _Unlocked | SocketPlane], problem: str, folder: Path
) -> None:
    keys = PlaneKeys.load(folder)
    other: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    handler, made = Guard(other, keys.allowed), make(keys)
    with pytest.raises(ConfigError, match=problem):
        refuse_strangers(made.url, keys, handler)
    made.close()
    handler.stop()
    other.term()


def test_when_the_guard_stops_nobody_connects_and_the_self_test_says_so(folder: Path) -> None:
    keys = PlaneKeys.load(folder)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    handler = guard(context, socket, keys)
    socket.bind("tcp://127.0.0.1:*")
    url = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    refuse_strangers(url, keys, handler)
    handler.stop()
    assert not _connects(url, ClientKeys.load(folder), 1.0)
    with pytest.raises(ConfigError, match="no client could connect"):
        refuse_strangers(url, keys, handler, timeout_s=1.0)
    socket.close(linger=0)
    context.term()


def test_secrets_are_their_owners_alone(folder: Path) -> None:
    assert folder.stat().st_mode & 0o777 == 0o700
    for secret in folder.glob("*.secret"):
        assert secret.stat().st_mode & 0o777 == 0o600
    (folder / "plane.secret").chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        PlaneKeys.load(folder)


def test_secrets_are_never_overwritten(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="exists"):
        make_keys(folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["plane.key", "plane.secret"])
def test_a_key_that_is_missing_or_short_is_named(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"short\n")
    (folder / name).chmod(0o600)
    with pytest.raises(ConfigError, match=f"{name}: 5 characters"):
        PlaneKeys.load(folder)
    (folder / name).unlink()
    with pytest.raises(ConfigError, match="make keys"):
        PlaneKeys.load(folder)


def test_a_plane_without_any_client_key_does_not_start(folder: Path) -> None:
    (folder / "allowed" / "client.key").unlink()
    with pytest.raises(ConfigError, match="no client keys"):
        PlaneKeys.load(folder)


@pytest.mark.parametrize("part", ["", "allowed", "writers"])
def test_a_key_folder_that_others_may_write_is_rejected(folder: Path, part: str) -> None:
    for mode in (0o777, 0o720, 0o702):
        (folder / part).chmod(mode)
        with pytest.raises(ConfigError, match=rf"others may write there.*mode {mode:o}.*chmod 700"):
            PlaneKeys.load(folder)
    (folder / part).chmod(0o755)
    assert PlaneKeys.load(folder).allowed


def test_a_client_rejects_a_key_folder_that_others_may_write(folder: Path) -> None:
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="others may write there"):
        ClientKeys.load(folder)


def test_keys_made_under_any_umask_are_taken(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_keys(tmp_path / "keys")
    finally:
        os.umask(before)
    assert PlaneKeys.load(tmp_path / "keys").allowed


@pytest.mark.parametrize("text", ["~" * 40, "\x00" * 40, "é" * 20])
def test_a_file_in_allowed_that_is_no_key_is_named(folder: Path, text: str) -> None:
    (folder / "allowed" / "bad.key").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"allowed/bad\.key: not a CURVE key"):
        PlaneKeys.load(folder)


@pytest.mark.parametrize("name", ["plane.key", "plane.secret", "allowed/other.key"])
def test_a_pipe_or_an_endless_file_in_a_key_folder_is_named(tmp_path: Path, name: str) -> None:
    make_keys(tmp_path)
    path = tmp_path / name
    path.unlink(missing_ok=True)
    os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError, match="no regular file"):
        PlaneKeys.load(tmp_path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="no regular file"):
        PlaneKeys.load(tmp_path)
    path.unlink()
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match="larger than 4,096 bytes"):
        PlaneKeys.load(tmp_path)
