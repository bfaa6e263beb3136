"""A client's thread: it alone touches the carrier, so that heartbeats go on while the program computes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from penstock.errors import CorruptFrame, PenstockError
from penstock.send.carrier import ClientCarrier
from penstock.send.messages import Frames, FromClient, FromPlane, pack_message, read_from_plane

OnMessage = Callable[[FromPlane, Frames, float], None]
OnTick = Callable[[float], None]


class ClientLoop:
    """Sends what it is given, hands over what arrives, and calls `on_tick` at least every `tick_s` seconds.

    `on_message` and `on_tick` run in the client loop's thread. If one of them raises, or the carrier does, the
    client loop ends and calls `on_end` with the error.
    """

    def __init__(
        self,
        carrier: ClientCarrier,
        *,
        on_message: OnMessage,
        on_tick: OnTick,
        on_end: Callable[[BaseException], None],
        tick_s: float,
        name: str,
    ) -> None:
        self._carrier, self._on_message, self._on_tick, self._on_end = carrier, on_message, on_tick, on_end
        self._tick_s = tick_s
        self._outbox: deque[tuple[bytes, Frames]] = deque()
        self._stopping = False
        self._closing, self._closed = threading.Lock(), False
        self._thread = threading.Thread(target=self._work, name=f"penstock-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: FromClient, frames: Frames = ()) -> None:
        """From any thread."""
        self._outbox.append((pack_message(message), frames))
        self._wake()

    def _wake(self) -> None:
        with self._closing:
            if not self._closed and threading.current_thread() is not self._thread:
                self._carrier.wake()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Send what is still to be sent, then end."""
        self._stopping = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _work(self) -> None:
        try:
            while not (self._stopping and not self._outbox):
                self._turn()
        except (PenstockError, OSError) as error:
            self._on_end(error)
        except BaseException as error:
            self._on_end(error)
            raise
        finally:
            with self._closing:  # nobody may wake a carrier that is being closed
                self._closed = True
                self._carrier.close()

    def _turn(self) -> None:
        while self._outbox:
            header, frames = self._outbox.popleft()
            self._carrier.send(header, frames)
        got = None if self._stopping else self._carrier.receive(self._tick_s)
        now = time.monotonic()
        if got is not None:
            try:
                message = read_from_plane(got[0])
            except CorruptFrame:
                return  # as if it had been lost: it will be asked for again
            self._on_message(message, got[1], now)
        self._on_tick(now)
