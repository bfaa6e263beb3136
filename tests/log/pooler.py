"""A transaction pooler in a page: a client's transactions meet one of two sessions in turn. Trusts everybody."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from itertools import cycle


class Pooler:
    """Answers with the key of one session, as PgBouncer answers with one of its own."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._client, args=(client,), daemon=True).start()

    def _client(self, client: socket.socket) -> None:
        with suppress(OSError, struct.error), client:
            startup = _startup(client)
            where = ("127.0.0.1", self._server_port)
            with socket.create_connection(where) as one, socket.create_connection(where) as other:
                for server in (one, other):
                    server.sendall(startup)
                answers = [_until_ready(server) for server in (one, other)]
                client.sendall(answers[0])
                for server in cycle([other, one]):
                    asked = client.recv(1 << 16)
                    if not asked:
                        return
                    server.sendall(asked)
                    client.sendall(_until_ready(server))


def _startup(client: socket.socket) -> bytes:
    while True:
        size = client.recv(4, socket.MSG_WAITALL)
        rest = client.recv(struct.unpack("!I", size)[0] - 4, socket.MSG_WAITALL)
        if rest[:4] not in (struct.pack("!I", 80877103), struct.pack("!I", 80877104)):
            return size + rest
        client.sendall(b"N")  # no TLS, no GSSAPI


def _until_ready(server: socket.socket) -> bytes:
    found = b""
    while True:
        head = server.recv(5, socket.MSG_WAITALL)
        body = server.recv(struct.unpack("!I", head[1:])[0] - 4, socket.MSG_WAITALL)
        found += head + body
        if head[:1] == b"Z":
            return found
