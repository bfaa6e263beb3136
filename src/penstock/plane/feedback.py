"""Answers requests for events: at once, or, if the reader waits for new ones, when the next event is written."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from penstock.errors import DiskFull, InvalidInput
from penstock.plane.engine import Engine
from penstock.plane.outcomes import number_of, page
from penstock.protocol import MAX_PAGE, AskFeedback, Feedback, Peer, Send

_MOST_WAIT_S = 10.0
"""A reader that is gone is forgotten after this."""
_MOST_READERS = 4096


@dataclass(frozen=True, slots=True)
class _Reader:
    after: int
    most: int
    until: float
    """When it gets an empty page."""


class FeedbackReaders:
    """Readers that wait for events."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: dict[tuple[Peer, int], _Reader] = {}

    def ask(self, peer: Peer, message: AskFeedback, now: float) -> Send | None:
        """Answer a question, or keep it until there is something to answer. Raises InvalidInput."""
        if not 1 <= message.most <= MAX_PAGE:
            raise InvalidInput(f"feedback: {message.most:,} events; ask for 1 to {MAX_PAGE} with one message")
        key, log = (peer, message.ticket), self._engine.log
        self._write_news()
        newest = self._engine.state.outcomes.last
        after = number_of(message.after, log.run_id, newest)
        # `wait_s` comes from the client: NaN and numbers below 0 mean not to wait.
        wait_s = min(message.wait_s, _MOST_WAIT_S) if message.wait_s > 0 else 0.0
        if after < newest or not wait_s or len(self._waiting) >= _MOST_READERS:
            self._waiting.pop(key, None)
            return self._answer(key, after, message.most)
        known = self._waiting.get(key)  # a repeated question keeps its time
        self._waiting[key] = _Reader(after, message.most, now + wait_s if known is None else known.until)
        return None

    def turn(self, now: float) -> list[Send]:
        """Return answers to the readers for whom there are events, or whose time is over."""
        if not self._waiting:
            return []
        self._write_news()
        newest = self._engine.state.outcomes.last
        ready = {key: one for key, one in self._waiting.items() if one.after < newest or now >= one.until}
        for key in ready:
            del self._waiting[key]
        return [self._answer(key, one.after, one.most) for key, one in ready.items()]

    def _write_news(self) -> None:
        """Write pending events now, not with the next decision. On a full disk they stay pending."""
        if self._engine.state.has_news:
            with suppress(DiskFull), self._engine.recorder.transaction():
                pass

    def _answer(self, key: tuple[Peer, int], after: int, most: int) -> Send:
        events = page(self._engine.log, after, most)
        return Send(key[0], Feedback(ticket=key[1], events=tuple(events), newest=self._engine.state.outcomes.last))
