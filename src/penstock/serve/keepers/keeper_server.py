"""A keeper at work: one loop that listens and answers, and threads beside it that check, keep and gather.

    producers, ranks, other keepers  ->  [listener]  loop  [lines]  ->  the plane, other keepers
                                                      |
                        check thread, keep thread (one sync for all that came together), give thread

The loop owns the state machines (`send/keeper_session.py`, `put_desk.py`, `take_desk.py`) and never touches a frame.
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
from penstock.send.copy_desk import CopyDesk
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
from penstock.send.keeper_messages import Copied, CopyFrame, DropCopies, Enlist, Take
from penstock.send.keeper_session import KeeperSession
from penstock.send.keys import ClientKeys
from penstock.send.lines import Lines
from penstock.send.message_header import Packer, pack_message, read_from_client, read_from_plane, run_of
from penstock.send.messages import (
    Accepted,
    AskRoom,
    Attach,
    Attached,
    Buffer,
    Foreign,
    Frames,
    FromPlane,
    GiveUp,
    Missing,
    Put,
    Rejected,
    Room,
    Trace,
)
from penstock.send.put_desk import PutDesk
from penstock.send.resolving import Address, Resolve, Resolver
from penstock.send.sockets import SocketPlane
from penstock.send.take_desk import TakeDesk
from penstock.serve.clients.handles import usable_url
from penstock.serve.decisions import fork
from penstock.serve.decisions.disk import own
from penstock.serve.decisions.step_builder import pieces_of
from penstock.serve.keepers.keeper_settings import KeeperSettings
from penstock.serve.keepers.keeper_work import Altered, Checked, Given, KeeperWork
from penstock.serve.process.workers import Threads, Workers

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
        self.session = KeeperSession(self._about(), self._frames, run=settings.run, timeouts=settings.timeouts)
        self._puts = PutDesk(
            self.session,
            name=self.name,
            used_bytes=lambda: self._frames.num_bytes,
            quota_bytes=settings.quota_bytes,
        )
        self._takes = TakeDesk()
        self._copies = CopyDesk(lambda size: self._has_room(size))
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
            self._do(self.session.start(time.monotonic()))
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
        self._do(self.session.on_tick(now))
        self._do(self._puts.on_tick(now))
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
        if isinstance(message, Attach):
            self._on_attach(peer, message)
        elif run_of(header) != self.session.run_id:
            words = "this keeper is of another run; open the plane anew"
            self._do([ToClient(peer, Foreign(reason=words))])
        elif isinstance(message, Put):
            self._do(self._puts.on_put(peer, message, frames, now))
        elif isinstance(message, AskRoom):
            self._do(self._puts.on_ask_room(peer, message, now))
        elif isinstance(message, Trace):
            self._do(self._puts.on_trace(peer, message, frames))
        elif isinstance(message, GiveUp):
            self._do(self._puts.on_give_up(peer, message))
        elif isinstance(message, Take):
            self._do(self._takes.on_take(peer, message))
        elif isinstance(message, (CopyFrame, DropCopies)) and self._listener.is_keeper(peer):
            if isinstance(message, CopyFrame):
                self._do(self._copies.on_copy(peer, message, frames))
            else:
                self._do([ForgetNumbers(message.numbers)])
        else:
            logger.debug("dropped a %s: it is not for keepers, or not from one", type(message).__name__)

    def _on_attach(self, peer: Peer, message: Attach) -> None:
        """Which run is this? Known once the plane has said it; until then the client asks again."""
        known = self.session.attached
        if known is not None:
            answer = Attached(
                ticket=message.ticket,
                run_id=known.run_id,
                run=known.run,
                epoch=known.epoch,
                ranks=known.ranks,
                policy_version=self.session.policy_version,
                copies=known.copies,
            )
            self._do([ToClient(peer, answer)])

    def _on_line(self, name: str, header: Buffer, frames: Frames, now: float) -> None:
        try:
            message = read_from_plane(header)
        except CorruptFrame as error:
            logger.debug("dropped a message: %s", error)
            return
        if name != _PLANE:
            if isinstance(message, Copied):
                self._do(self._puts.on_copied(message, now))
            return
        self._resolver.heard()
        if isinstance(message, (Accepted, Rejected, Missing, Room)):
            self._do(self._puts.on_plane(message, now))
        else:
            self._do(self.session.on_message(message, frames, now))

    # -------------------------------------------------------------- events

    def _do(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, ToClient):
                self._listener.send(event.peer, self._pack(event.message), event.frames)
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
                self._workers.submit("sweep", self._frames.sweep, _raise_if_failed)
            elif isinstance(event, Joined):
                logger.info("keeper %s joined run %s", self.name, self.session.run_id.hex()[:12])
                self._listener.admit(event.clients, event.keepers)

    def _pack(self, message: FromPlane) -> bytes:
        return Packer(self.session.run_id)(message)

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
            self._do(self._puts.checked(work, result.facts, result.evaluation, time.monotonic()))
        elif isinstance(result, Altered):
            self._do(self._puts.altered(work))
        elif isinstance(result, PenstockError):
            self._do(self._puts.refused(work, result))
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
            if isinstance(asked.work, int) and isinstance(found, int):
                self._do(self._puts.kept(asked.work, found, now))
            elif isinstance(asked.work, int):
                assert isinstance(found, PenstockError)
                self._do(self._puts.not_kept(asked.work, found))
            elif isinstance(found, int):
                self._do(self._copies.kept(asked.work, found))
            else:
                self._do(self._copies.not_kept(asked.work, found))

    def _give(self) -> list[tuple[TakeFrame, Given]]:
        """On a worker's thread: all that was asked since the last time, each frame opened once."""
        batch = [self._to_give.popleft() for _ in range(len(self._to_give))]
        return list(zip(batch, self._work.give(batch), strict=True))

    def _given(self, result: list[tuple[TakeFrame, Given]] | Exception) -> None:
        if isinstance(result, Exception):
            raise result
        for asked, given in result:
            self.session.damaged.update(given.damaged)
            self._do(self._takes.taken(asked.peer, asked.ticket, pieces_of(given.frame), given.missing))
            if given.damaged:
                self._do(self.session.beat(time.monotonic()))

    def _has_room(self, size: int) -> bool:
        quota = self.settings.quota_bytes
        return quota is None or self._frames.num_bytes + size <= quota


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


def _raise_if_failed(result: object) -> None:
    if isinstance(result, Exception):
        raise result
