"""A rank takes its samples from keepers: a state machine without I/O or a clock of its own.

Each keeper is asked once for all that is wanted of it: the own node's first, then those that are up. What one cannot
give, or does not answer for, the next one that has a copy is asked for; each is tried once. A question is repeated
until there is an answer, and a keeper at work says `Taking`, so that a slow one is not taken for one that is gone.

    rank                        keeper a (own node)      keeper b
      | take g1 g2 g3 ->          |                        |
      | take g4       ----------------------------------> |
      | <- taken, missing g2      |                        |
      | take g2       ----------------------------------> |          g2 has a copy there
      | <- taken g4, then g2 ------------------------------|
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.send.keeper_messages import KeeperAt, Take, Taken, Taking
from penstock.send.messages import Frames
from penstock.send.picks import StepPicks
from penstock.send.retry import Pending
from penstock.send.timeouts import Timeouts

_TICKETS = itertools.count(1)
"""Of this process: an answer to an earlier question is never taken for one to a later."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one keeper gave."""

    keeper: str
    groups: tuple[int, ...]
    """Which of the picks, in the order of the frame's samples."""
    frame: Frames


@dataclass(frozen=True, slots=True)
class Say:
    """Give this to the line of a keeper."""

    keeper: str
    message: Take


@dataclass(slots=True)
class _Asked(Pending):
    keeper: str = ""
    groups: list[int] = field(default_factory=list)
    heard: float = 0.0

    @property
    def take(self) -> Take:
        assert isinstance(self.message, Take)
        return self.message


class TakeSession:
    """Takes the samples of one step."""

    def __init__(self, picks: StepPicks, keepers: Sequence[KeeperAt], *, node: str, timeouts: Timeouts) -> None:
        self._picks, self._timeouts = picks, timeouts
        self._rank = {at.name: (not at.up, at.node != node, position) for position, at in enumerate(keepers) if at.url}
        """The order in which keepers are asked."""
        self._tried: list[set[str]] = [set() for _ in picks.groups]
        self._asked: dict[int, _Asked] = {}
        self.parts: list[Part] = []
        self.missing: dict[str, str] = {}
        """Groups that nobody gave -> what those who were asked said."""
        self._said: list[list[str]] = [[] for _ in picks.groups]

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to wait for."""
        return not self._asked

    def start(self, now: float) -> list[Say]:
        return self._ask(list(range(len(self._picks.groups))), now)

    def _ask(self, groups: list[int], now: float) -> list[Say]:
        """Ask for these whoever is next for each of them."""
        by_keeper: dict[str, list[int]] = {}
        for i in groups:
            keeper = self._next(i)
            if keeper is None:
                words = "; ".join(self._said[i]) or "no keeper of it is known"
                self.missing[self._picks.groups[i].group] = words
            else:
                self._tried[i].add(keeper)
                by_keeper.setdefault(keeper, []).append(i)
        return [self._send(keeper, wanted, now) for keeper, wanted in by_keeper.items()]

    def _next(self, i: int) -> str | None:
        names = (self._picks.keepers[k] for k, _ in self._picks.groups[i].copies)
        left = [name for name in names if name in self._rank and name not in self._tried[i]]
        return min(left, key=self._rank.__getitem__, default=None)

    def _send(self, keeper: str, groups: list[int], now: float) -> Say:
        ticket = next(_TICKETS)
        picks = []
        for i in groups:
            picked = self._picks.groups[i]
            number = next(number for k, number in picked.copies if self._picks.keepers[k] == keeper)
            picks.append((number, picked.group, picked.rows))
        message = Take(ticket=ticket, picks=tuple(picks))
        self._asked[ticket] = _Asked(message, now, self._timeouts.resend_s, keeper=keeper, groups=groups, heard=now)
        return Say(keeper, message)

    def on_message(self, message: Taken | Taking, frames: Frames, now: float) -> list[Say]:
        asked = self._asked.get(message.ticket)
        if asked is None:
            return []
        asked.heard = now
        if isinstance(message, Taking):
            if not frames or message.sent <= asked.take.lost:
                return []
            again = Take(ticket=message.ticket, picks=asked.take.picks, lost=message.sent)
            asked.message = again
            asked.ask_anew(now, self._timeouts.resend_s)
            return [Say(asked.keeper, again)]
        del self._asked[message.ticket]
        missing = {i: reason for i, reason in message.missing if 0 <= i < len(asked.groups)}
        given = tuple(group for i, group in enumerate(asked.groups) if i not in missing)
        if given:
            self.parts.append(Part(asked.keeper, given, frames))
        for i, reason in missing.items():
            self._said[asked.groups[i]].append(f"keeper {asked.keeper}: {reason}")
        return self._ask([asked.groups[i] for i in missing], now)

    def on_tick(self, now: float) -> list[Say]:
        """Ask again, notice silence. Call it at least twice per `resend_s`."""
        says: list[Say] = []
        for ticket, asked in list(self._asked.items()):
            silent = now - asked.heard
            if silent > self._timeouts.peer_s:
                del self._asked[ticket]
                for i in asked.groups:
                    self._said[i].append(f"keeper {asked.keeper}: no answer for {silent:.1f} s")
                says += self._ask(asked.groups, now)
            elif asked.is_due(now):
                asked.asked(now, self._timeouts.heartbeat_s)
                says.append(Say(asked.keeper, asked.take))
        return says
