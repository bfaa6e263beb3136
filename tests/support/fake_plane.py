"""A hostile plane: a socket that answers clients with whatever a test gives it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self, TypeAlias

import zmq

from penstock.protocol import Attached, FromClient, FromPlane, read_from_client
from penstock.protocol.message_header import pack_message

RUN = bytes(range(16))
Answer: TypeAlias = Callable[[FromClient], Sequence[FromPlane]]


def attached(ticket: int, *, storage: str = "") -> Attached:
    """First contact: everything is allowed, and there is room."""
    return Attached(
        ticket=ticket,
        run_id=RUN,
        run="run",
        epoch=1,
        ranks=1,
        credit_groups=100,
        credit_bytes=1 << 30,
        storage=storage,
        may_write=bool(storage),
        seq_len=64,
    )


class FakePlane:
    """Answers each message in a thread of its own, while the block runs."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind("tcp://127.0.0.1:*")
        self.url = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._thread.join()
        self._socket.close(linger=0)
        self._context.term()

    def _run(self) -> None:
        while not self._ending.is_set():
            if self._socket.poll(20):
                peer, header, *_ = self._socket.recv_multipart()
                for message in self._answer(read_from_client(header)):
                    self._socket.send_multipart([peer, pack_message(message, RUN)])
