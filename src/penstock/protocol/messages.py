"""The messages between the plane, the ranks and the producers: small typed records, with payloads beside them.

A message is a header, which holds one of these records (`message_header.py`), and a list of payload buffers. Payloads
are frames (penstock.frames) and are never copied into the header.

Records travel as msgpack arrays: fields go by position. So a field may only be appended, never moved or removed.
Readers ignore trailing fields they do not know, and fill in defaults for those that an older sender does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, TypeAlias

import msgspec

from penstock.arrays import MAX_TEXT, MAX_VERSION, run_name_problem
from penstock.errors import InvalidInput
from penstock.protocol.lease_messages import (
    AddPrompts,
    AskFeedback,
    AttachValues,
    ColumnsLeased,
    Feedback,
    GiveBack,
    LeaseColumns,
    LeaseTasks,
    OfferPrompts,
    PromptsOffered,
    Renew,
    Renewed,
    TasksLeased,
    ValuesAttached,
)
from penstock.protocol.message_base import Message

SCHEMA = 2
Version: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_VERSION)]
MAX_REASON = 2000
"""Characters of an error's text."""
MAX_NAME = 200
"""Characters of a run's name, or of an incarnation."""
MAX_KEY = 1024
"""Characters of the key that makes a discard count once."""
Buffer: TypeAlias = bytes | bytearray | memoryview
Frames: TypeAlias = Sequence[Buffer]
Peer: TypeAlias = object
"""Whatever a transport uses to address a process. Comes with each message and is passed back with each answer."""
OVER_LENGTH = ("truncated_samples", "truncated_tokens", "dropped_samples", "dropped_tokens")
"""What `Accepted.over_length` counts, in this order."""
MAX_SIGNED = 64
"""URLs asked for with one message, at most."""
MAX_ASKED = 1024
"""Groups asked about with one message, at most."""
MAX_SHOWN = 256
"""Samples of a discard whose rewards and lengths are sent, at most."""
BEHIND: Frames = (b"",)
"""An empty payload. It sends a message over the payload connection, so that it cannot overtake earlier payloads."""


# ------------------------------------------------------------------ from a rank


class Hello(Message, frozen=True, tag="hello"):
    """A process of the trainer joins, or comes back after it lost the connection or the plane restarted."""

    run: str
    rank: int
    world: int
    """Number of data ranks."""
    replica: int
    """Index among the processes that share this data rank (tensor or context parallel)."""
    replicas: int
    incarnation: str
    """A new random id for every start of the process: distinguishes a restart from a reconnect."""
    session: int
    """0 for a process that just started, otherwise the session it belongs to."""
    step: int
    """The first step it wants, or 0 for the first uncommitted one."""
    schema: int = SCHEMA
    direct: bool = False
    """Whether it reads samples from storage itself. Otherwise they come with each step."""
    process: str = ""
    """Its pid and host, for error messages."""
    pid: int = 0
    pid_space: str = ""
    """Where the pid is valid: the machine's boot id and the pid namespace. Empty if unknown."""
    life: str = ""
    """A random text, the same in all sources of one process. A container that restarts keeps pid and host, not this."""


class Request(Message, frozen=True, tag="request"):
    """Asks for a step."""

    session: int
    step: int
    lost: int = 0
    """Copies of the step known to be lost. The plane sends another copy only when all earlier ones are lost: on a slow
    link a second copy would only delay the first."""


class Received(Message, frozen=True, tag="received"):
    """This rank has the step and verified it."""

    session: int
    step: int
    digest: str


class Commit(Message, frozen=True, tag="commit"):
    """This rank has trained the step."""

    session: int
    step: int
    policy_version: Version | None = None


class Report(Message, frozen=True, tag="report"):
    """New priorities of groups and metrics of samples, by id."""

    session: int
    step: int
    priorities: dict[str, float] = msgspec.field(default_factory=dict)
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    number: int = 0
    """Counts this process's reports from 1. A repeated report is not applied twice."""


class Fail(Message, frozen=True, tag="fail"):
    """This rank failed. The plane aborts the session for every rank."""

    session: int
    step: int
    reason: str


class Damaged(Message, frozen=True, tag="damaged"):
    """This rank cannot read a group of a step from storage, or read other bytes than were put."""

    session: int
    step: int
    group: str
    reason: str


class Beat(Message, frozen=True, tag="beat"):
    """A rank's heartbeat."""

    session: int
    number: int = 0
    """Counts this process's beats from 1."""
    heard: int = 0
    """The last beat answered by a pulse. Shows the plane when only the direction to this process is cut."""
    filling: tuple[int, ...] = ()
    """Steps that arrived and are being verified and filled. These are not late, however long that takes."""
    probe: int = 0
    """The probe this beat answers, or 0."""


class Bye(Message, frozen=True, tag="bye"):
    """This process leaves cleanly and wants no further steps."""

    session: int


# ------------------------------------------------------------------ from the plane to a rank


class Welcome(Message, frozen=True, tag="welcome"):
    """Answers a hello."""

    epoch: int
    session: int
    ready: bool
    """Whether all processes of the session have joined."""
    step: int
    """The first uncommitted step."""


class Deliver(Message, frozen=True, tag="deliver"):
    """A step for one rank. The payload is the rank's samples, or empty for a rank that reads storage itself."""

    run: str
    epoch: int
    session: int
    step: int
    rank: int
    world: int
    digest: str
    """xxh3-128 of the rank's plan and its samples' digests (`arrays.digests.step_digest`). Independent of encodings."""
    plan: bytes
    """The rank's part of the plan, and the step's global denominators."""
    schema: int = SCHEMA
    picks: bytes = b""
    """Which samples of which stored groups to read (`penstock.protocol.picks`)."""
    numbers: dict[str, float] = msgspec.field(default_factory=dict)
    """The plane's metrics up to the moment the step was planned: `gen/` what was put, `buffer/` what was held. Not part
    of the digest."""


class Sent(Message, frozen=True, tag="sent"):
    """Answers a repeated request. Sent on the same connection as the step, so a rank that receives this without the
    step knows the step was lost."""

    epoch: int
    session: int
    step: int
    copies: int
    """Copies of the step sent before this message."""


class Release(Message, frozen=True, tag="release"):
    """Every process has the step and verified it: now it may be trained."""

    epoch: int
    session: int
    step: int


class Committed(Message, frozen=True, tag="committed"):
    """All ranks have committed the step, and this is in the log."""

    epoch: int
    session: int
    step: int


class Noted(Message, frozen=True, tag="noted"):
    """Confirms a report."""

    epoch: int
    session: int
    number: int


class Aborted(Message, frozen=True, tag="aborted"):
    """The session is over for every rank: which rank failed, at which step, why."""

    epoch: int
    session: int
    step: int
    rank: int
    reason: str


class Refused(Message, frozen=True, tag="refused"):
    """This peer cannot take part. The reason names what does not match, with both values."""

    epoch: int
    reason: str
    session: int = 0
    """The session that is over, or 0 when the process itself is refused."""


class Unknown(Message, frozen=True, tag="unknown"):
    """The plane does not know this process (any longer). It should send a hello."""

    epoch: int


class Pulse(Message, frozen=True, tag="pulse"):
    """The plane's heartbeat, with what it waits for."""

    epoch: int
    session: int
    waiting_for: str
    left: int = -1
    """A rank that left, or -1. After that no further step can be served to all."""
    number: int = 0
    """The beat this pulse answers."""
    policy_version: int | None = None
    """The version of the weights that was published last."""
    credit_groups: int = 0
    """Groups that may be unanswered without asking for room."""
    credit_bytes: int = 0
    """Their bytes together."""
    probe: int = 0
    """If not 0: answer at once with a beat that repeats this number. Another process wants this place."""


# ------------------------------------------------------------------ first contact of any client


class Attach(Message, frozen=True, tag="attach"):
    """Asks which run this is. A client's first message, and the only one without the run's id."""

    ticket: int
    run: str = ""
    """The name of the run the client wants. Empty accepts any."""


class Attached(Message, frozen=True, tag="attached"):
    """Answers `Attach`."""

    ticket: int
    run_id: bytes
    run: str
    epoch: int
    ranks: int
    policy_version: int | None = None
    credit_groups: int = 0
    """Groups that may be unanswered without asking for room."""
    credit_bytes: int = 0
    """Their bytes together."""
    storage: str = ""
    """Folder or URL of the plane's storage. Empty if only the plane can reach it."""
    may_write: bool = False
    """Whether the plane trusts this client to write frames itself and to compute their metadata."""
    seq_len: int = 0
    """The `seq_len` to compute metadata for."""
    drops_long: bool = False
    """Whether samples longer than `seq_len` are dropped, in metadata too. Otherwise they are truncated."""
    max_frame: int = 0
    """Bytes of the largest frame the plane takes. A larger one ends the connection. 0 if unknown."""
    signs: bool = False
    """Whether a client that writes frames itself asks the plane for signed URLs, and needs no credentials."""
    by_env: bool = False
    """Whether groups wait by their environment (`env_weights`), not by their tenant."""


class Foreign(Message, frozen=True, tag="foreign"):
    """The client belongs to another run than this plane's. It must be opened again."""

    reason: str


# ------------------------------------------------------------------ producers and observers


class OpenSegment(Message, frozen=True, tag="open-segment"):
    """Asks for a segment to write frames to."""

    ticket: int


class SegmentOpened(Message, frozen=True, tag="segment-opened"):
    """Answers `OpenSegment`."""

    ticket: int
    segment: str
    """Its name, already registered in the log."""


class SignUrls(Message, frozen=True, tag="sign-urls"):
    """A process that writes to storage without credentials wants URLs of objects of its segments."""

    ticket: int
    method: str
    """PUT, or GET: of an object that it has written, or of the marker."""
    names: tuple[str, ...]
    """Below the storage's address, such as segments/3f9c21d07b6a4e58/000000; at most `MAX_SIGNED`."""


class SignedUrls(Message, frozen=True, tag="signed-urls"):
    ticket: int
    urls: tuple[str, ...]
    """In the order of the names. Whoever has one may use it."""
    seconds: float
    """How long they are valid, from when they were asked for."""

    def __repr__(self) -> str:
        return f"SignedUrls(ticket={self.ticket}, {len(self.urls)} URLs, seconds={self.seconds})"


class Put(Message, frozen=True, tag="put"):
    """A group. Its payload is one frame, or nothing if the sender has written the frame to storage."""

    ticket: int
    """Chosen by the sender, returned with the answer."""
    group: str
    digest: bytes = b""
    """xxh3-128 of the frame, as it was sent."""
    evaluation: bool = False
    """Recorded and shown, never trained: it enters no table."""
    location: str = ""
    """Where the sender has written the frame. Empty if the frame is the payload."""
    metadata: bytes = b""
    """Metadata of a frame in storage: what the plane decides by."""
    shown: bytes = b""
    """What metrics show of an evaluation group in storage."""
    priority: float = 1.0
    """The priority until ranks report another, for samplers that use priorities."""
    advantage: str = ""
    """The advantage to compute when late rewards arrive, by name."""
    filters: tuple[str, ...] = ()
    """Filters to apply then, by name."""


class Trace(Message, frozen=True, tag="trace"):
    """Asks what became of a put, instead of sending it again. With an empty payload it travels behind the group and is
    answered as the put would have been, or with `Missing`. Without a payload it only asks for a `Pulse`."""

    ticket: int
    group: str
    digest: bytes


class AskRoom(Message, frozen=True, tag="ask-room"):
    """Asks for room for a group of this size. Sent by a client without credit, and repeated while it waits. Answered by
    `Room`, now or later, or for the moment by `Rejected`."""

    ticket: int
    """The ticket of the put."""
    tenant: str
    """The `run` of the group's samples, or their `env` where groups wait by environment."""
    size: int
    waits: bool = True
    """Whether to wait until there is room. If not, the answer is `Rejected` when there is none now."""
    group: str = ""
    digest: bytes = b""
    """The group's digest: a group the plane already has needs no room."""


class GiveUp(Message, frozen=True, tag="give-up"):
    """This put no longer waits for room: it was cancelled, or the client does not know it."""

    ticket: int


class Bundle(Message, frozen=True, tag="bundle"):
    """Several messages about puts, in order. Their payloads follow one another (`bundles.py`)."""

    messages: tuple[Put | Trace | AskRoom | GiveUp, ...]
    payloads: tuple[int, ...]
    """How many payload buffers belong to each message."""


class AskGroups(Message, frozen=True, tag="ask-groups"):
    """Asks what became of groups."""

    ticket: int
    groups: tuple[str, ...]
    """Their ids, at most `MAX_ASKED`."""


class GroupStates(Message, frozen=True, tag="group-states"):
    """Answers `AskGroups`."""

    ticket: int
    states: tuple[tuple[str, str], ...]
    """State and reason of each group, in the order of the question."""


class Discard(Message, frozen=True, tag="discard"):
    """Counts samples that were generated and filtered out before they became a group."""

    ticket: int
    reason: str
    samples: int
    key: str = ""
    """Counted once per key, however often it is sent. Empty counts each time."""
    group: str = ""
    """The group they would have been part of, for feedback. So are the fields below."""
    prompt: str = ""
    env: str = ""
    tenant: str = ""
    rewards: tuple[float | None, ...] = ()
    """Of these samples, at most `MAX_SHOWN`; None: not scored. Empty: not known."""
    lengths: tuple[int, ...] = ()
    """Their tokens."""


class SettleGroup(Message, frozen=True, tag="settle"):
    """Drops a group in quarantine, or releases it so that it waits for training again."""

    ticket: int
    group: str
    drop: bool


class SetWeight(Message, frozen=True, tag="weight"):
    """Sets a tenant's share of the trainer."""

    ticket: int
    tenant: str
    weight: float
    """Relative to the weights of the other tenants. 0 evicts the tenant."""
    reason: str = ""


class Accepted(Message, frozen=True, tag="accepted"):
    """The group is durable, or the decision is in the log."""

    ticket: int
    duplicate: bool = False
    policy_version: int | None = None
    """The version of the weights that was published last."""
    stale: bool = False
    """The group was too old for `max_staleness`: accepted, counted and dropped."""
    credit_groups: int = 0
    """Groups that may be unanswered without asking for room."""
    credit_bytes: int = 0
    """Their bytes together."""
    over_length: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Samples and tokens truncated, samples and tokens dropped, because samples were longer than `seq_len`."""
    late: bool = False
    """Another process was faster: its group completed this task, and this one is not kept."""


class Missing(Message, frozen=True, tag="missing"):
    """The traced group did not arrive. It must be sent again."""

    put: int
    """The ticket of its put, which remains open."""


class Room(Message, frozen=True, tag="room"):
    """There is room for the group of this put now: send it."""

    ticket: int
    policy_version: int | None = None


class Rejected(Message, frozen=True, tag="rejected"):
    """The put or decision failed."""

    ticket: int
    kind: str
    """The class name of the error: InvalidInput, Conflict, Overloaded, DiskFull, ..."""
    reason: str
    retry_after_s: float = 0.0


class Answers(Message, frozen=True, tag="answers"):
    """Several answers to one producer."""

    answers: tuple[Accepted | Missing | Room | Rejected, ...]


class Ask(Message, frozen=True, tag="ask"):
    """Asks for the plane's status."""

    ticket: int


class Status(Message, frozen=True, tag="status"):
    """Answers `Ask`."""

    ticket: int
    text: bytes
    """JSON."""


FromRank: TypeAlias = Hello | Request | Received | Commit | Report | Fail | Damaged | Beat | Bye
FromProducer: TypeAlias = (
    Put
    | OpenSegment
    | SignUrls
    | Trace
    | AskRoom
    | GiveUp
    | Discard
    | SettleGroup
    | SetWeight
    | Ask
    | AskGroups
    | AttachValues
    | LeaseColumns
    | Renew
    | GiveBack
    | OfferPrompts
    | AddPrompts
    | LeaseTasks
    | AskFeedback
)
One: TypeAlias = FromRank | FromProducer | Attach
"""A single message of a client. A `Bundle` holds several."""
FromClient: TypeAlias = One | Bundle
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
    | Answers
    | Status
    | GroupStates
    | ValuesAttached
    | ColumnsLeased
    | Renewed
    | PromptsOffered
    | TasksLeased
    | Feedback
)


# ------------------------------------------------------------------ limits of names

_MAX_CHARACTERS = {
    "reason": MAX_REASON,
    "key": MAX_KEY,
    "group": MAX_TEXT,
    "tenant": MAX_TEXT,
    "prompt": MAX_TEXT,
    "env": MAX_TEXT,
}
"""By field of a decision."""


def check_decision(message: Discard | SettleGroup | SetWeight) -> None:
    """Raise InvalidInput if a name in a decision is too long, or is no valid name of a tenant.

    Decisions are logged, shown and quoted in errors, so client and plane both check them: the client to fail early, the
    plane because it trusts no client.
    """
    for field, most in _MAX_CHARACTERS.items():
        value = getattr(message, field, "")
        if len(value) > most:
            raise InvalidInput(f"{field}: {value[:40]!r}... has {len(value):,} characters; give at most {most:,}")
    if isinstance(message, Discard) and (problem := _discard_problem(message)):
        raise InvalidInput(problem)
    if isinstance(message, SetWeight) and message.weight and (problem := run_name_problem(message.tenant)):
        raise InvalidInput(f"tenant: {problem}")


def _discard_problem(message: Discard) -> str:
    """Return what is wrong with the numbers of a discard, or ""."""
    for field, values in (("rewards", message.rewards), ("lengths", message.lengths)):
        if len(values) > min(message.samples, MAX_SHOWN):
            return f"{field}: {len(values):,} for {message.samples:,} samples; give at most one each, of {MAX_SHOWN}"
    if any(not 0 <= length < 1 << 32 for length in message.lengths):
        return f"lengths: {max(message.lengths)} to {min(message.lengths)}; give tokens, from 0 to {(1 << 32) - 1:,}"
    return ""


def over_length_text(counts: Mapping[str, int]) -> str:
    """Say how many samples were truncated or dropped because they were too long. `counts` are those of `OVER_LENGTH`.

    >>> over_length_text(dict(truncated_samples=1, truncated_tokens=5, dropped_samples=2, dropped_tokens=90))
    '1 sample truncated by 5 tokens, 2 samples of 90 tokens dropped'
    """
    truncated, dropped = counts["truncated_samples"], counts["dropped_samples"]
    parts = []
    if truncated:
        parts.append(f"{truncated:,} sample{'s' * (truncated != 1)} truncated by {counts['truncated_tokens']:,} tokens")
    if dropped:
        parts.append(f"{dropped:,} sample{'s' * (dropped != 1)} of {counts['dropped_tokens']:,} tokens dropped")
    return ", ".join(parts) or "none"
