"""A client's background thread. Only it uses the transport, so that heartbeats continue while the program computes."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable

from penstock.errors import Closed, CorruptFrame, PenstockError, PlaneLost
from penstock.protocol import Frames, FromClient, FromPlane, pack_message, read_from_plane
from penstock.transport import ClientTransport, Envelope

OnMessage = Callable[[FromPlane, Frames, float], None]
OnTick = Callable[[float], None]


class ClientLoop:
    """Sends queued messages, passes on what arrives, and calls `on_tick` at least every `tick_s` seconds.

    `on_message` and `on_tick` run in the loop's thread. If one of them or the transport raises, the loop ends and calls
    `on_end` with the error.
    """

    def __init__(
        self,
        transport: ClientTransport,
        *,
        on_message: OnMessage,
        on_tick: OnTick,
        on_end: Callable[[BaseException], None],
        tick_s: float,
        name: str,
    ) -> None:
        self._transport, self._on_message, self._on_tick, self._on_end = transport, on_message, on_tick, on_end
        self._tick_s, self._pid = tick_s, os.getpid()
        self._tick_at = 0.0
        self._outbox: deque[tuple[bytes, Frames]] = deque()
        self._stopping = False
        self._closing, self._closed = threading.Lock(), False
        self._thread = threading.Thread(target=self._work, name=f"penstock-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def check_process(self) -> None:
        """Raise Closed in a forked process: threads, locks and connections do not survive a fork, so a call would
        hang."""
        if not self.is_mine:
            raise Closed(
                f"opened in another process ({self._pid}), this one ({os.getpid()}) was forked from it; open the "
                "plane, or connect the source, in the process that uses it"
            )

    @property
    def is_mine(self) -> bool:
        """Whether this process, and not its parent before a fork, started it."""
        return os.getpid() == self._pid

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def send(self, message: FromClient, frames: Frames, run_id: bytes) -> None:
        """Queue a message. May be called from any thread."""
        self._outbox.append((pack_message(message, run_id), frames))
        self._wake()

    def _wake(self) -> None:
        with self._closing:
            if not self._closed and threading.current_thread() is not self._thread:
                self._transport.wake()

    def explained(self, error: PenstockError) -> PenstockError:
        """Return the error, with the transport's reason why the plane cannot be found, if it has one."""
        reason = getattr(self._transport, "reason", "")
        return PlaneLost(f"{error}; {reason}") if reason and type(error) is PlaneLost else error

    def stop(self, timeout_s: float = 5.0) -> None:
        """Send what is queued, then end."""
        self._stopping = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _work(self) -> None:
        try:
            while not (self._stopping and not self._outbox):
                self._turn()
        except (PenstockError, OSError) as error:
            self._read_last_words()
            self._on_end(error)
        except BaseException as error:
            self._on_end(error)
            raise
        finally:
            with self._closing:  # no thread may wake a transport that is being closed
                self._closed = True
                self._transport.close()

    def _turn(self) -> None:
        while self._outbox:
            header, frames = self._outbox.popleft()
            self._transport.send(header, frames)
        # When stopping, send what is queued (a bye, the last commits) but do not wait for messages.
        got = None if self._stopping else self._transport.receive(max(self._tick_at - time.monotonic(), 0.0))
        now = time.monotonic()
        if got is not None:
            self._hear(got, now)
        if now >= self._tick_at:
            self._tick_at = now + self._tick_s
            self._on_tick(now)

    def _hear(self, got: Envelope, now: float) -> None:
        try:
            message = read_from_plane(got[0])
        except CorruptFrame:
            return  # counts as lost: the protocol asks again
        self._on_message(message, got[1], now)

    def _read_last_words(self) -> None:
        """Read the messages a failing plane sent before it ended: callers should raise its reason, not "closed"."""
        try:
            while (got := self._transport.receive(0)) is not None:
                self._hear(got, time.monotonic())
        except (PenstockError, OSError):
            return
