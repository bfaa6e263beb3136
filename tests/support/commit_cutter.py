"""A proxy before PostgreSQL that cuts connections where it hurts: just before a COMMIT, or just after it.

with CommitCutter(server.port) as proxy:
    proxy.cut = "answer"      # the next COMMIT is done, and its answer never arrives
    proxy.cut = "question"    # the next COMMIT never arrives
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, Self

_COMMIT = b"COMMIT\0"


class CommitCutter:
    """Passes bytes between clients and a server on this host."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.cut: Literal["", "answer", "question"] = ""
        """What happens to the next COMMIT; empty again once it has happened."""
        self.cuts = 0
        self.is_away = False
        """Refuse new connections, as while a server is down."""
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def drop_all(self) -> None:
        """Cut every connection."""
        for one in list(self._open):
            _end(one)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _end(self._listener)  # wakes the thread that accepts
        self.drop_all()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _start(self, target: Callable[..., None], *values: object) -> None:
        thread = threading.Thread(target=target, args=values, name="commit-cutter", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.is_away:
                    client.close()
                else:
                    self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), client, socket.create_connection(("127.0.0.1", self._server_port)) as server:
            self._open |= {client, server}
            try:
                while True:
                    for source in select.select([client, server], [], [])[0]:
                        data = source.recv(1 << 16)
                        if not data or self._is_cut("question" if source is client else "answer", data):
                            return
                        (server if source is client else client).sendall(data)
            finally:
                self._open -= {client, server}

    def _is_cut(self, kind: str, data: bytes) -> bool:
        if self.cut != kind or _COMMIT not in data:
            return False
        self.cut = ""
        self.cuts += 1
        return True


def _end(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
