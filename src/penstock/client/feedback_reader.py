"""Reads the feedback stream page by page, for threads and for asyncio."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from penstock.arrays import check_count
from penstock.client.conversations import Conversation
from penstock.client.producer_connection import ProducerConnection, error_of, expected
from penstock.errors import InvalidInput
from penstock.protocol import MAX_PAGE, MAX_SHOWN, AskFeedback, Discard, Feedback, FeedbackEvent, Rejected

T = TypeVar("T")
_WAIT_S = 5.0
"""Seconds that a request waits at the plane for an event. Then it is repeated: that shows that both sides are alive."""


@dataclass(slots=True)
class FeedbackReader:
    """Reads on from a cursor. `next_page` returns None at the end."""

    connection: ProducerConnection
    after: str
    follow: bool
    _until: int = -1
    """The newest event when reading began."""
    _is_done: bool = False

    def next_page(self) -> Conversation[tuple[FeedbackEvent, ...] | None]:
        """Return the next events. A reader that follows waits for one."""
        if self._is_done:
            return None
        answer = yield from ask_page(self.connection, self.after, MAX_PAGE, _WAIT_S if self.follow else 0.0)
        events = answer.events
        if not self.follow:
            # The end is fixed with the first page: a reader of a busy run would otherwise never reach it.
            self._until = answer.newest if self._until < 0 else self._until
            events = tuple(event for event in events if event.number <= self._until)
            self._is_done = not events or events[-1].number == self._until
        if events:
            self.after = events[-1].cursor
        return events


def ask_page(connection: ProducerConnection, after: str, most: int, wait_s: float) -> Conversation[Feedback]:
    """Ask for up to `most` events after a cursor. Waits up to `wait_s` for the first."""
    if not isinstance(after, str):
        raise InvalidInput(f"after: {after!r:.60}; give the `cursor` of an event, or nothing to begin at the start")
    # While the plane holds the request back, it must not look lost.
    wait_s = min(wait_s, connection.session.timeouts.plane_s / 4)
    answer = yield from connection.ask(lambda ticket: AskFeedback(ticket=ticket, after=after, most=most, wait_s=wait_s))
    if isinstance(answer, Rejected):
        raise error_of(answer)
    return expected(answer, Feedback)


def discard_message(
    reason: str,
    samples: int,
    key: str,
    group: str,
    prompt: str,
    env: str,
    tenant: str,
    rewards: Iterable[float | None],
    lengths: Iterable[int],
) -> Discard:
    """Return the message that counts filtered samples. The caller sets its ticket."""
    scored = _shown("rewards", rewards, lambda one: None if one is None or one != one else float(one))
    return Discard(
        ticket=0,
        reason=reason,
        samples=check_count(samples, f"discard of {reason!r}"),
        key=key,
        group=group,
        prompt=prompt,
        env=env,
        tenant=tenant,
        rewards=tuple(scored) if any(reward is not None for reward in scored) else (),
        lengths=tuple(_shown("lengths", lengths, int)),
    )


def _shown(name: str, values: Iterable[Any], convert: Callable[[Any], T]) -> list[T]:
    """Return the first of some numbers. Raises InvalidInput unless they are a list of numbers."""
    with suppress(TypeError, ValueError, OverflowError):
        if not isinstance(values, str):
            return [convert(value) for value in islice(values, MAX_SHOWN)]
    raise InvalidInput(f"discard: {name}: {values!r:.60}; give a list of numbers")
