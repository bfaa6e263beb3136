"""A client transport that looks up the plane's address, and looks again when the plane does not answer.

A plane that is restarted on another host has another address and other keys. So the client asks a resolver (`Resolve`:
the run's log, a Ray actor) when it has sent something and received nothing for a while. If the address is new, it
connects there. Messages in transit are lost with the old connection, as transports may lose messages: the protocol
repeats them.
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
from penstock.transport.sockets import KeyRefused, SocketClient

logger = logging.getLogger("penstock.connection")
SILENCE_S = 2.0
"""Seconds of silence before the first look-up. Later look-ups follow after half of that: a new plane is found soon."""
_JITTER = random.SystemRandom()  # has no state: a program's own `random` stays as it is, forked processes differ
_SOON = 30
"""Look-ups, after which the interval doubles: a database that serves many clients may be what is away."""
_SPREAD = (0.75, 1.25)
"""Factors of the interval: clients that lost their plane at the same moment do not all ask at the same moment."""
_UNSENT = 256
"""Messages kept until the first address is known. The protocol repeats those beyond."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a plane listens."""

    url: str
    keys: ClientKeys | None = None
    """The client's key pair, with the plane's public key."""


Resolve: TypeAlias = Callable[[], Address]
"""Returns the plane's current address. May take seconds, and may raise while it is unknown. Runs on its own thread."""


class Resolver:
    """Looks up an address again after silence, on its own thread, so that heartbeats to a live plane never wait."""

    def __init__(
        self, resolve: Resolve, *, silence_s: float = SILENCE_S, on_found: Callable[[], None] = lambda: None
    ) -> None:
        """`on_found` is called on that thread after each look-up."""
        self._resolve, self._silence_s, self._on_found = resolve, silence_s, on_found
        self._since: float | None = None
        """When the first unanswered message was sent, or None."""
        self._unheard = 0
        """Look-ups since the last answer."""
        self._patience_s = self._drawn()
        self._asking = False
        self._found: Address | None = None
        self.reason = ""
        """Why the last look-up failed, or ""."""

    def on_sent(self) -> None:
        """Start counting silence."""
        if self._since is None:
            self._since = time.monotonic()

    def on_received(self) -> None:
        """Stop counting silence: the address is right."""
        self._since = None
        if self._unheard:
            self._unheard = 0
            self._patience_s = self._drawn()

    def look(self) -> Address | None:
        """Return an address found since the last call, or None. Starts a look-up after too much silence."""
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
        """Draw how long to wait before the next look-up."""
        soon = 0.5 if 0 < self._unheard <= _SOON else 1.0
        return self._silence_s * soon * _JITTER.uniform(*_SPREAD)

    def ask(self) -> None:
        """Start a look-up, unless one is running."""
        if not self._asking:
            self._asking = True
            threading.Thread(target=self._ask, name="penstock-resolve", daemon=True).start()

    def _ask(self) -> None:
        try:
            self._found = self._resolve()
            self.reason = ""
        except Exception as error:  # noqa: BLE001 - the name service may be down too: try again soon
            logger.info("no address: %s: %s", type(error).__name__, error)
            self.reason = str(error)
        finally:
            self._asking = False
        self._on_found()


class ResolvingClient:
    """A `SocketClient` that follows its plane to new addresses."""

    def __init__(self, resolve: Resolve, *, first: Address | None = None, silence_s: float = SILENCE_S) -> None:
        """`first` is the plane's address, if it is already known. Otherwise messages wait until it is found."""
        self._resolver = Resolver(resolve, silence_s=silence_s, on_found=self._on_found)
        self._silence_s = silence_s
        self._address = first
        self._inner = None if first is None else _connect(first)
        self._unsent: deque[tuple[bytes, Frames]] = deque(maxlen=_UNSENT)
        self._lock, self._woken, self._closed = threading.Lock(), threading.Event(), False
        if first is None:
            self._resolver.ask()  # on its thread; `_on_found` connects

    @property
    def keys(self) -> ClientKeys | None:
        """The keys it connects with now."""
        return None if self._address is None else self._address.keys

    @property
    def reason(self) -> str:
        """Why the plane cannot be found, or ""."""
        return self._resolver.reason

    def send(self, header: bytes, frames: Frames = ()) -> None:
        self._move()
        self._resolver.on_sent()
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
        try:
            got = self._inner.receive(timeout_s)
        except KeyRefused:  # the plane may have new keys: treated as silence, so its address is looked up again
            return None
        if got is not None:
            self._resolver.on_received()
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
        """Connect to the plane's new address, if it has moved."""
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
        """Make the first connection and send what waited for it. Runs on the resolver's thread, because the client's
        thread may be idle."""
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
            while self._unsent:  # before `_inner` is visible, so that later messages cannot overtake these
                inner.send(*self._unsent.popleft())
            self._address, self._inner = found, inner
            self._woken.set()


def _connect(address: Address) -> SocketClient:
    return SocketClient(address.url, keys=address.keys)
