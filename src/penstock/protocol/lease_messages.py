"""Messages about leases: prompts handed out as tasks, columns that judges attach, and events of what became of groups.

The rules of `messages.py` hold here: fields go by position, so a field may only be appended.
"""

from __future__ import annotations

import msgspec

from penstock.protocol.feedback_event import FeedbackEvent
from penstock.protocol.message_base import Message

MAX_SCORED = 256
"""Groups leased to a scoring worker, or given values, with one message, at most."""
MAX_LEASES = 1024
"""Leases that one message renews or returns, at most."""
MAX_TASKS = 64
"""Tasks leased with one message, at most. With payloads of `MAX_PROMPT_BYTES` they fit into a header."""
MAX_PROMPT_BYTES = 64 << 10
"""Bytes of a prompt's payload."""
MAX_PROMPTS = 1 << 20
"""Prompts of a list."""
MAX_ARMS = 4096
"""Arms of a curriculum."""
MAX_PAGE = 256
"""Events of groups asked for with one message, at most."""


# ------------------------------------------------------------------ leases


class Renew(Message, frozen=True, tag="renew"):
    """This process still works on what it leased."""

    ticket: int
    leases: tuple[int, ...]
    """Their numbers, at most `MAX_LEASES`."""


class Renewed(Message, frozen=True, tag="renewed"):
    """Answers `Renew`."""

    ticket: int
    cancelled: tuple[tuple[int, str], ...] = ()
    """Leases whose result can no longer be used, each with the reason. The others are renewed."""
    policy_version: int | None = None
    """The version of the weights that was published last."""


class GiveBack(Message, frozen=True, tag="give-back"):
    """Returns leases before they run out. Answered by `Accepted` or `Rejected`."""

    ticket: int
    leases: tuple[int, ...]
    """Their numbers, at most `MAX_LEASES`. Those that ended already are ignored."""
    reason: str = ""
    """Why the work on them failed. Empty if it did not: the process stops, or has too many."""


# ------------------------------------------------------------------ tasks


class OfferPrompts(Message, frozen=True, tag="offer-prompts"):
    """Opens a list of prompts, or changes it. Its prompts are sent with `AddPrompts` if the plane lacks them."""

    ticket: int
    list: str
    digest: bytes
    """Of the list (`prompt_chunks.py`)."""
    count: int
    chunks: tuple[bytes, ...]
    """Digest of each chunk in which the prompts are sent."""
    epochs: int
    seed: int
    shuffle: bool
    attempts: int
    again: tuple[str, ...]
    tenant: str = ""
    max_expiries: int | None = None
    """Leases on a prompt that may run out in a row before it is given up. None: any number."""
    order: str = ""
    """The curriculum that draws prompts, by the name of its class. Empty: every prompt once per epoch."""
    parameters: bytes = b""
    """Of the curriculum, as JSON."""
    arms: tuple[str, ...] = ()
    """Names of groups of prompts which the curriculum treats alike, at most `MAX_ARMS`."""
    arm_of: bytes = b""
    """The arm of each prompt of the list, as little-endian uint16."""


class PromptsOffered(Message, frozen=True, tag="prompts-offered"):
    """Answers `OfferPrompts`."""

    ticket: int
    missing: tuple[int, ...] = ()
    """Chunks to send before the list is offered again. None: the list is open."""


class AddPrompts(Message, frozen=True, tag="add-prompts"):
    """A chunk of an offered list. Answered by `Accepted` when it is durable, or `Rejected`."""

    ticket: int
    digest: bytes
    """Of the list."""
    chunk: int
    first: int
    """Place of the chunk's first prompt in the list."""
    names: tuple[str, ...]
    payloads: tuple[bytes, ...]


class LeaseTasks(Message, frozen=True, tag="lease-tasks"):
    """Asks for tasks of a list. Answered when there are some, or after a heartbeat with what they wait for."""

    ticket: int
    list: str
    count: int
    """At most `MAX_TASKS`."""
    worker: str
    lease_s: float


class LeasedTask(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A task in an answer."""

    lease: int
    group: str
    """The id that its group must have."""
    prompt: str
    payload: bytes
    epoch: int
    attempt: int


class TasksLeased(Message, frozen=True, tag="tasks-leased"):
    """Answers `LeaseTasks`."""

    ticket: int
    tasks: tuple[LeasedTask, ...] = ()
    waiting_for: str = ""
    """Why there are no tasks now."""
    ended: bool = False
    """Every task of every epoch is completed."""
    policy_version: int | None = None


# ------------------------------------------------------------------ late columns


class StoredFrame(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A frame with late columns that a worker wrote to storage, to take the place of another one."""

    group: str
    base: str
    """Location of the frame that it was made from."""
    location: str
    metadata: bytes
    digest: bytes
    """xxh3-128 of the frame."""
    values: dict[str, bytes]
    """Sample -> digest of the values that it got."""


class AttachValues(Message, frozen=True, tag="attach-values"):
    """Gives samples of accepted groups the values of a column that they lacked when they were put."""

    ticket: int
    column: str
    values: dict[str, dict[str, float]]
    """Group -> sample -> value; at most `MAX_SCORED` groups."""
    errors: dict[str, dict[str, str]] = msgspec.field(default_factory=dict)
    """Group -> sample that could not be scored -> why."""
    groups: tuple[str, ...] = ()
    """Of a column with values per token: the groups whose values the payload has, at most `MAX_SCORED`."""
    digest: bytes = b""
    """xxh3-128 of the payload."""
    stored: tuple[StoredFrame, ...] = ()
    """Instead of a payload: the frames that have the values, if the worker wrote them itself."""


class ValuesAttached(Message, frozen=True, tag="values-attached"):
    """Answers `AttachValues`: the values are in the log. Counts samples."""

    ticket: int
    new: int = 0
    known: int = 0
    """Had this value already."""
    late: int = 0
    """Of groups that are dropped, or trained without the value."""


class LeaseColumns(Message, frozen=True, tag="lease-columns"):
    """Asks for groups that lack a column. Answered when there are some, or after a heartbeat with none."""

    ticket: int
    column: str
    groups: int
    """At most `MAX_SCORED`."""
    worker: str
    lease_s: float
    direct: bool = False
    """Whether the worker reads samples from storage itself. Otherwise they come with the answer."""


class ColumnsLeased(Message, frozen=True, tag="columns-leased"):
    """Answers `LeaseColumns`. The payload is the samples, or empty for a worker that reads storage itself."""

    ticket: int
    leases: tuple[int, ...] = ()
    """One for each group of the picks."""
    picks: bytes = b""
    """The samples that lack the column (`penstock.protocol.picks`)."""


# ------------------------------------------------------------------ feedback


class AskFeedback(Message, frozen=True, tag="ask-feedback"):
    """Asks for events: what became of groups."""

    ticket: int
    after: str = ""
    """The cursor of the last event that the reader has. Empty: from the start."""
    most: int = MAX_PAGE
    wait_s: float = 0.0
    """How long the answer may wait for an event, if there is none yet."""


class Feedback(Message, frozen=True, tag="feedback"):
    """Answers `AskFeedback`."""

    ticket: int
    events: tuple[FeedbackEvent, ...]
    newest: int
    """The number of the newest event."""
