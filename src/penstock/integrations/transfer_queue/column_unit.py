"""A storage unit, which owns a folder of columns and serves it over one socket, and the client's connection to it.

Requests are msgpack of fixed records. The bytes of columns follow as separate message parts, without a copy. Puts that
arrive together are stored with one sync and acknowledged after it. Every request may be repeated: a repeated put
replaces itself, and the others change nothing the second time.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
import zmq

from penstock import errors
from penstock.errors import CorruptFrame, InvalidInput, PenstockError, PlaneLost, UnknownKey
from penstock.frames import Buffer
from penstock.integrations.transfer_queue.column_store import Block, Cells, ColumnStore
from penstock.server import is_loopback
from penstock.transport import ClientKeys, Guard, PlaneKeys, guard

logger = logging.getLogger("penstock.columns")
_LOOK_S = 0.25
MAX_MESSAGE = 2**31 - 1
_SAVED = re.compile(r"penstock-\d{1,6}-of-\d{1,6}")
Where = tuple[str, int] | tuple[str, int, bytes, bytes, bytes]
"""(address, life): a restarted unit has another life, the number of openings of its folder. Beyond loopback also keys:
the unit's public key, the client's public and secret key. A process that gets the address over Ray may connect."""
Row: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class Put(msgspec.Struct, frozen=True, tag=True):
    rows: tuple[Row, ...]
    columns: tuple[Cells, ...]


class Get(msgspec.Struct, frozen=True, tag=True):
    rows: tuple[Row, ...]
    names: tuple[str, ...]


class Clear(msgspec.Struct, frozen=True, tag=True):
    rows: tuple[Row, ...]


class Save(msgspec.Struct, frozen=True, tag=True):
    """Write everything into a new folder."""

    folder: str


class Load(msgspec.Struct, frozen=True, tag=True):
    """Replace everything with what was saved in a folder."""

    folder: str


Request = Put | Get | Clear | Save | Load


class Done(msgspec.Struct, frozen=True, tag=True):
    columns: tuple[Cells, ...] = ()


class Refused(msgspec.Struct, frozen=True, tag=True):
    kind: str
    """Name of the error's class in penstock.errors."""
    message: str


_READ = msgspec.msgpack.Decoder(Request)
_ANSWERS = msgspec.msgpack.Decoder(Done | Refused)


class Unit:
    """Serves a folder from a thread until closed. Calls `on_failure` if that thread fails.

    Checkpoints are written to and read from folders below `saves_under`, by default the unit's own folder.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        host: str,
        unit: int = 0,
        units: int = 1,
        saves_under: str | Path | None = None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._stopping, self._on_failure = False, on_failure
        self._root = Path(saves_under or folder)
        self._ready = threading.Event()
        self._failed: BaseException | None = None
        self.where: Where = ("", 0)
        self._facts = {"unit": str(unit), "units": str(units)}
        self._thread = threading.Thread(target=self._run, args=(Path(folder), host), name="penstock-unit", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._failed is not None:
            raise self._failed

    def close(self) -> None:
        self._stopping = True
        self._thread.join()

    def _run(self, folder: Path, host: str) -> None:
        try:
            store = ColumnStore(folder, **self._facts)  # SQLite connections belong to one thread
        except BaseException as error:  # noqa: BLE001 - raised in the constructor
            self._failed = error
            self._ready.set()
            return
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
            handler, keys = _secured(context, socket, host)
            port = socket.bind_to_random_port(f"tcp://{host}")
            self.where = (f"tcp://{host}:{port}", store.life, *keys)
            self._ready.set()
            try:
                while not self._stopping:
                    self._turn(store, socket)
            except BaseException:
                logger.exception("a storage unit failed")
                self._on_failure()
                raise
            finally:
                store.close()
                if handler is not None:
                    handler.stop()

    def _turn(self, store: ColumnStore, socket: zmq.Socket[bytes]) -> None:
        if not socket.poll(int(_LOOK_S * 1000)):
            store.sweep()
            return
        puts: list[tuple[list[bytes], Block]] = []
        others: list[tuple[list[bytes], Any]] = []
        while socket.poll(0):
            peer, *parts = socket.recv_multipart(copy=False)
            if len(parts) < 2:
                continue  # not a request of ours
            number, header, *frames = parts
            back = [peer.bytes, number.bytes]
            try:
                request = _READ.decode(header.buffer)
                if isinstance(request, Put):
                    data = tuple(frame.buffer for frame in frames)
                    puts.append((back, Block(rows=request.rows, columns=request.columns, data=data)))
                else:
                    others.append((back, request))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                _refuse(socket, back, CorruptFrame(f"request: {error}"))
        self._put(store, socket, puts)
        for back, request in others:
            try:
                done, found = _answer(store, request, self._root)
                socket.send_multipart([*back, msgspec.msgpack.encode(done), *found], copy=False)
            except Exception as error:  # noqa: BLE001 - affects one request; reported to its sender
                _refuse(socket, back, error)

    def _put(self, store: ColumnStore, socket: zmq.Socket[bytes], puts: Sequence[tuple[list[bytes], Block]]) -> None:
        """Store puts together; if that fails, one by one, so that each sender gets its own error."""
        try:
            if puts:
                store.put([block for _, block in puts])
        except Exception as error:  # noqa: BLE001 - as above
            if len(puts) == 1:
                _refuse(socket, puts[0][0], error)
            else:
                for one in puts:
                    self._put(store, socket, [one])
            return
        for back, _ in puts:
            socket.send_multipart([*back, msgspec.msgpack.encode(Done())])


def _answer(store: ColumnStore, request: Get | Clear | Save | Load, root: Path) -> tuple[Done, Sequence[Buffer]]:
    if isinstance(request, Get):
        found = store.get(request.rows, request.names)
        return Done(found.columns), found.data
    if isinstance(request, Clear):
        store.clear(request.rows)
    elif isinstance(request, Save):
        target = ColumnStore(_folder(request, root))
        try:
            target.replace(store.blocks())
        finally:
            target.close()
    else:
        folder = _folder(request, root)
        if not (folder / "blocks.sqlite").is_file():
            raise UnknownKey(f"{folder}: nothing was saved there; the unit's data is unchanged")
        source = ColumnStore(folder)
        try:
            store.replace(source.blocks())
        finally:
            source.close()
    return Done(), ()


def _folder(request: Save | Load, root: Path) -> Path:
    """Return a checkpoint's folder. It must be below `root`, links resolved, and cannot be a unit's own folder."""
    path = Path(request.folder)
    if not path.is_absolute() or not request.folder.isprintable() or ".." in path.parts:
        raise InvalidInput(f"folder {request.folder[:200]!r}: must be absolute, printable and without ..")
    if not path.resolve().is_relative_to(root.resolve()) or not _SAVED.fullmatch(path.name):
        raise InvalidInput(
            f"folder {request.folder[:200]!r}: must be named penstock-K-of-N and be below {root}; set "
            "backend.Penstock.checkpoints to the folder of your checkpoints"
        )
    return path


_Keys: TypeAlias = tuple[()] | tuple[bytes, bytes, bytes]


def _secured(context: zmq.Context[Any], socket: zmq.Socket[bytes], host: str) -> tuple[Guard | None, _Keys]:
    """Create keys for a unit that other hosts can reach; none on loopback. They last until it is restarted."""
    if is_loopback(host):
        return None, ()
    (public, secret), (client, client_secret) = zmq.curve_keypair(), zmq.curve_keypair()
    handler = guard(context, socket, PlaneKeys(public=public, secret=secret, allowed=frozenset([client])))
    return handler, (public, client, client_secret)


def _refuse(socket: zmq.Socket[bytes], back: list[bytes], error: Exception) -> None:
    logger.warning("request rejected: %s", error)
    kind = type(error).__name__ if isinstance(error, PenstockError) else "StorageError"
    socket.send_multipart([*back, msgspec.msgpack.encode(Refused(kind, str(error)))])


class UnitConnection:
    """A connection to the unit that `locate` finds. Repeats a request if the unit was restarted. For one thread."""

    def __init__(self, locate: Callable[[float], Where | None], *, timeout_s: float) -> None:
        self._locate, self._timeout_s = locate, timeout_s
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._where: Where | None = None
        self._number = 0

    def ask(self, request: Request, data: Sequence[Buffer] = ()) -> tuple[tuple[Cells, ...], list[Buffer]]:
        """Send a request and return the answer's columns and bytes. Raises the unit's error, or PlaneLost."""
        header = msgspec.msgpack.encode(request)
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            if self._socket is None and not self._connect(deadline):
                continue
            frames = self._exchange([header, *data], deadline)
            if frames is not None:
                return self._read(frames)
        raise PlaneLost(f"storage unit at {self._where}: no answer within {self._timeout_s:g} s")

    def _connect(self, deadline: float) -> bool:
        where = self._locate(max(deadline - time.monotonic(), 0.1))
        if where is None:
            return False
        self._where = where
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        if len(where) == 5:
            ClientKeys(public=where[3], secret=where[4], plane=where[2]).apply(self._socket)
        self._socket.connect(where[0])
        return True

    def _exchange(self, parts: list[Buffer], deadline: float) -> list[Any] | None:
        """Send and wait for the answer. Returns None if the unit was restarted in the meantime.

        Requests are numbered: answers to earlier attempts may still arrive and are skipped.
        """
        assert self._socket is not None
        self._number += 1
        number = self._number.to_bytes(8, "big")
        self._socket.send_multipart([number, *parts], copy=False)
        while time.monotonic() < deadline:
            if self._socket.poll(1000):
                got, *frames = self._socket.recv_multipart(copy=False)
                if got.bytes == number:
                    return frames
            elif self._locate(2.0) != self._where:
                self._disconnect()
                return None
        return None

    def _read(self, frames: list[Any]) -> tuple[tuple[Cells, ...], list[Buffer]]:
        answer = _ANSWERS.decode(frames[0].buffer)
        if isinstance(answer, Refused):
            found = getattr(errors, answer.kind, PenstockError)
            raise found(answer.message)
        return answer.columns, [frame.buffer for frame in frames[1:]]

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        self._disconnect()
        self._context.term()
