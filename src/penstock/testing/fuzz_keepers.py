"""Fuzz target for keepers: any messages, in any order, to a real keeper, to a plane that has keepers, and to a rank.

As in `fuzz_messages.py` an input is a list of `[peer, message, frames]`, and a number lets so many seconds pass:

    0 to 99     a producer, a rank or another keeper, to the keeper
    100 up      a keeper, a producer or a rank, to the plane
    -1, -2      the keeper's plane, and another keeper, answer it
    -3          a keeper answers a rank; its ticket counts the rank's questions

Facts that a keeper vouches for are a tree in an input, and deflated when they are said.
"""

from __future__ import annotations

import itertools
import shutil
import time
import zlib
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from penstock.encode import encode
from penstock.errors import CorruptFrame, PenstockError
from penstock.keep.facts import check_group
from penstock.pack import Packing
from penstock.send.copies import numbers_to_bytes
from penstock.send.keeper_messages import (
    Copied,
    CopyFrame,
    DropCopies,
    Enlist,
    Enlisted,
    KeeperAt,
    KeeperBeat,
    KeeperPulse,
    PutFacts,
    Take,
    Taken,
    Taking,
)
from penstock.send.keys import ClientKeys
from penstock.send.lines import Lines
from penstock.send.message_header import read_from_client, read_from_plane, wrap
from penstock.send.messages import (
    Accepted,
    Ask,
    AskRoom,
    Attach,
    Attached,
    Commit,
    Frames,
    FromPlane,
    GiveUp,
    Missing,
    Put,
    Received,
    Rejected,
    Request,
    Room,
    Trace,
    Unknown,
)
from penstock.send.picks import PickedGroup, StepPicks
from penstock.send.sockets import check_url
from penstock.send.taking import TakeSession
from penstock.send.timeouts import Timeouts
from penstock.serve.decisions.log import Log
from penstock.serve.keepers import KeeperServer, KeeperSettings
from penstock.serve.process.server import Server
from penstock.serve.process.workers import Inline
from penstock.serve.settings import PlaneSettings, Target
from penstock.testing.fuzz_frames import LIMITS
from penstock.testing.fuzz_messages import RUN, Messages, Wire, fill_in, hello, item
from penstock.testing.groups import named_group

_PLANE = 100
_FACTS = 5
"""Where facts are in a message that vouches for them."""
_RUN_ID = b"a run's identity"
_AT = {name: KeeperAt(name=f"{name}.1", node=name, url="tcp://127.0.0.1:9") for name in "bc"}
_PICKS = StepPicks(
    keepers=("b.1", "c.1"),
    groups=(PickedGroup("a", ((0, 1), (1, 1)), (0, 1)), PickedGroup("b", ((1, 2),), (1,))),
)


class Keepers(Messages):
    """Keeper and plane go on; every frame that is kept can be read, and the plane's ledger balances."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder, self._numbers = folder, itertools.count()

    def seeds(self) -> list[bytes]:
        lists = [_puts(), _copies(), _takes(), _to_plane(), _to_rank()]
        return [msgspec.msgpack.encode(items) for items in lists]

    def _run(self, items: list[Any]) -> bool:
        folder = self._folder / f"keeper{next(self._numbers)}"
        try:
            return _Session(folder).run(items)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class _Nowhere(Lines):
    """Addresses are looked at, and nothing is ever sent."""

    def connect(self, name: str, url: str, keys: ClientKeys | None = None) -> None:  # noqa: ARG002 - as its parent
        check_url(url, secured=keys is not None)


class _Keeper(KeeperServer):
    """A keeper whose work is done at once and whose words go nowhere."""

    def __init__(self, folder: Path) -> None:
        super().__init__(KeeperSettings(folder=str(folder), plane="tcp://127.0.0.1:9", node="a", quota_bytes=100_000))
        self._lines.close()
        self._workers.close()
        self._lines, self._workers = _Nowhere(), Inline()

    def say(self, peer: int, header: bytes, frames: Frames, now: float) -> None:
        if peer >= 0:
            self._on_client(f"c{peer}".encode(), header, frames, now)
        else:
            self._on_line("" if peer == -1 else "b.1", header, frames, now)

    def check(self) -> None:
        for number in self._frames.numbers:
            self._frames.read(number)


class _Session:
    """One keeper, one plane, one rank that takes, and a clock that only the input moves."""

    def __init__(self, folder: Path) -> None:
        self.now = time.monotonic()
        self.wire, self.keeper = Wire(), _Keeper(folder)
        packing, target = Packing(ranks=1, seq_len=64), Target(groups=1)
        settings = PlaneSettings(packing=packing, target=target, run=RUN, copies=1)
        self.plane = Server(settings, Log(None), [self.wire], workers=Inline())
        self.taking = TakeSession(_PICKS, tuple(_AT.values()), node="b", timeouts=Timeouts())
        self.tickets = [say.message.ticket for say in self.taking.start(self.now)]
        self.keeper._do(self.keeper.session.start(self.now))
        self.taken = False

    def run(self, items: list[Any]) -> bool:
        try:
            for each in items:
                self._take(each)
            self.keeper.check()
            assert self.plane.engine.ledger.balanced, self.plane.engine.ledger
            msgspec.json.encode(self.plane.status())
        finally:
            self.plane.engine.log.close()
            self.keeper._close()
        return self.taken

    def _take(self, given: Any) -> None:
        self.now += 0.05
        if isinstance(given, (int, float)):
            self.now += min(abs(given), 100.0) if given == given else 0.0
        elif isinstance(given, list) and len(given) == 3 and isinstance(given[0], int) and isinstance(given[2], list):
            peer, message, frames = given
            self._say(peer, message, [frame for frame in frames if isinstance(frame, bytes)])
        self.plane.turn(self.now)
        self.tickets += [say.message.ticket for say in self.taking.on_tick(self.now)]
        if self.keeper.session.failure is None:
            self.keeper.turn(self.now)

    def _say(self, peer: int, message: Any, frames: Frames) -> None:
        if peer >= _PLANE:
            record = _with_facts(fill_in(message, self.wire.digests.get(peer, "")))
            header = wrap(msgspec.msgpack.encode(record), bytes.fromhex(self.plane.engine.log.run_id))
            self.wire.inbox.append((peer, header, frames))
        elif peer == -3:
            header = wrap(msgspec.msgpack.encode(self._with_ticket(message)), _RUN_ID)
            self._to_rank(header, frames)
        else:
            header = wrap(msgspec.msgpack.encode(message), self.keeper.session.run_id)
            if self.keeper.session.failure is None:
                self.keeper.say(peer, header, frames, self.now)
        try:
            (read_from_client if peer >= 0 else read_from_plane)(header)
        except CorruptFrame:
            return
        self.taken = True

    def _with_ticket(self, message: Any) -> Any:
        """The rank's tickets count up from one input to the next: what is written is which question it is."""
        if not isinstance(message, list) or len(message) < 2 or not isinstance(message[1], int):
            return message
        at = message[1]
        return [message[0], self.tickets[at] if 0 <= at < len(self.tickets) else at, *message[2:]]

    def _to_rank(self, header: bytes, frames: Frames) -> None:
        try:
            message = read_from_plane(header)
        except PenstockError:
            return
        if isinstance(message, (Taken, Taking)):
            self.tickets += [say.message.ticket for say in self.taking.on_message(message, frames, self.now)]


def _with_facts(message: Any) -> Any:
    vouches = isinstance(message, list) and len(message) > _FACTS and message[0] == "put-facts"
    if not vouches or isinstance(message[_FACTS], bytes):
        return message
    return [*message[:_FACTS], zlib.compress(msgspec.msgpack.encode(message[_FACTS]), 1), *message[_FACTS + 1 :]]


def _vouched(message: PutFacts) -> list[Any]:
    """As an input has it."""
    peer, record, frames = item(_PLANE, message)
    facts = msgspec.msgpack.decode(zlib.decompress(message.facts))
    return [peer, [*record[:_FACTS], facts, *record[_FACTS + 1 :]], frames]


# ------------------------------------------------------------------ seeds


def _joined(copies: int) -> list[Any]:
    """The keeper's plane takes it in."""
    terms = Enlisted(
        epoch=1, copies=copies, is_shared=False, seq_len=64, max_tokens=1 << 16, max_bytes=1 << 20, max_samples=64
    )
    pulse = KeeperPulse(epoch=1, number=1, peers=tuple(_AT.values()), down=("keeper d.1 (silent for 9.0 s)",))
    return [
        item(-1, Attached(ticket=0, run_id=_RUN_ID, run=RUN, epoch=1, ranks=1, copies=copies)),
        item(-1, terms, numbers_to_bytes([7, 8])),
        item(-1, pulse),
    ]


def _group(name: str) -> tuple[bytes, bytes]:
    """Its frame, and that one's digest."""
    frame = encode(named_group(name))
    return frame, xxhash.xxh3_128_digest(frame)


def _puts() -> list[Any]:
    """Groups are put to a keeper that is the only one; the plane accepts, refuses, and has them kept anew."""
    (a, a_digest), (b, b_digest) = _group("a"), _group("b")
    answers: list[FromPlane] = [
        Accepted(ticket=2, duplicate=False),
        Missing(put=4),
        Rejected(ticket=4, kind="Conflict", reason="no"),
        Room(ticket=1),
        KeeperPulse(epoch=1, number=2, batch=1, forget=numbers_to_bytes([1])),
        Unknown(epoch=2),
    ]
    return [
        *_joined(1),
        item(0, Attach(ticket=0, run=RUN)),
        item(0, AskRoom(ticket=1, run="", size=len(a))),
        item(0, Put(ticket=1, group="a", digest=a_digest), a),
        item(1, Put(ticket=1, group="b", digest=b_digest), b),
        item(1, Put(ticket=2, group="b", digest=a_digest), b),
        item(1, Put(ticket=3, group="e", digest=b_digest, evaluation=True), b),
        item(0, Trace(ticket=1, group="a", digest=a_digest), b""),
        item(0, GiveUp(ticket=1)),
        *(item(-1, answer) for answer in answers),
        200.0,
    ]


def _copies() -> list[Any]:
    """Two copies: a peer has one, or cannot; and this keeper keeps some for peers."""
    a, digest = _group("a")
    return [
        *_joined(2),
        item(0, Put(ticket=1, group="a", digest=digest), a),
        item(-2, Copied(ticket=3, error="its quota is full")),
        item(-2, Copied(ticket=4, number=9)),
        item(-1, Accepted(ticket=1, duplicate=False)),
        item(1, CopyFrame(ticket=1, group="a", digest=digest), a),
        item(1, CopyFrame(ticket=1, group="a", digest=digest), a),
        item(1, CopyFrame(ticket=2, group="a", digest=bytes(16)), a),
        item(1, DropCopies(numbers=(1, 2))),
        40.0,
    ]


def _takes() -> list[Any]:
    (a, a_digest), (b, b_digest) = _group("a"), _group("b")
    return [
        *_joined(1),
        item(0, CopyFrame(ticket=1, group="a", digest=a_digest), a),
        item(0, CopyFrame(ticket=2, group="b", digest=b_digest), b),
        item(1, Take(ticket=1, picks=((1, "a", (0, 1)), (2, "b", (1,))))),
        item(1, Take(ticket=1, picks=((1, "a", (0, 1)), (2, "b", (1,))), lost=1)),
        item(1, Take(ticket=2, picks=((2, "b", ()),))),
        item(1, Take(ticket=3, picks=((3, "b", (0,)), (1, "a", (7,))))),
        item(-1, KeeperPulse(epoch=1, number=2, batch=1, forget=numbers_to_bytes([2]))),
        item(1, Take(ticket=4, picks=((2, "b", (0,)),))),
    ]


def _to_plane() -> list[Any]:
    """A keeper enlists, vouches for groups, and a rank is told to take them."""
    about = Enlist(name="a.1", node="a", url="tcp://127.0.0.1:9", key=b"", incarnation="i", last=0, life=1, number=1)
    frame, digest = _group("a")
    facts = check_group(frame, group="a", seq_len=64, limits=LIMITS).to_bytes()
    vouched = PutFacts(ticket=1, group="a", digest=digest, size=len(frame), facts=facts, copies=(("a.1", 1),))
    life = KeeperBeat(incarnation="i", number=1, num_bytes=len(frame), num_groups=1)
    again = msgspec.structs.replace(about, incarnation="j", life=2, last=1)
    return [
        item(_PLANE, about, numbers_to_bytes([])),
        item(_PLANE, AskRoom(ticket=9, run="", size=len(frame))),
        _vouched(vouched),
        _vouched(msgspec.structs.replace(vouched, ticket=2)),
        _vouched(msgspec.structs.replace(vouched, ticket=3, digest=bytes(16), copies=(("a.1", 2),))),
        item(_PLANE, life),
        item(_PLANE + 1, hello()),
        item(_PLANE + 1, Request(session=0, step=1)),
        *[0.1] * 4,  # it is planned and built, a turn each
        item(_PLANE + 1, Received(session=0, step=1, digest="$")),
        item(_PLANE + 1, Commit(session=0, step=1, policy_version=3)),
        item(_PLANE, msgspec.structs.replace(life, number=2, forgot=1, damaged=(1,))),
        item(_PLANE + 2, Put(ticket=1, group="a"), frame),
        item(_PLANE, again, numbers_to_bytes([1, 5])),
        item(_PLANE, msgspec.structs.replace(life, incarnation="j")),
        item(_PLANE + 2, Ask(ticket=2)),
        90.0,
        item(_PLANE, msgspec.structs.replace(life, incarnation="j", number=2)),
    ]


def _to_rank() -> list[Any]:
    frame = encode(named_group("a"))
    return [
        item(-3, Taking(ticket=0)),
        item(-3, Taking(ticket=0, sent=1), b""),
        item(-3, Taken(ticket=0, missing=((0, "damaged"),))),
        item(-3, Taken(ticket=1), frame),
        20.0,
        item(-3, Taken(ticket=2), frame),
    ]
