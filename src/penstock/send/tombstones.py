"""How sessions ended, for processes that have not heard of it yet."""

from __future__ import annotations

from penstock.send.messages import Aborted, FromPlane, Refused

_REMEMBERED = 4096


class Tombstones:
    """The last words of ended sessions, by session and by process."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._sessions: dict[int, Aborted] = {}
        self._processes: dict[str, Aborted | None] = {}

    def failed(self, failure: Aborted, incarnations: list[str]) -> None:
        """A session ended for all these processes."""
        self._sessions[failure.session] = failure
        self._processes |= dict.fromkeys(incarnations, failure)
        self._trim()

    def left(self, incarnation: str) -> None:
        """A process wanted nothing more; a hello of it that comes now is an old one."""
        self._processes[incarnation] = None
        self._trim()

    def knows(self, incarnation: str) -> bool:
        return incarnation in self._processes

    def of_process(self, incarnation: str) -> Aborted | None:
        return self._processes.get(incarnation)

    def of_session(self, session: int, current: int) -> FromPlane:
        """What to tell a process of a session that is over: why, if it is known."""
        reason = f"session {session} is over; the current one is {current}; restart this process"
        return self._sessions.get(session) or Refused(epoch=self._epoch, reason=reason, session=session)

    def _trim(self) -> None:
        while len(self._processes) > _REMEMBERED:
            self._processes.pop(next(iter(self._processes)))
        while len(self._sessions) > _REMEMBERED:
            self._sessions.pop(next(iter(self._sessions)))
