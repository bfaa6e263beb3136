"""A session of the trainer: its phases, the table of transitions between them, and how past sessions ended.

A *session* is one incarnation of the trainer job: all its processes joined, and none of them died since then.

    FORMING     a new session; waiting until every process has sent a hello
    REJOINING   the plane restarted; waiting until every process of the session it served has come back
    RUNNING     steps are requested, delivered, received, released, committed
    FAILED      the session is over; every process was sent the reason; a fresh hello starts the next one

`TRANSITIONS` is the machine, not a picture of it: `Session.on` looks up the next phase, and a pair that is not in the
table raises. docs/internals/protocol.md draws it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from penstock.protocol.messages import Aborted, FromPlane, Refused

_REMEMBERED_BYTES = 1 << 20
"""Memory for tombstones: reasons are texts from peers, so their number and size must be bounded."""
_ENTRY_BYTES = 128
"""Approximate cost of an entry besides its text."""


class Phase(Enum):
    FORMING = "forming"
    REJOINING = "rejoining"
    RUNNING = "running"
    FAILED = "failed"


class Happened(Enum):
    """Events of a session."""

    HELLO = "hello"
    """A process joins, comes back, or repeats its hello because our answer was lost."""
    LAST_HELLO = "last hello"
    FRESH_HELLO = "fresh hello"
    """A process that just started, while there is no session it could join."""
    MESSAGE = "step message"
    """Request, received, commit, report or beat of a member."""
    BYE = "bye"
    LAST_BYE = "last bye"
    FAIL = "fail"
    """A process, or the plane, cannot continue."""
    MISMATCH = "mismatch"
    """A process broke the protocol, or disagrees with the others."""
    SILENCE = "silence"
    NOT_BACK = "not back in time"
    RESTARTED = "a process restarted"


TRANSITIONS: dict[tuple[Phase, Happened], Phase] = {
    (Phase.FORMING, Happened.HELLO): Phase.FORMING,
    (Phase.FORMING, Happened.FRESH_HELLO): Phase.FORMING,
    (Phase.FORMING, Happened.MESSAGE): Phase.FORMING,
    (Phase.FORMING, Happened.SILENCE): Phase.FORMING,
    (Phase.FORMING, Happened.LAST_BYE): Phase.FORMING,
    (Phase.FORMING, Happened.LAST_HELLO): Phase.RUNNING,
    (Phase.FORMING, Happened.BYE): Phase.FAILED,
    (Phase.FORMING, Happened.FAIL): Phase.FAILED,
    (Phase.FORMING, Happened.MISMATCH): Phase.FAILED,
    (Phase.REJOINING, Happened.HELLO): Phase.REJOINING,
    (Phase.REJOINING, Happened.MESSAGE): Phase.REJOINING,
    (Phase.REJOINING, Happened.BYE): Phase.REJOINING,
    (Phase.REJOINING, Happened.LAST_HELLO): Phase.RUNNING,
    (Phase.REJOINING, Happened.FRESH_HELLO): Phase.FORMING,
    (Phase.REJOINING, Happened.LAST_BYE): Phase.FORMING,
    (Phase.REJOINING, Happened.FAIL): Phase.FAILED,
    (Phase.REJOINING, Happened.MISMATCH): Phase.FAILED,
    (Phase.REJOINING, Happened.NOT_BACK): Phase.FAILED,
    (Phase.REJOINING, Happened.RESTARTED): Phase.FAILED,
    (Phase.RUNNING, Happened.HELLO): Phase.RUNNING,
    (Phase.RUNNING, Happened.MESSAGE): Phase.RUNNING,
    (Phase.RUNNING, Happened.BYE): Phase.RUNNING,
    (Phase.RUNNING, Happened.LAST_BYE): Phase.FORMING,
    (Phase.RUNNING, Happened.FAIL): Phase.FAILED,
    (Phase.RUNNING, Happened.MISMATCH): Phase.FAILED,
    (Phase.RUNNING, Happened.SILENCE): Phase.FAILED,
    (Phase.RUNNING, Happened.RESTARTED): Phase.FAILED,
    (Phase.FAILED, Happened.FRESH_HELLO): Phase.FORMING,
}


class ImpossibleTransition(AssertionError):
    """An event that the table does not allow in this phase. A bug in this module, not an error of a peer."""


@dataclass(slots=True, kw_only=True)
class Session:
    """The state of one session."""

    run: str
    ranks: int
    epoch: int
    """The plane's epoch."""
    number: int
    """The number of the session that is forming, running or failed. 0 before the first."""
    next_step: int
    """The first uncommitted step."""
    last_step: int
    """The last step that was planned, possibly before the plane restarted."""
    phase: Phase = Phase.FORMING

    def on(self, happened: Happened) -> None:
        """Move to the phase the table gives. A session that begins gets the next number."""
        after = TRANSITIONS.get((self.phase, happened))
        if after is None:
            raise ImpossibleTransition(f"session {self.number}: {happened.value!r} while {self.phase.name}")
        if happened in (Happened.FRESH_HELLO, Happened.LAST_BYE):
            self.number += 1
        self.phase = after


class Tombstones:
    """How sessions ended, for processes that have not been informed yet. The oldest entries are dropped first."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._sessions: dict[int, Aborted] = {}
        self._processes: dict[str, int] = {}
        """Incarnation -> the session that ended for it, or 0 if it left."""
        self._replaced: dict[str, str] = {}
        """Incarnation -> the process that took its place before the session ran."""
        self.num_bytes = 0
        """Approximate memory in use."""

    def failed(self, failure: Aborted, incarnations: Iterable[str]) -> None:
        """Record that a session failed for all these processes."""
        self._sessions[failure.session] = failure
        self.num_bytes += len(failure.reason) + _ENTRY_BYTES
        for incarnation in incarnations:
            self._bury(incarnation, failure.session)
        self._trim()

    def left(self, incarnation: str) -> None:
        """Record that a process left. A hello from it that arrives later was delayed."""
        self._bury(incarnation, 0)
        self._trim()

    def replaced(self, incarnation: str, reason: str) -> None:
        """Record that another process took its place. A later hello from it was delayed, or two trainers are
        running."""
        self._replaced[incarnation] = reason
        self.num_bytes += len(reason)
        self._bury(incarnation, 0)
        self._trim()

    def knows(self, incarnation: str) -> bool:
        return incarnation in self._processes

    def of_process(self, incarnation: str, current: int) -> FromPlane | None:
        """Return the message for a process whose session is over, or None if it left."""
        if incarnation in self._replaced:
            return Refused(epoch=self._epoch, reason=self._replaced[incarnation])
        session = self._processes[incarnation]
        return self.of_session(session, current) if session else None

    def of_session(self, session: int, current: int) -> FromPlane:
        """Return the message for processes of a past session, with the reason if it is known."""
        reason = f"session {session} is over; the current one is {current}; restart this process"
        return self._sessions.get(session) or Refused(epoch=self._epoch, reason=reason, session=session)

    def _bury(self, incarnation: str, session: int) -> None:
        if incarnation not in self._processes:
            self.num_bytes += len(incarnation) + _ENTRY_BYTES
        self._processes[incarnation] = session

    def _trim(self) -> None:
        # Always keep the last session and process: their members may still ask why they ended.
        while self.num_bytes > _REMEMBERED_BYTES and len(self._sessions) > 1:
            old = self._sessions.pop(next(iter(self._sessions)))
            self.num_bytes -= len(old.reason) + _ENTRY_BYTES
        while self.num_bytes > _REMEMBERED_BYTES and len(self._processes) > 1:
            incarnation = next(iter(self._processes))
            self._processes.pop(incarnation)
            self.num_bytes -= len(self._replaced.pop(incarnation, ""))
            self.num_bytes -= len(incarnation) + _ENTRY_BYTES
