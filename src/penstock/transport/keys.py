"""CURVE keys: which clients may connect to a plane that other hosts can reach.

A key folder, made by `penstock keys DIR`, holds

    plane.key          the plane's public key          give to every client
    plane.secret       its secret key                  stays with the plane
    client.key/.secret one client's pair               give to ranks and workers
    writer.key/.secret one writer's pair               give to trusted workers
    allowed/*.key      public keys the plane accepts
    writers/*.key      public keys it accepts as writers, whose metadata it trusts

CURVE alone accepts any key. A ZAP handler (`zmq.auth`) decides which keys may connect, and ZAP_ENFORCE_DOMAIN makes the
socket reject all connections while no handler answers. The plane tests this at start: if an unknown key is accepted, it
does not start.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from penstock.atomic import read_small
from penstock.errors import ConfigError

_DOMAIN = "penstock"
_MAX_KEY_FILE = 4096
"""In bytes. A key has 40."""
_REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_DISCONNECTED,
)
WRITER = "writer"
"""The user id of connections opened with a writer key."""


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
            raise ConfigError(
                f"{root / 'allowed'}: no client keys, so no client could connect; make one with `penstock keys DIR`"
            )
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
    """The plane's public key. A client connects to no other plane."""

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
    """Make a key folder, or add clients and writers to one. Never overwrites a key. Returns the files made."""
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    for part in (root, root / "allowed", root / "writers"):
        part.mkdir(exist_ok=True)
        part.chmod(0o700)  # regardless of the umask: write access to the folder is the right to add keys
    made: list[Path] = []
    for name in (*(["plane"] if plane else []), *clients, *writers):
        if (root / f"{name}.secret").exists():
            raise ConfigError(f"{root / name}.secret: exists; remove it first to replace it")
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
        key = read_small(path, _MAX_KEY_FILE).strip()
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
    """Raise ConfigError if other users may add keys to a folder. A read-only mount is fine, whatever its mode."""
    try:
        mode = path.stat().st_mode & 0o777
        is_fixed = os.statvfs(path).f_flag & os.ST_RDONLY
    except OSError:
        return  # a missing folder is reported when its files are read
    except ValueError as error:  # a path with NUL
        raise ConfigError(f"keys {str(path)!r}: {error}; give the folder that `penstock keys` made") from None
    if mode & 0o022 and not is_fixed:
        raise ConfigError(f"{path}: others may write there and add keys (mode {mode:o}); run chmod 700 on it")


def _read_secret(path: Path) -> bytes:
    key = _read(path)
    mode = path.stat().st_mode & 0o077
    if mode:
        raise ConfigError(f"{path}: others may read it (mode {path.stat().st_mode & 0o777:o}); run chmod 600 on it")
    return key


class Guard:
    """Accepts connections with known keys only. Runs pyzmq's ZAP authenticator in a thread."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        allowed: frozenset[bytes],
        writers: frozenset[bytes] = frozenset(),
    ) -> None:
        from zmq.auth.thread import ThreadAuthenticator  # imports zmq.asyncio, which clients do not need

        class Authenticator(ThreadAuthenticator):
            def curve_user_id(self, client_public_key: bytes) -> str:
                """Mark a writer's connection, so that the plane can tell its messages from those of other clients."""
                return WRITER if z85.encode(client_public_key) in writers else "client"

        self._allowed = set(allowed | writers)
        self._authenticator = Authenticator(context)
        self._authenticator.configure_curve_callback(_DOMAIN, self)
        self._authenticator.start()

    def callback(self, _domain: str, key: bytes) -> bool:
        """Return whether a key may connect. Called by the authenticator, on its thread."""
        return key in self._allowed

    def allow(self, public: bytes) -> None:
        """Accept a key from now on."""
        self._allowed.add(public)

    def revoke(self, public: bytes) -> None:
        """Revoke a key. Open connections stay open."""
        self._allowed.discard(public)

    def stop(self) -> None:
        """Stop answering. New connections are rejected from then on."""
        self._authenticator.stop()


def guard(context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], keys: PlaneKeys) -> Guard:
    """Require keys on a socket. Call it before binding."""
    handler = Guard(context, keys.allowed, keys.writers)
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    socket.zap_domain = _DOMAIN.encode()
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    return handler


def refuse_strangers(url: str, keys: PlaneKeys, handler: Guard, timeout_s: float = 3.0) -> None:
    """Connect with an unknown key, without a key, and with an allowed key. Raise unless only the last succeeds.

    The allowed key is tried because an address that cannot be reached at all would pass the other two checks.
    """
    public, secret = zmq.curve_keypair()
    known = ClientKeys(public=public, secret=secret, plane=keys.public)
    reachable = _reachable(url)
    for who, pair in (("an unknown key", known), ("a client without a key", None)):
        if _connects(reachable, pair, timeout_s):
            raise ConfigError(f"address {url!r}: {who} was accepted; the plane does not start unprotected")
    handler.allow(public)
    try:
        if not _connects(reachable, known, timeout_s):
            raise ConfigError(f"address {url!r}: an allowed key was rejected, so no client could connect")
    finally:
        handler.revoke(public)


def _reachable(url: str) -> str:
    """Return an address that this host can connect to: loopback, where the address means all interfaces."""
    return url.replace("tcp://0.0.0.0:", "tcp://127.0.0.1:").replace("tcp://[::]:", "tcp://[::1]:")


def _connects(url: str, keys: ClientKeys | None, timeout_s: float) -> bool:
    """Return whether the plane at an address accepts these keys."""
    from zmq.utils.monitor import recv_monitor_message  # imports asyncio, which clients do not need

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
