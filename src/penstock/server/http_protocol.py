"""The connections of `http_server`: uvicorn's protocol with deadlines and limits. A module of its own, because it
imports uvicorn, which is optional."""

from __future__ import annotations

import asyncio
import logging
from typing import ClassVar

import h11
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from penstock.server.http_server import MALFORMED, REJECTION, Guard, Limits

_LOGGER = logging.getLogger("penstock.http")
_LOGGER.setLevel(logging.ERROR)  # uvicorn warns of each request it cannot read: strangers would fill the disk


class GuardedProtocol(H11Protocol):
    """One connection. `protocol_of` makes a subclass per server."""

    guard: ClassVar[Guard]
    _counted = False
    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.logger = _LOGGER
        self._address = self.client[0] if self.client else ""
        self._counted = self.guard.admit(self._address)
        if not self._counted:
            transport.write(REJECTION)
            transport.close()
            return
        self.guard.waiting[self] = self._address
        self._deadline = self.loop.call_later(self.guard.limits.header_s, self.drop)

    def data_received(self, data: bytes) -> None:
        # Further bytes do not restart the deadline: a header, or the rest of a rejected body, that arrives byte by byte
        # has the same deadline as one that does not arrive at all.
        if self in self.guard.waiting and self._deadline is None:
            self._deadline = self.loop.call_later(self.guard.limits.header_s, self.drop)
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def _look(self) -> None:
        """Note whether the connection waits for a request or is being answered."""
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request, unlike its declared type
        if cycle is None or cycle.response_complete:
            if self._counted:
                self.guard.waiting.setdefault(self, self._address)
            return
        self.guard.waiting.pop(self, None)
        self._deadline = _cancelled(self._deadline)
        if cycle.keep_alive and self.conn.their_state is h11.DONE and self.conn.trailing_data[0]:
            # The next request came before the answer to this one. Answer this one and close: no common client does
            # this, and 200 connections that never read had 50 MB of requests waiting here, handled one after another.
            cycle.keep_alive, cycle.default_headers = False, [*cycle.default_headers, CLOSE_HEADER]

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - the reason is the same each time
        """Answer bytes that are no HTTP request with JSON, like all other errors."""
        self.transport.write(MALFORMED)
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self.guard.limits.send_s, self.drop)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread = _cancelled(self._unread)

    def drop(self) -> None:
        """Close the connection at once. A clean close would wait for a client that reads nothing."""
        self._leave()
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        super().connection_lost(exc)

    def _leave(self) -> None:
        self.guard.waiting.pop(self, None)
        self._deadline, self._unread = _cancelled(self._deadline), _cancelled(self._unread)
        if self._counted:
            self._counted = False
            self.guard.left(self._address)


def protocol_of(limits: Limits) -> type[GuardedProtocol]:
    """Return a protocol class for `uvicorn.Config(http=...)`. Its connections share one guard."""
    return type("GuardedProtocol", (GuardedProtocol,), {"guard": Guard(limits)})


def _cancelled(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancel a timer. Returns None, to assign in its place."""
    if timer is not None:
        timer.cancel()
    return None
