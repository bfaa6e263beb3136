"""Renews leases on the connection's background thread, so that they last while this process lives.

A lease is renewed when a third of its time has passed, so two of three renewals may be lost. The answer names the
leases whose result can no longer be used. A process that is killed renews nothing, and the plane hands its work to
another.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from penstock.client.conversations import Inbox
from penstock.protocol import MAX_LEASES, Answer, FromClient, GiveBack, Renew, Renewed

Question = tuple[Callable[[int], FromClient], Inbox]
"""A message to send, by ticket, and where its answer goes."""


@dataclass(slots=True, eq=False)
class _Held:
    lease_s: float
    renewed: float
    cancel: Callable[[str], None]
    """Called once, with the reason, if the result can no longer be used. Runs on the connection's thread."""


class Renewals:
    """The leases of one client. Safe to use from many threads; `abandon` also from a finalizer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, _Held] = {}
        self._is_asking = False
        self._abandoned: deque[tuple[int, str]] = deque()

    def hold(self, lease: int, lease_s: float, now: float, cancel: Callable[[str], None]) -> None:
        """Renew a lease from now on."""
        with self._lock:
            self._held[lease] = _Held(lease_s, now, cancel)

    def __len__(self) -> int:
        """Leases that are renewed now."""
        return len(self._held)

    def release(self, lease: int) -> None:
        """Stop renewing a lease: it was completed or returned."""
        with self._lock:
            self._held.pop(lease, None)

    def abandon(self, lease: int, reason: str) -> None:
        """Return a lease with the next tick. Takes no lock: a finalizer may run while this thread has it."""
        self._abandoned.append((lease, reason))

    def questions(self, now: float) -> Iterator[Question]:
        """Yield what must be sent now. Called at every tick of the connection's thread."""
        if not self._held and not self._abandoned:
            return
        for reason, leases in self._take_abandoned().items():
            for some in _pieces(leases):
                yield partial(give_back, some, reason), _Answers(lambda _answers: None)
        with self._lock:
            if self._is_asking:
                return
            due = [lease for lease, held in self._held.items() if now - held.renewed >= held.lease_s / 3]
            self._is_asking = bool(due)
            for lease in due:
                self._held[lease].renewed = now
        for some in _pieces(due):
            yield partial(_renew, some), _Answers(self._on_answers)

    def _on_answers(self, answers: Sequence[Answer]) -> None:
        cancelled = {lease: reason for one in answers if isinstance(one, Renewed) for lease, reason in one.cancelled}
        with self._lock:
            self._is_asking = False
            # A cancelled lease is no longer renewed: its process may take as long as it likes to stop.
            ended = [(self._held.pop(lease), reason) for lease, reason in cancelled.items() if lease in self._held]
        for held, reason in ended:
            held.cancel(reason)

    def _take_abandoned(self) -> dict[str, list[int]]:
        """Stop renewing the leases that were abandoned. Returns them by reason."""
        found: dict[str, list[int]] = {}
        while self._abandoned:
            lease, reason = self._abandoned.popleft()
            self.release(lease)
            found.setdefault(reason, []).append(lease)
        return found

    def close(self) -> list[FromClient]:
        """Stop renewing, and return the messages that return what is still leased."""
        found = self._take_abandoned()
        with self._lock:
            leases, self._held = [*self._held], {}
        found[""] = [*found.get("", []), *leases]
        return [give_back(some, reason, 0) for reason, leases in found.items() for some in _pieces(leases)]


class _Answers(Inbox):
    """Calls back with answers instead of waking a caller."""

    def __init__(self, act: Callable[[Sequence[Answer]], None]) -> None:
        super().__init__()
        self._act = act

    def put(self, answers: Sequence[tuple[int, Answer]] = (), error: BaseException | None = None) -> None:  # noqa: ARG002
        # An error says that the plane was not reached. The next tick asks again.
        self._act([answer for _, answer in answers])


def _pieces(leases: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for start in range(0, len(leases), MAX_LEASES):
        yield tuple(leases[start : start + MAX_LEASES])


def _renew(leases: tuple[int, ...], ticket: int) -> Renew:
    return Renew(ticket=ticket, leases=leases)


def give_back(leases: tuple[int, ...], reason: str, ticket: int) -> GiveBack:
    """Return the message that returns leases."""
    return GiveBack(ticket=ticket, leases=leases, reason=reason)
