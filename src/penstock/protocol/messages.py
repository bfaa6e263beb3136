"""What the plane, the ranks and the producers say to each other: small typed records, payloads beside them.

A message is a header, which holds one of these records (`message_header.py`), and a list of payload buffers. Payloads
are frames (penstock.frames) and are never copied into the header. Fields are only ever appended; readers ignore what
they do not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec

from penstock.arrays import MAX_VERSION
from penstock.protocol.message_record import SCHEMA as SCHEMA
from penstock.protocol.message_record import Message as _Message

Version: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_VERSION)]
MAX_REASON = 2000
"""Characters of what went wrong."""
MAX_NAME = 200
"""Characters of a run's name, or of what tells one start of a process from another."""
Buffer: TypeAlias = bytes | bytearray | memoryview
Frames: TypeAlias = Sequence[Buffer]
Peer: TypeAlias = object
"""Whatever a transport uses to address a process; comes with each message and goes back with each answer."""
OVER_LENGTH = ("truncated_samples", "truncated_tokens", "dropped_samples", "dropped_tokens")
"""What an answer counts of samples longer than `seq_len`, in this order."""
MAX_SIGNED = 64
"""URLs that are asked for with one message."""
BEHIND: Frames = (b"",)
"""The payload of a message that has none, and must not overtake those that have."""


# ------------------------------------------------------------------ from a rank


class Hello(_Message, frozen=True, tag="hello"):
    """A process of the trainer joins, or comes back after the connection or the plane was lost."""

    run: str
    rank: int
    world: int
    """Number of data ranks."""
    replica: int
    """Which of the processes that share this data rank (tensor or context parallel)."""
    replicas: int
    incarnation: str
    """New for every start of the process: tells a restart from a reconnect."""
    session: int
    """0 for a process that just started; else the session it belongs to."""
    step: int
    """The first step it wants; 0 for the first that is not committed."""
    schema: int = SCHEMA
    direct: bool = False
    """Whether it reads samples from storage itself; else they come with each step."""
    process: str = ""
    """Its pid and host, for messages to people."""
    pid: int = 0
    pid_space: str = ""
    """Where the pid counts: the machine's boot and the pid namespace. Empty: not known."""


class Request(_Message, frozen=True, tag="request"):
    session: int
    step: int
    lost: int = 0
    """So many copies of it are known to be lost. While one may be on its way no other is sent: on a slow link that
    would only make it later."""


class Received(_Message, frozen=True, tag="received"):
    session: int
    step: int
    digest: str


class Commit(_Message, frozen=True, tag="commit"):
    session: int
    step: int
    policy_version: Version | None = None


class Report(_Message, frozen=True, tag="report"):
    """Priorities of groups and numbers about samples, by id."""

    session: int
    step: int
    priorities: dict[str, float] = {}  # noqa: RUF012 - copied by msgspec
    metrics: dict[str, float] = {}  # noqa: RUF012
    number: int = 0
    """Counts this process's reports from 1, so that one sent again is not applied again."""


class Fail(_Message, frozen=True, tag="fail"):
    """Something went wrong on this rank: every rank must know."""

    session: int
    step: int
    reason: str


class Damaged(_Message, frozen=True, tag="damaged"):
    """This rank cannot read a group of a step from storage, or read something else than was put."""

    session: int
    step: int
    group: str
    reason: str


class Beat(_Message, frozen=True, tag="beat"):
    session: int
    number: int = 0
    """Counts this process's beats from 1."""
    heard: int = 0
    """The last beat whose pulse came back: so the plane notices when only the way to this process is cut."""
    filling: tuple[int, ...] = ()
    """Steps that came and are being checked and filled: however long that takes, they are not late."""
    probe: int = 0
    """The probe that it answers."""


class Bye(_Message, frozen=True, tag="bye"):
    """A clean end: this process wants nothing more."""

    session: int


# ------------------------------------------------------------------ from the plane to a rank


class Welcome(_Message, frozen=True, tag="welcome"):
    epoch: int
    session: int
    ready: bool
    """Whether all processes of the session have joined."""
    step: int
    """The next step that is not committed."""


class Deliver(_Message, frozen=True, tag="deliver"):
    """A step for one rank. The payload is the rank's samples, or nothing for a rank that reads storage itself."""

    run: str
    epoch: int
    session: int
    step: int
    rank: int
    world: int
    digest: str
    """xxh3-128 of the rank's plan and its samples' digests (`arrays.digests.step_digest`), however they are encoded."""
    plan: bytes
    """The rank's part of the plan, and the step's global numbers."""
    schema: int = SCHEMA
    picks: bytes = b""
    """Which samples of which stored groups these are (`penstock.protocol.picks`)."""
    numbers: dict[str, float] = msgspec.field(default_factory=dict)
    """What the plane knows of the time before the step was planned: `gen/` what was put, `buffer/` what was held. Not
    in the digest."""


class Sent(_Message, frozen=True, tag="sent"):
    """The answer to a request that is repeated. It takes the way of the step: who gets this first has lost that."""

    epoch: int
    session: int
    step: int
    copies: int
    """Sent before this."""


class Release(_Message, frozen=True, tag="release"):
    """Every process has the step and found it whole: now it may be trained."""

    epoch: int
    session: int
    step: int


class Committed(_Message, frozen=True, tag="committed"):
    epoch: int
    session: int
    step: int


class Noted(_Message, frozen=True, tag="noted"):
    """A report arrived."""

    epoch: int
    session: int
    number: int


class Aborted(_Message, frozen=True, tag="aborted"):
    """The session is over for everybody: which rank, at which step, why."""

    epoch: int
    session: int
    step: int
    rank: int
    reason: str


class Refused(_Message, frozen=True, tag="refused"):
    """This peer cannot take part: says what does not match, with both values."""

    epoch: int
    reason: str
    session: int = 0
    """The session that is over; 0 when it is about the process itself."""


class Unknown(_Message, frozen=True, tag="unknown"):
    """The plane does not know this process (any more): it should say hello."""

    epoch: int


class Pulse(_Message, frozen=True, tag="pulse"):
    """The plane lives, and says what it waits for."""

    epoch: int
    session: int
    waiting_for: str
    left: int = -1
    """A rank that left: no further step can be served to all."""
    number: int = 0
    """The beat that it answers."""
    policy_version: int | None = None
    """The version of the weights that was published last."""
    credit_groups: int = 0
    """Groups that may be sent without asking for room, and not be answered yet."""
    credit_bytes: int = 0
    """Their bytes together."""
    probe: int = 0
    """Repeat this in a beat, at once: another process wants the place."""


# ------------------------------------------------------------------ first contact, of anybody


class Attach(_Message, frozen=True, tag="attach"):
    """Which run is this? The first thing a client says, and the only one without the run's id."""

    ticket: int
    run: str = ""
    """The name of the run it wants; empty for whichever is here."""


class Attached(_Message, frozen=True, tag="attached"):
    ticket: int
    run_id: bytes
    run: str
    epoch: int
    ranks: int
    policy_version: int | None = None
    credit_groups: int = 0
    """Groups that may be sent without asking for room, and not be answered yet."""
    credit_bytes: int = 0
    """Their bytes together."""
    storage: str = ""
    """Folder or URL of the plane's storage; empty where only the plane can reach it."""
    may_write: bool = False
    """Whether this client may write frames itself and vouch for their metadata."""
    seq_len: int = 0
    """What metadata is made for."""
    drops_long: bool = False
    """Whether samples longer than `seq_len` are dropped, in metadata too; else they are truncated."""
    max_frame: int = 0
    """Bytes of the largest frame that can be sent here: the connection ends with a larger one. 0: not known."""
    signs: bool = False
    """Whether who writes frames itself asks the plane for signed URLs, and needs no credentials for the storage."""


class Foreign(_Message, frozen=True, tag="foreign"):
    """What you said was meant for another run: you belong to an earlier one, and must be opened anew."""

    reason: str


# ------------------------------------------------------------------ producers and onlookers


class OpenSegment(_Message, frozen=True, tag="open-segment"):
    """A process that writes to storage itself wants a segment of its own."""

    ticket: int


class SegmentOpened(_Message, frozen=True, tag="segment-opened"):
    ticket: int
    segment: str
    """Its name, which the log knows by now."""


class SignUrls(_Message, frozen=True, tag="sign-urls"):
    """A process that writes to storage without credentials wants URLs of objects of its segments."""

    ticket: int
    method: str
    """PUT, or GET: of an object that it has written, or of the marker."""
    names: tuple[str, ...]
    """Below the storage's address, such as segments/3f9c21d07b6a4e58/000000; at most `MAX_SIGNED`."""


class SignedUrls(_Message, frozen=True, tag="signed-urls"):
    ticket: int
    urls: tuple[str, ...]
    """In the order of the names. Whoever has one may use it."""
    seconds: float
    """How long they are valid, from when they were asked for."""

    def __repr__(self) -> str:
        return f"SignedUrls(ticket={self.ticket}, {len(self.urls)} URLs, seconds={self.seconds})"


class Put(_Message, frozen=True, tag="put"):
    """A group. Its payload is one frame; or none, where the sender has written the frame to storage."""

    ticket: int
    """Chosen by the sender, returned with the answer."""
    group: str
    digest: bytes = b""
    """xxh3-128 of the frame, as it was sent."""
    evaluation: bool = False
    """To be recorded and looked at: no step may use it, and it waits in no table."""
    location: str = ""
    """Where the sender has written the frame; empty where the frame is the payload."""
    metadata: bytes = b""
    """Of a frame in storage: what the plane decides by."""
    shown: bytes = b""
    """Of an evaluation group in storage: what metrics show of it."""
    priority: float = 1.0
    """For samplers that go by it, until ranks report another."""


class Trace(_Message, frozen=True, tag="trace"):
    """Asked instead of putting again. With an (empty) payload it follows the group on its way, and is answered as the
    put would have been, or with `Missing`; without one it only asks for a sign of life, a `Pulse`."""

    ticket: int
    group: str
    digest: bytes


class AskRoom(_Message, frozen=True, tag="ask-room"):
    """May I put a group of this size? Asked instead of sending it by a client without credit, and repeated while it
    waits. Answered by `Room`, now or later, or by `Rejected` for the time being."""

    ticket: int
    """Of the put."""
    run: str
    """Of the group's samples."""
    size: int
    waits: bool = True
    """Whether to be told when there is room; else the answer is for now."""
    group: str = ""
    digest: bytes = b""
    """Of the group: one that is there already needs no room."""


class GiveUp(_Message, frozen=True, tag="give-up"):
    """This put no longer waits for room: it was cancelled, or is unknown here."""

    ticket: int


class Discard(_Message, frozen=True, tag="discard"):
    """Samples that were generated and filtered out before they became a group."""

    ticket: int
    reason: str
    samples: int
    key: str = ""
    """Counted once under this name, however often it is said; empty: counted each time."""


class SettleGroup(_Message, frozen=True, tag="settle"):
    """What is to become of a group in quarantine: given up, or back among those that wait."""

    ticket: int
    group: str
    drop: bool


class SetWeight(_Message, frozen=True, tag="weight"):
    """What a run is to have of the trainer."""

    ticket: int
    run: str
    weight: float
    """Against those of the other runs; 0 evicts it."""
    reason: str = ""


class Accepted(_Message, frozen=True, tag="accepted"):
    ticket: int
    duplicate: bool = False
    policy_version: int | None = None
    """The version of the weights that was published last."""
    stale: bool = False
    """It was too old for `max_staleness`: taken, counted, and dropped."""
    credit_groups: int = 0
    """Groups that may be sent without asking for room, and not be answered yet."""
    credit_bytes: int = 0
    """Their bytes together."""
    over_length: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Samples and tokens truncated, samples and tokens dropped, because samples were longer than `seq_len`."""


class Missing(_Message, frozen=True, tag="missing"):
    """The group that was traced did not come: it must be put again."""

    put: int
    """The ticket of its put, which remains open."""


class Room(_Message, frozen=True, tag="room"):
    """There is room for the group of this put now: send it."""

    ticket: int
    policy_version: int | None = None


class Rejected(_Message, frozen=True, tag="rejected"):
    ticket: int
    kind: str
    """The error's name: InvalidInput, Conflict, Overloaded, DiskFull, ..."""
    reason: str
    retry_after_s: float = 0.0


class Ask(_Message, frozen=True, tag="ask"):
    ticket: int


class Status(_Message, frozen=True, tag="status"):
    ticket: int
    text: bytes
    """JSON."""


FromRank: TypeAlias = Hello | Request | Received | Commit | Report | Fail | Damaged | Beat | Bye
FromProducer: TypeAlias = (
    Put | OpenSegment | SignUrls | Trace | AskRoom | GiveUp | Discard | SettleGroup | SetWeight | Ask
)
FromClient: TypeAlias = FromRank | FromProducer | Attach
FromPlane: TypeAlias = (
    Welcome
    | Deliver
    | Sent
    | Release
    | Committed
    | Noted
    | Aborted
    | Refused
    | Unknown
    | Pulse
    | Attached
    | Foreign
    | SegmentOpened
    | SignedUrls
    | Accepted
    | Missing
    | Room
    | Rejected
    | Status
)
