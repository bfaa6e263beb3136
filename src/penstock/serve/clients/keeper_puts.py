"""Puts of a plane that has keepers: to the one of this node, or to another while that is away.

Which keepers there are is asked of the plane, again each time one falls silent. A group that was sent to one that died
is put again: the plane recognises it if it was accepted.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from penstock.errors import Closed, InvalidInput, Overloaded, PlaneLost
from penstock.send.keeper_messages import KeeperAt
from penstock.send.keys import ClientKeys
from penstock.send.messages import Attached
from penstock.send.producer import Answer, ProducerSession
from penstock.send.sockets import SocketClient
from penstock.send.timeouts import Timeouts
from penstock.serve.clients.encoded_group import EncodedGroup
from penstock.serve.clients.producer_line import ProducerLine

logger = logging.getLogger("penstock.producer")
_PAUSE_S = 0.25


class KeeperPuts:
    """Safe to use from many threads."""

    def __init__(
        self, ask: Callable[[], Attached], keys: Callable[[], ClientKeys | None], *, run: str, timeouts: Timeouts
    ) -> None:
        """`ask` asks the plane which keepers there are; `keys` gives what lines to them are opened with."""
        self._ask, self._keys, self._run = ask, keys, run
        # A keeper that is silent for as long as any process may be is left for another one.
        self._timeouts = replace(timeouts, plane_s=timeouts.peer_s)
        self._lock = threading.Lock()
        self._line: ProducerLine | None = None
        self._closed = threading.Event()

    def put(self, group: EncodedGroup, timeout: float | None) -> Answer:
        _check_priority(group)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            line, left = self._find(), max(deadline - time.monotonic(), 0.0)
            if line is not None:
                try:
                    return line.ask(group.question(line.session, None if timeout is None else left), left)
                except PlaneLost as error:
                    self._leave(line, group.name, error)
            self._check(group.name, line, left)
            self._closed.wait(_PAUSE_S)

    async def aput(self, group: EncodedGroup, timeout: float | None) -> Answer:
        _check_priority(group)
        """`put`, without blocking the thread."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            line = self._line or await asyncio.to_thread(self._find)
            left = max(deadline - time.monotonic(), 0.0)
            if line is not None:
                try:
                    return await line.aask(group.question(line.session, None if timeout is None else left), left)
                except PlaneLost as error:
                    await asyncio.to_thread(self._leave, line, group.name, error)
            self._check(group.name, line, left)
            await asyncio.sleep(_PAUSE_S)

    def _check(self, group: str, line: ProducerLine | None, left: float) -> None:
        if self._closed.is_set():
            raise Closed("this plane was closed")
        if line is None and left <= 0:
            raise Overloaded(f"group {group!r}: no keeper is up; start one with `penstock keep`", _PAUSE_S)

    def _find(self) -> ProducerLine | None:
        """The line to a keeper; None while there is none."""
        with self._lock:
            if self._line is None and not self._closed.is_set():
                keepers = self._ask().keepers
                self._line = self._open(keepers[0]) if keepers else None
            return self._line

    def _open(self, at: KeeperAt) -> ProducerLine:
        keys = self._keys()
        session = ProducerSession(run=self._run, where=f"keeper {at.name}", asks_first=True, timeouts=self._timeouts)
        return ProducerLine(SocketClient(at.url, keys=None if keys is None else keys.to(at.key)), session)

    def _leave(self, line: ProducerLine, group: str, error: PlaneLost) -> None:
        logger.warning("group %r: %s; looking for another keeper", group, error)
        with self._lock:
            if self._line is line:
                self._line = None
        line.close()

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            line, self._line = self._line, None
        if line is not None:
            line.close()


def _check_priority(group: EncodedGroup) -> None:
    if group.priority != 1.0:
        raise InvalidInput(f"group {group.name!r}: priority {group.priority}; keepers take groups of priority 1.0 only")
