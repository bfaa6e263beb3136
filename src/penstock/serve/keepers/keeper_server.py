"""A keeper at work: one loop that listens and answers, and threads beside it that check, keep and gather.

    producers, ranks, other keepers  ->  [listener]  loop  [lines]  ->  the plane, other keepers
                                                      |
                        check thread, keep thread (one sync for all that came together), give thread

The loop owns the state machines (`send/keeper_protocol.py`) and never touches a frame.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from uuid import uuid4

import zmq

from penstock.errors import ConfigError, CorruptFrame, PenstockError
from penstock.keep.numbered import NumberedFrames
from penstock.send.carrier import Peer
from penstock.send.keeper_events import (
    CheckFrame,
    Event,
    ForgetNumbers,
    Joined,
    KeepFrame,
    TakeFrame,
    ToClient,
    ToPeer,
    ToPlane,
)
from penstock.send.keeper_messages import Enlist
from penstock.send.keeper_protocol import KeeperProtocol
from penstock.send.keys import ClientKeys
from penstock.send.lines import Lines
from penstock.send.message_header import pack_message, read_from_client, read_from_plane, run_of
from penstock.send.messages import Buffer, Frames
from penstock.send.resolving import Address, Resolve, Resolver
from penstock.send.sockets import SocketPlane
from penstock.serve.clients.handles import usable_url
from penstock.serve.decisions import fork
from penstock.serve.decisions.disk import own
from penstock.serve.decisions.step_builder import pieces_of
from penstock.serve.keepers.keeper_settings import KeeperSettings
from penstock.serve.keepers.keeper_work import Altered, Checked, Given, KeeperWork
from penstock.serve.process.workers import Threads, Workers, raise_if_failed

logger = logging.getLogger("penstock.keeper")
_PLANE = ""
"""The name of the line to the plane; no keeper's."""
_BATCH_BYTES = 32 << 20


class KeeperServer:
    """One keeper. `run` in a process or thread of its own; `stop` from anywhere."""

    def __init__(
        self, settings: KeeperSettings, *, resolve: Resolve | None = None, on_turn: Callable[[], None] = lambda: None
    ) -> None:
        """`resolve` finds the plane and the keys to it, instead of `settings.plane` and `settings.keys`."""
        if resolve is None and not settings.plane:
            raise ConfigError("plane: no address; give the one that the plane listens at, tcp://HOST:PORT")
        self.settings, self._on_turn = settings, on_turn
        keys = None if settings.keys is None else ClientKeys.load(settings.keys, "keeper")
        self._resolve: Resolve = resolve or (lambda: Address(settings.plane, keys))
        self._address = self._resolve()
        self._lock = _own(settings.folder)
        try:
            self._frames = NumberedFrames(settings.folder, settings.node_name)
            self._listener = SocketPlane(
                settings.listen, keys=None if self._address.keys is None else self._address.keys.listening()
            )
        except BaseException:
            fork.close(self._lock)
            raise
        self.name = self._frames.name
        self.url = _told(self._listener.url, settings.host)
        self._work = KeeperWork(self._frames)
        threads = Threads()
        self._workers: Workers = threads
        self._wake = threads.wake
        self._lines = Lines()
        self._lines.watch(self._listener.pollable())
        self._lines.watch(self._wake.descriptor)
        self._lines.connect(_PLANE, self._address.url, self._address.keys)
        self._resolver = Resolver(self._resolve, silence_s=settings.timeouts.peer_s)
        self._protocol = KeeperProtocol(self._about(), self._frames, run=settings.run, timeouts=settings.timeouts)
        self.session = self._protocol.session
        self._to_keep: deque[KeepFrame] = deque()
        self._to_give: deque[TakeFrame] = deque()
        self._stopping = threading.Event()
        self.failure: BaseException | None = None

    def _about(self) -> Enlist:
        keys = self._address.keys
        return Enlist(
            name=self.name,
            node=self.settings.node_name,
            url=self.url,
            key=b"" if keys is None else keys.public,
            incarnation=uuid4().hex,
            last=0,
            life=self._frames.life,
            quota_bytes=self.settings.quota_bytes,
        )

    # -------------------------------------------------------------- the loop

    def run(self) -> None:
        """Work until `stop`, or until the plane says that this keeper can never take part."""
        timeouts = self.settings.timeouts
        patience_s = min(timeouts.heartbeat_s / 4, timeouts.resend_s / 4, 0.25)
        try:
            self._do(self._protocol.start(time.monotonic()))
            while not self._stopping.is_set():
                self._lines.poll(patience_s)
                self.turn(time.monotonic())
                self.session.raise_failure()
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self._close()

    def stop(self) -> None:
        self._stopping.set()
        self._wake.call()

    def turn(self, now: float) -> None:
        """One turn of the loop."""
        for peer, header, frames in self._listener.receive():
            self._on_client(peer, header, frames, now)
        for name, header, frames in self._lines.receive():
            self._on_line(name, header, frames, now)
        self._workers.finish()
        self._do(self._protocol.on_tick(now))
        self._find_plane()
        self._on_turn()

    def _close(self) -> None:
        self._listener.close()
        self._lines.close()
        self._workers.close()
        self._frames.close()
        fork.close(self._lock)

    def _find_plane(self) -> None:
        found = self._resolver.look()
        if found is not None and found != self._address:
            logger.info("the plane is at %s now", found.url)
            self._address = found
            self._lines.disconnect(_PLANE)
            self._lines.connect(_PLANE, found.url, found.keys)

    # -------------------------------------------------------------- messages

    def _on_client(self, peer: Peer, header: Buffer, frames: Frames, now: float) -> None:
        try:
            message = read_from_client(header)
        except CorruptFrame as error:  # it is as if it had been lost: the sender asks again
            logger.debug("dropped a message: %s", error)
            return
        is_keeper, run_id = self._listener.is_keeper(peer), run_of(header)
        self._do(self._protocol.on_client(peer, message, frames, now, run_id=run_id, is_keeper=is_keeper))

    def _on_line(self, name: str, header: Buffer, frames: Frames, now: float) -> None:
        try:
            message = read_from_plane(header)
        except CorruptFrame as error:
            logger.debug("dropped a message: %s", error)
            return
        if name != _PLANE:
            self._do(self._protocol.on_peer(message, now))
        else:
            self._resolver.heard()
            self._do(self._protocol.on_plane(message, frames, now))

    # -------------------------------------------------------------- events

    def _do(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, ToClient):
                self._listener.send(event.peer, pack_message(event.message, self.session.run_id), event.frames)
            elif isinstance(event, ToPlane):
                self._resolver.said()
                self._lines.send(_PLANE, pack_message(event.message, self.session.run_id), event.frames)
            elif isinstance(event, ToPeer):
                self._to_peer(event)
            elif isinstance(event, CheckFrame):
                self._check(event)
            elif isinstance(event, KeepFrame):
                self._to_keep.append(event)
                self._workers.submit("keep", self._keep, self._kept)
            elif isinstance(event, TakeFrame):
                self._to_give.append(event)
                self._workers.submit("give", self._give, self._given)
            elif isinstance(event, ForgetNumbers):
                self._frames.forget(event.numbers)
                self._workers.submit("sweep", self._frames.sweep, raise_if_failed)
            elif isinstance(event, Joined):
                logger.info("keeper %s joined run %s", self.name, self.session.run_id.hex()[:12])
                self._listener.admit(event.clients, event.keepers)

    def _to_peer(self, event: ToPeer) -> None:
        at = next((at for at in self.session.peers if at.name == event.name), None)
        if at is not None:
            keys = self._address.keys
            try:
                self._lines.connect(at.name, at.url, None if keys is None else keys.to(at.key))
            except (PenstockError, zmq.ZMQError) as error:  # it does not answer then, and another one is chosen
                logger.warning("keeper %s at %s: %s", at.name, at.url, error)
                return
        self._lines.send(event.name, pack_message(event.message, self.session.run_id), event.frames)

    # -------------------------------------------------------------- work beside the loop

    def _check(self, asked: CheckFrame) -> None:
        terms = self.session.terms
        assert terms is not None
        self._workers.submit("check", partial(self._work.check, asked, terms), partial(self._checked, asked.work))

    def _checked(self, work: int, result: Checked | Exception) -> None:
        if isinstance(result, Checked):
            self._do(self._protocol.puts.checked(work, result.facts, result.evaluation, time.monotonic()))
        elif isinstance(result, Altered):
            self._do(self._protocol.puts.altered(work))
        elif isinstance(result, PenstockError):
            self._do(self._protocol.puts.refused(work, result))
        else:
            raise result

    def _keep(self) -> list[tuple[KeepFrame, int | PenstockError]]:
        """On a worker's thread: all that came since the last time."""
        batch: list[KeepFrame] = []
        size = 0
        while self._to_keep and size < _BATCH_BYTES:
            batch.append(self._to_keep.popleft())
            size += len(batch[-1].frame)
        return list(zip(batch, self._work.keep(batch), strict=True)) if batch else []

    def _kept(self, results: list[tuple[KeepFrame, int | PenstockError]] | Exception) -> None:
        if isinstance(results, Exception):
            raise results
        now = time.monotonic()
        for asked, found in results:
            self._do(self._protocol.kept(asked, found, now))

    def _give(self) -> list[tuple[TakeFrame, Given]]:
        """On a worker's thread: all that was asked since the last time, each frame opened once."""
        batch = [self._to_give.popleft() for _ in range(len(self._to_give))]
        return list(zip(batch, self._work.give(batch), strict=True))

    def _given(self, result: list[tuple[TakeFrame, Given]] | Exception) -> None:
        if isinstance(result, Exception):
            raise result
        now = time.monotonic()
        for asked, given in result:
            self._do(self._protocol.taken(asked, pieces_of(given.frame), given.missing, given.damaged, now))


def _own(folder: str) -> int:
    try:
        return own(Path(folder), "keeper")
    except OSError as error:
        if isinstance(error, PenstockError):
            raise
        raise ConfigError(f"folder {folder!r}: {error.strerror}; give a folder that can be made and written") from None


def _told(url: str, host: str) -> str:
    """The address that others are told."""
    match = re.fullmatch(r"tcp://(?:\[[^\]]*\]|[^:]*):(\d+)", url)
    return f"tcp://{host}:{match[1]}" if match and host else usable_url(url)
