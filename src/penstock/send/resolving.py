"""A client's end that is told by somebody else where the plane is, and asks again when nobody answers there.

A plane that is restarted on another host has another address, and other keys. So whoever knows (`Resolve`) is asked
when something was sent and nothing came back for a while; if the answer is a new one, the connection is made anew.
What was under way is lost with the old connection, as carriers may lose things: the protocol asks again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from penstock.errors import PenstockError
from penstock.send.carrier import Envelope
from penstock.send.keys import ClientKeys
from penstock.send.messages import Frames
from penstock.send.sockets import SocketClient

SILENCE_S = 2.0
"""As long as nothing comes back, before it is asked for the first time."""
_MOST_SILENCE_S = 8.0
_UNSENT = 256
"""Messages that wait for a first address; the protocol asks again for what is beyond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a plane is, and the keys that let a client in."""

    url: str
    keys: ClientKeys | None = None


Resolve: TypeAlias = Callable[[], Address]
"""Where the plane is now: may take seconds, and raises PenstockError while nobody knows. Called on its own thread."""


class ResolvingClient:
    """A `SocketClient` that moves with its plane."""

    def __init__(self, resolve: Resolve, *, first: Address | None = None, silence_s: float = SILENCE_S) -> None:
        """`first` is where the plane is if that is known already."""
        self._resolve, self._silence_s = resolve, silence_s
        self._address, self._found = first, first
        self._inner = None if first is None else _connect(first)
        self._unsent: deque[tuple[bytes, Frames]] = deque(maxlen=_UNSENT)
        self._lock, self._woken = threading.Lock(), threading.Event()
        self._looking = self._closed = False
        self._unanswered: float | None = None
        """Since when nothing came back."""
        self._patience_s = silence_s
        if first is None:
            self._look()

    def send(self, header: bytes, frames: Frames = ()) -> None:
        self._tend(time.monotonic())
        if self._unanswered is None:
            self._unanswered = time.monotonic()
        with self._lock:
            if self._inner is None:
                self._unsent.append((header, frames))
                return
        self._inner.send(header, frames)

    def receive(self, timeout_s: float) -> Envelope | None:
        self._tend(time.monotonic())
        if self._inner is None:
            self._woken.wait(timeout_s)
            self._woken.clear()
            return None
        got = self._inner.receive(timeout_s)
        if got is not None:
            self._unanswered, self._patience_s = None, self._silence_s
        return got

    def wake(self) -> None:
        with self._lock:
            self._woken.set()
            if self._inner is not None and not self._closed:
                self._inner.wake()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        if self._inner is not None:
            self._inner.close()

    def _tend(self, now: float) -> None:
        """Move if the plane was found somewhere else; look for it if it has been silent for long."""
        if self._found != self._address and self._inner is not None and self._found is not None:
            old, new = self._inner, _connect(self._found)
            with self._lock:
                self._address, self._inner = self._found, new
            old.close()
            self._unanswered = now
        elif self._unanswered is not None and now - self._unanswered > self._patience_s:
            self._unanswered = now
            self._patience_s = min(2 * self._patience_s, _MOST_SILENCE_S)
            self._look()

    def _look(self) -> None:
        """Ask where the plane is, beside the thread that sends: heartbeats to a plane that lives must not wait."""
        if not self._looking:
            self._looking = True
            threading.Thread(target=self._ask, name="penstock-resolve", daemon=True).start()

    def _ask(self) -> None:
        pause = threading.Event()
        while True:
            try:
                self._found = self._resolve()
                break
            except (PenstockError, OSError):  # nobody knows now
                if self._inner is not None or pause.wait(self._silence_s) or self._closed:
                    self._patience_s = self._silence_s
                    break
        self._looking = False
        self._begin()
        if self._found != self._address:
            self.wake()

    def _begin(self) -> None:
        """The first connection: what waits for it is sent at once, also if nobody calls."""
        with self._lock:
            if self._inner is None and self._found is not None and not self._closed:
                inner = _connect(self._found)
                while self._unsent:
                    inner.send(*self._unsent.popleft())
                self._address, self._inner = self._found, inner
                self._woken.set()


def _connect(place: Address) -> SocketClient:
    return SocketClient(place.url, keys=place.keys)
