"""Fuzz target for the protocol: any messages, in any order, from anybody, to a real plane and to a real rank.

An input is a list of `[peer, message, frames]`. Peers from 0 up talk to a plane in memory; peer -1 is the plane
talking to a rank. A number instead of a list lets that many seconds pass. The text "$" in a message stands for the
digest of the step that the peer was sent last, which a fuzzer cannot guess.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import msgspec
import xxhash

from penstock.arrays import Samples
from penstock.arrays.digests import sample_digests, step_digest
from penstock.errors import CorruptFrame, PenstockError
from penstock.frames import decode, encode
from penstock.log import SqliteLog
from penstock.packing import Packing, RankPlan, fill, pack
from penstock.plane.loop import PlaneLoop
from penstock.plane.settings import PlaneSettings, Target
from penstock.plane.workers import Inline
from penstock.protocol.lease_messages import AddPrompts, GiveBack, LeaseTasks, OfferPrompts, Renew
from penstock.protocol.message_header import HEAD_BYTES, pack_message, read_from_client, read_from_plane, wrap
from penstock.protocol.messages import (
    Aborted,
    Ask,
    AskRoom,
    Attach,
    Attached,
    Beat,
    Buffer,
    Bye,
    Commit,
    Committed,
    Deliver,
    Discard,
    Fail,
    Foreign,
    Frames,
    FromClient,
    FromPlane,
    GiveUp,
    Hello,
    Noted,
    Peer,
    Pulse,
    Put,
    Received,
    Refused,
    Release,
    Report,
    Request,
    Sent,
    SetWeight,
    Trace,
    Unknown,
    Welcome,
)
from penstock.protocol.prompt_chunks import PromptChunk, list_digest
from penstock.protocol.rank_session import Arrived, RankSession
from tests.support.fuzz_frames import LIMITS
from tests.support.fuzz_mutation import Change, change_bytes, change_tree
from tests.support.groups import named_group

MAX_MESSAGES = 64
RUN = "fuzz"


def new_server(transport: Wire) -> PlaneLoop:
    """A plane of one rank, one group a step, that keeps everything in memory."""
    settings = PlaneSettings(packing=Packing(ranks=1, seq_len=64), target=Target(groups=2), run=RUN)
    return PlaneLoop(settings, SqliteLog(None), [transport], workers=Inline())


def new_rank() -> RankSession:
    return RankSession(run=RUN, rank=0, world=1, step=1, incarnation="r")


class Wire:
    """The plane's end of a connection whose other end is the fuzzer."""

    poll_s: float | None = None
    url = "fuzz:"

    def __init__(self) -> None:
        self.inbox: list[tuple[Peer, Buffer, Frames]] = []
        self.digests: dict[Peer, str] = {}
        """Of the last step that each peer was sent."""

    def pollable(self) -> None:
        return None

    def receive(self) -> list[tuple[Peer, Buffer, Frames]]:
        got, self.inbox = self.inbox, []
        return got

    def send(self, peer: Peer, header: bytes, frames: Frames = ()) -> bool:
        message = read_from_plane(header)
        if isinstance(message, Deliver):
            self.digests[peer] = message.digest
        return True

    def is_writer(self, peer: Peer) -> bool:
        return True

    def forget(self, peer: Peer) -> None:
        pass

    def close(self) -> None:
        pass


class Messages:
    """The plane goes on, its ledger balanced, and the rank goes on or fails with our error."""

    def __init__(self, _: Path) -> None:
        self._one = pack(named_group("a"), ranks=1, seq_len=64).plan.rank_plans[0].to_bytes()

    def seeds(self) -> list[bytes]:
        lists = [_to_plane(), _several_runs(), self._to_rank(), _endings(), _tasks()]
        return [msgspec.msgpack.encode(items) for items in lists]

    def mutate(self, rng: Random, data: bytes, change: Change) -> bytes:
        try:
            items = msgspec.msgpack.decode(data)
            changed = [_change_item(rng, item, change) for item in items] if rng.random() < 0.1 else items
            return msgspec.msgpack.encode(change_tree(rng, changed, lambda part: _change_frame(rng, part, change)))
        except (ValueError, TypeError, RecursionError, OverflowError):
            return change(data)

    def run(self, data: bytes) -> bool:
        try:
            items = msgspec.msgpack.decode(data)
        except (ValueError, RecursionError):
            items = []
        return self._run(items[:MAX_MESSAGES]) if isinstance(items, list) else False

    def _run(self, items: list[Any]) -> bool:
        return _Session().run(items)

    def _to_rank(self) -> list[Any]:
        samples = Samples.of(named_group("a"))
        frame = encode(samples)
        digest = step_digest(self._one, sample_digests(samples))
        same: dict[str, int] = {"epoch": 1, "session": 1}
        step = Deliver(run=RUN, epoch=1, session=1, step=1, rank=0, world=1, digest=digest, plan=self._one)
        return [
            _from_plane(Attached(ticket=0, run_id=bytes(16), run=RUN, epoch=1, ranks=1)),
            _from_plane(Welcome(**same, ready=True, step=1)),
            _from_plane(Sent(**same, step=1, copies=1)),
            _from_plane(step, frame),
            _from_plane(Release(**same, step=1)),
            _from_plane(Committed(**same, step=1)),
            _from_plane(Noted(**same, number=1)),
            _from_plane(Pulse(**same, waiting_for="generation")),
            _from_plane(Unknown(epoch=1)),
            _from_plane(Aborted(**same, step=2, rank=0, reason="ended")),
            _from_plane(Refused(epoch=1, reason="no")),
            _from_plane(Foreign(reason="of another run")),
        ]

    def close(self) -> None:
        """Nothing is open."""


class _Session:
    """One plane and one rank, and a clock that only the input moves."""

    def __init__(self) -> None:
        self.wire, self.rank, self.now = Wire(), new_rank(), 1.0
        self.server = new_server(self.wire)
        self.rank.start(self.now)
        self.rank.request(1, self.now)
        self.taken = False

    def run(self, items: list[Any]) -> bool:
        try:
            for item in items:
                self._take(item)
            ledger = self.server.engine.ledger
            assert ledger.balanced, ledger
            msgspec.json.encode(self.server.status())
            assert not self.server.engine.counts["messages_failed"]  # handled, and not only survived
        finally:
            self.server.engine.log.close()
        return self.taken

    def _take(self, item: Any) -> None:
        self.now += 0.05
        if isinstance(item, (int, float)):
            self.now += min(abs(item), 100.0) if item == item else 0.0
        elif isinstance(item, list) and len(item) == 3 and isinstance(item[0], int) and isinstance(item[2], list):
            peer, message, frames = item
            record = msgspec.msgpack.encode(fill_in(message, self.wire.digests.get(peer, "")))
            header = wrap(record, bytes.fromhex(self.server.engine.log.run_id))
            buffers = [frame for frame in frames if isinstance(frame, bytes)]
            self._to_rank(header, buffers) if peer < 0 else self._to_plane(peer, header, buffers)
        self.server.turn(self.now)
        self.rank.on_tick(self.now)

    def _to_plane(self, peer: int, header: bytes, frames: Frames) -> None:
        self.wire.inbox.append((peer, header, frames))
        try:
            read_from_client(header)
        except CorruptFrame:
            return
        self.taken = True

    def _to_rank(self, header: bytes, frames: Frames) -> None:
        try:
            message = read_from_plane(header)
            events = self.rank.on_message(message, frames, self.now)
            self.taken = True
            for event in events:
                if isinstance(event, Arrived) and len(event.frames) == 1:
                    fill(
                        decode(event.frames[0], limits=LIMITS),
                        RankPlan.from_bytes(event.deliver.plan, max_tokens=1 << 16),
                    )
                    self.rank.received(event.deliver.step, event.deliver.digest, self.now)
        except PenstockError:
            return


def _to_plane() -> list[Any]:
    """A session that uses every message once."""
    a, b = (encode(named_group(name)) for name in "ab")
    digest = xxhash.xxh3_128_digest(a)
    return [
        _from_client(hello()),
        _from_client(Put(ticket=1, group="a", digest=digest), a),
        _from_client(Put(ticket=2, group="b"), b),
        _from_client(Attach(ticket=0, run=RUN)),
        _from_client(AskRoom(ticket=7, tenant="", size=1 << 40)),
        _from_client(AskRoom(ticket=8, tenant="", size=100, waits=False)),
        _from_client(GiveUp(ticket=7)),
        _from_client(Trace(ticket=3, group="a", digest=digest), b""),
        _from_client(Trace(ticket=4, group="a", digest=digest)),
        _from_client(Request(session=0, step=1)),
        _from_client(Request(session=0, step=2)),
        _from_client(Received(session=0, step=1, digest="$")),
        _from_client(Beat(session=0, number=1)),
        _from_client(Report(session=0, step=1, priorities={"a/0": 0.5}, metrics={"loss": 1.0}, number=1)),
        _from_client(Commit(session=0, step=1, policy_version=3)),
        _from_client(Discard(ticket=5, reason="zero variance", samples=2)),
        _from_client(Ask(ticket=6)),
    ]


def _tasks() -> list[Any]:
    """A list is opened, its two prompts are leased, renewed, returned and completed."""
    chunk = PromptChunk(0, ("x", "y"), (b"", b"{}"))
    digest = list_digest([chunk.digest])
    offer = OfferPrompts(
        ticket=1,
        list="p",
        digest=digest,
        count=2,
        chunks=(chunk.digest,),
        epochs=2,
        seed=1,
        shuffle=False,
        attempts=2,
        again=("stale",),
    )
    return [
        _from_client(offer),
        _from_client(AddPrompts(ticket=2, digest=digest, chunk=0, **chunk._asdict())),
        _from_client(offer),
        _from_client(LeaseTasks(ticket=3, list="p", count=2, worker="w", lease_s=1.0)),
        0.5,
        _from_client(Renew(ticket=4, leases=(2, 3))),
        _from_client(GiveBack(ticket=5, leases=(3,), reason="stale")),
        _from_client(Put(ticket=6, group="task:p:1:0:0"), encode(named_group("task:p:1:0:0"))),
        _from_client(LeaseTasks(ticket=7, list="p", count=2, worker="w", lease_s=1.0)),
        3,
    ]


def _several_runs() -> list[Any]:
    frames = [encode(named_group(name, run=name)) for name in "ab"]
    return [
        _from_client(SetWeight(ticket=1, tenant="a", weight=1.0)),
        _from_client(SetWeight(ticket=2, tenant="b", weight=2.0)),
        _from_client(Put(ticket=3, group="a"), frames[0]),
        _from_client(Put(ticket=4, group="b"), frames[1]),
        _from_client(hello()),
        _from_client(Request(session=0, step=1)),
        _from_client(SetWeight(ticket=5, tenant="b", weight=0.0, reason="enough")),
        _from_client(Ask(ticket=6)),
    ]


def _endings() -> list[Any]:
    return [
        _from_client(hello()),
        12.0,
        _from_client(hello()),
        _from_client(Fail(session=0, step=1, reason="out of memory")),
        _from_client(msgspec.structs.replace(hello(), incarnation="j")),
        _from_client(Bye(session=0)),
        [0, ["nothing", 1], []],
    ]


def hello() -> Hello:
    return Hello(run=RUN, rank=0, world=1, replica=0, replicas=1, incarnation="i", session=0, step=1)


def _from_client(message: FromClient, *frames: bytes) -> list[Any]:
    return item(0, message, *frames)


def _from_plane(message: FromPlane, *frames: bytes) -> list[Any]:
    return item(-1, message, *frames)


def item(peer: int, message: FromClient | FromPlane, *frames: bytes) -> list[Any]:
    """A message as an input has it."""
    return [peer, msgspec.msgpack.decode(pack_message(message)[HEAD_BYTES:]), list(frames)]


def fill_in(message: Any, digest: str) -> Any:
    """With the digest that a fuzzer cannot guess."""
    return [digest if value == "$" else value for value in message] if isinstance(message, list) else message


def _change_item(rng: Random, item: Any, change: Change) -> Any:
    return change_tree(rng, item, change) if rng.random() < 0.3 else item


def _change_frame(rng: Random, data: bytes, change: Change) -> bytes:
    """A group's frame becomes that of another group now and then; anything else changes as bytes."""
    if data[:8] != b"PENSTOCK" or rng.random() < 0.2:
        return change(data) if rng.random() < 0.5 else change_bytes(rng, data)
    version = rng.choice([0, 1, 2**40, 2**53, 2**63 - 1])
    return encode(named_group(rng.choice("abc"), tokens=rng.choice([2, 6, 300]), policy_version=version))
