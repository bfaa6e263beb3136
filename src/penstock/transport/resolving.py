"""A client's end that is told by somebody else where the plane is, and asks again when nobody answers there.

A plane that is restarted on another host has another address, and other keys. So whoever knows (`Resolve`: a file, a
name service, a Ray actor) is asked when something was sent and nothing came back for a while; if the answer is a new
one, the connection is made anew. What was under way is lost with the old connection, as transports may lose things: the
protocol asks again.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from penstock.protocol import Frames
from penstock.transport.interface import Envelope
from penstock.transport.keys import ClientKeys
from penstock.transport.sockets import SocketClient

logger = logging.getLogger("penstock.line")
SILENCE_S = 2.0
"""As long as nothing comes back, before it is asked for the first time. Then it is asked after half of that, so that a
plane that was started is found soon."""
_SOON = 30
"""Questions, after which it takes twice as long again: a database that serves many clients may be what is away."""
_SPREAD = (0.75, 1.25)
"""Times that: clients that lost their plane at the same moment do not all ask at the same moment."""
_UNSENT = 256
"""Messages that wait for a first address; the protocol asks again for what is beyond."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where somebody listens."""

    url: str
    keys: ClientKeys | None = None
    """The client's pair, with the public key of whoever listens there."""


Resolve: TypeAlias = Callable[[], Address]
"""Where the plane is now: may take seconds, and may raise while nobody knows. Called on a thread of its own."""


class Resolver:
    """Asks for an address again after silence, on a thread of its own: heartbeats to a plane that lives never wait."""

    def __init__(
        self, resolve: Resolve, *, silence_s: float = SILENCE_S, on_found: Callable[[], None] = lambda: None
    ) -> None:
        """`on_found` is called on that thread when there is an address to look at."""
        self._resolve, self._silence_s, self._on_found = resolve, silence_s, on_found
        self._since: float | None = None
        """When something was said that nobody answered; None while all was."""
        self._unheard = 0
        """Questions since there was a word."""
        self._patience_s = self._drawn()
        self._asking = False
        self._found: Address | None = None
        self.reason = ""
        """Why there was no address when it was last asked for; empty if there was one."""

    def said(self) -> None:
        """Something was sent: silence counts from here."""
        if self._since is None:
            self._since = time.monotonic()

    def heard(self) -> None:
        """There was a word: the address is right."""
        self._since = None
        if self._unheard:
            self._unheard = 0
            self._patience_s = self._drawn()

    def look(self) -> Address | None:
        """The address as it was found since the last look, None if there is no news; asks after too much silence."""
        now = time.monotonic()
        if self._since is not None and now - self._since > self._patience_s:
            self._unheard += 1
            self._since, self._patience_s = now, self._drawn()
            self.ask()
        return self.news()

    def news(self) -> Address | None:
        found, self._found = self._found, None
        return found

    def _drawn(self) -> float:
        """How long to wait before the next question."""
        soon = 0.5 if 0 < self._unheard <= _SOON else 1.0
        return self._silence_s * soon * random.uniform(*_SPREAD)  # noqa: S311 - a pause, not a secret

    def ask(self) -> None:
        """Ask now, unless that is under way."""
        if not self._asking:
            self._asking = True
            threading.Thread(target=self._ask, name="penstock-resolve", daemon=True).start()

    def _ask(self) -> None:
        try:
            self._found = self._resolve()
            self.reason = ""
        except Exception as error:  # noqa: BLE001 - whoever is asked may be away too: asked again soon
            logger.info("no address: %s: %s", type(error).__name__, error)
            self.reason = str(error)
        finally:
            self._asking = False
        self._on_found()


class ResolvingClient:
    """A `SocketClient` that moves with its plane."""

    def __init__(self, resolve: Resolve, *, first: Address | None = None, silence_s: float = SILENCE_S) -> None:
        """`first` is where the plane is, if that is known already; otherwise messages wait until somebody knows."""
        self._resolver = Resolver(resolve, silence_s=silence_s, on_found=self._on_found)
        self._silence_s = silence_s
        self._address = first
        self._inner = None if first is None else _connect(first)
        self._unsent: deque[tuple[bytes, Frames]] = deque(maxlen=_UNSENT)
        self._lock, self._woken, self._closed = threading.Lock(), threading.Event(), False
        if first is None:
            self._resolver.ask()

    @property
    def keys(self) -> ClientKeys | None:
        """What it connects with now."""
        return None if self._address is None else self._address.keys

    @property
    def reason(self) -> str:
        """Why the plane cannot be found, if it cannot."""
        return self._resolver.reason

    def send(self, header: bytes, frames: Frames = ()) -> None:
        self._move()
        self._resolver.said()
        with self._lock:
            if self._inner is None:
                self._unsent.append((header, frames))
                return
        self._inner.send(header, frames)

    def receive(self, timeout_s: float) -> Envelope | None:
        self._move()
        if self._inner is None:
            self._woken.wait(timeout_s)
            self._woken.clear()
            return None
        got = self._inner.receive(timeout_s)
        if got is not None:
            self._resolver.heard()
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

    def _move(self) -> None:
        """To where the plane was found, if that is somewhere else."""
        if self._inner is None:
            return
        found = self._resolver.look()
        if found is not None and found != self._address:
            logger.info("the plane is at %s now", found.url)
            old, new = self._inner, _connect(found)
            with self._lock:
                self._address, self._inner = found, new
            old.close()

    def _on_found(self) -> None:
        """On the resolver's thread: make the first connection, and send what waits for it also if nobody calls."""
        if self._inner is not None or self._closed:
            self.wake()
            return
        found = self._resolver.news()
        if found is None:
            timer = threading.Timer(self._silence_s, self._resolver.ask)
            timer.daemon = True
            timer.start()
            return
        with self._lock:
            inner = _connect(found)
            while self._unsent:
                inner.send(*self._unsent.popleft())
            self._address, self._inner = found, inner
            self._woken.set()


def _connect(address: Address) -> SocketClient:
    return SocketClient(address.url, keys=address.keys)
