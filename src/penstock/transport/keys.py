"""CURVE keys: who may talk to a plane that other hosts can reach.

A key folder, made by `penstock keys DIR`, holds

    plane.key          the plane's public key          give to every client
    plane.secret       its secret key                  stays with the plane
    client.key/.secret one client's pair               give to ranks and workers
    writer.key/.secret one writer's pair               give to trusted workers
    allowed/*.key      public keys the plane accepts
    writers/*.key      public keys it accepts as writers, which may vouch for metadata

CURVE alone accepts any key: a ZAP handler decides, and ZAP_ENFORCE_DOMAIN makes the socket refuse everybody
while no handler answers. The plane proves this at start: a stranger must be turned away, or it does not start.
"""

from __future__ import annotations

import os
import struct
import threading
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from penstock.errors import ConfigError

_DOMAIN = b"penstock"
_REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_DISCONNECTED,
)
_ZAP = "inproc://zeromq.zap.01"
WRITER = "writer"
"""The user id of connections that a writer's key opened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneKeys:
    public: bytes
    secret: bytes
    allowed: frozenset[bytes]
    """Public keys of the clients that may connect."""
    writers: frozenset[bytes] = frozenset()
    """Public keys of the writers that may connect."""

    @staticmethod
    def load(folder: str | Path) -> PlaneKeys:
        root = Path(folder)
        for part in (root, root / "allowed", root / "writers"):
            _check_folder(part)
        allowed, writers = (
            frozenset(_read(path) for path in sorted((root / name).glob("*.key"))) for name in ("allowed", "writers")
        )
        if not allowed:
            raise ConfigError(f"{root / 'allowed'}: no client keys; without one nobody could connect")
        return PlaneKeys(
            public=_read(root / "plane.key"),
            secret=_read_secret(root / "plane.secret"),
            allowed=allowed,
            writers=writers,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientKeys:
    public: bytes
    secret: bytes
    plane: bytes
    """The plane's public key: a client talks to nobody else."""

    @staticmethod
    def load(folder: str | Path, name: str = "client") -> ClientKeys:
        root = Path(folder)
        _check_folder(root)
        return ClientKeys(
            public=_read(root / f"{name}.key"),
            secret=_read_secret(root / f"{name}.secret"),
            plane=_read(root / "plane.key"),
        )

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret
        socket.curve_serverkey = self.plane


def make_keys(
    folder: str | Path,
    clients: tuple[str, ...] = ("client",),
    *,
    writers: tuple[str, ...] = (),
    plane: bool = True,
) -> list[Path]:
    """Make a key folder, or add clients and writers to one; existing keys are never overwritten. Returns the files
    made."""
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    for part in (root, root / "allowed", root / "writers"):
        part.mkdir(exist_ok=True)
        part.chmod(0o700)  # whatever the umask is: whoever can write there can let anybody in
    made: list[Path] = []
    for name in (*(["plane"] if plane else []), *clients, *writers):
        if (root / f"{name}.secret").exists():
            raise ConfigError(f"{root / name}.secret: exists; remove it first if it is to be replaced")
        public, secret = zmq.curve_keypair()
        made += [_write(root / f"{name}.secret", secret, 0o600), _write(root / f"{name}.key", public, 0o644)]
        if name != "plane":
            made.append(_write(root / ("writers" if name in writers else "allowed") / f"{name}.key", public, 0o644))
    return made


def _write(path: Path, key: bytes, mode: int) -> Path:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:  # noqa: PTH123
        file.write(key + b"\n")
    return path


def _read(path: Path) -> bytes:
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; make keys with `penstock keys DIR`") from None
    if len(key) != 40:
        raise ConfigError(f"{path}: {len(key)} characters; a CURVE key has 40")
    try:
        z85.decode(key)
    except (KeyError, ValueError, struct.error):
        raise ConfigError(f"{path}: not a CURVE key; make one with `penstock keys DIR`, or remove the file") from None
    return key


def _check_folder(path: Path) -> None:
    """Raise ConfigError if others may put keys into a folder. A read-only mount is fine, whatever its mode."""
    try:
        mode = path.stat().st_mode & 0o777
        is_fixed = os.statvfs(path).f_flag & os.ST_RDONLY
    except OSError:
        return  # what is missing is reported where it is read
    if mode & 0o022 and not is_fixed:
        raise ConfigError(f"{path}: others may write there, and so let anybody in (mode {mode:o}); run chmod 700 on it")


def _read_secret(path: Path) -> bytes:
    key = _read(path)
    mode = path.stat().st_mode & 0o077
    if mode:
        raise ConfigError(f"{path}: others may read it (mode {path.stat().st_mode & 0o777:o}); run chmod 600 on it")
    return key


class Guard:
    """The ZAP handler: a thread that lets known keys in and nobody else."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        allowed: frozenset[bytes],
        writers: frozenset[bytes] = frozenset(),
    ) -> None:
        self._allowed = {z85.decode(key) for key in allowed | writers}
        self._writers = {z85.decode(key) for key in writers}
        self._socket = context.socket(zmq.REP)
        self._socket.bind(_ZAP)
        self._stop = context.socket(zmq.PAIR)
        self._stopped = context.socket(zmq.PAIR)
        self._stopped.bind("inproc://penstock-guard")
        self._stop.connect("inproc://penstock-guard")
        self._thread = threading.Thread(target=self._serve, name="penstock-guard", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stopped, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stopped in ready:
                break
            self._answer(self._socket.recv_multipart())
        self._socket.close(linger=0)
        self._stopped.close(linger=0)

    def _answer(self, request: list[bytes]) -> None:
        version, number, domain, _address, _identity, mechanism, *credentials = request
        known = len(credentials) == 1 and credentials[0] in self._allowed
        good = version == b"1.0" and domain == _DOMAIN and mechanism == b"CURVE" and known
        code, text = (b"200", b"OK") if good else (b"400", b"unknown key")
        user = WRITER.encode() if good and credentials[0] in self._writers else b""
        self._socket.send_multipart([b"1.0", number, code, text, user, b""])

    def admit(self, public: bytes) -> None:
        """Let a key in from now on."""
        self._allowed.add(z85.decode(public))

    def dismiss(self, public: bytes) -> None:
        """Let it in no more; who is in stays."""
        self._allowed.discard(z85.decode(public))

    def stop(self) -> None:
        if self._thread.is_alive():
            self._stop.send(b"")
            self._thread.join()
        self._stop.close(linger=0)


def guard(context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], keys: PlaneKeys) -> Guard:
    """Secure a socket that is about to be bound."""
    handler = Guard(context, keys.allowed, keys.writers)
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    socket.zap_domain = _DOMAIN
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    return handler


def refuse_strangers(url: str, keys: PlaneKeys, handler: Guard, timeout_s: float = 3.0) -> None:
    """Knock as a stranger with a fresh key, as one without any, and as a friend; raise unless only the last gets in.

    The friend is there so that a door nobody can reach does not pass for one that is guarded.
    """
    public, secret = zmq.curve_keypair()
    known = ClientKeys(public=public, secret=secret, plane=keys.public)
    place = _reachable(url)
    for who, pair in (("a stranger's key", known), ("no key", None)):
        if _gets_in(place, pair, timeout_s):
            raise ConfigError(f"address {url!r}: {who} was let in; the plane does not start on an open door")
    handler.admit(public)
    try:
        if not _gets_in(place, known, timeout_s):
            raise ConfigError(f"address {url!r}: a key that is allowed was not let in; nobody could connect")
    finally:
        handler.dismiss(public)


def _reachable(url: str) -> str:
    return url.replace("tcp://0.0.0.0:", "tcp://127.0.0.1:").replace("tcp://[::]:", "tcp://[::1]:")


def _gets_in(url: str, keys: ClientKeys | None, timeout_s: float) -> bool:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IPV6, 1)
    if keys is not None:
        keys.apply(socket)
    monitor = socket.get_monitor_socket()
    try:
        socket.connect(url)
        while monitor.poll(int(timeout_s * 1000)):
            event = recv_monitor_message(monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return True
            if event in _REFUSALS:
                return False
        return False
    finally:
        socket.disable_monitor()
        monitor.close(linger=0)
        socket.close(linger=0)
        context.term()
