"""The plane's side of its keepers: who is up, who has which frame, what each may forget. No I/O, no clock.

A keeper enlists with the numbers it has and is told which of them nobody wants. From then on it beats, and hears with
each answer what else to forget, until it confirms that. Facts that name a number from before it enlisted, and that are
not in the log, are refused: that frame may just have been forgotten.

A keeper that is silent for `peer_s` is down, and one that is down for `keeper_s` is gone: what only it had is lost.
Where folders are shared a keeper that has frames is never gone: it is waited for, until somebody serves its folder.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any
from zlib import crc32

from penstock.errors import CorruptFrame
from penstock.send.carrier import Peer
from penstock.send.copies import NAME, copies_of, numbers_of, numbers_to_bytes
from penstock.send.effects import Send
from penstock.send.keeper_messages import Copy, Enlist, Enlisted, KeeperAt, KeeperBeat, KeeperPulse
from penstock.send.message_record import SCHEMA
from penstock.send.messages import Frames, Refused, Unknown
from penstock.send.timeouts import Timeouts

_MAX_PEERS = 16
_MAX_TOLD = 4
"""Keepers a producer is told of."""
_MAX_NAMED = 8
_BATCH = 100_000
"""Numbers to forget in one answer."""


@dataclass(slots=True)
class _Keeper:
    """One that is known, from the log or because it enlisted."""

    at: KeeperAt
    heard: float
    """When it was heard last; of one that has not enlisted, when the plane began to wait for it."""
    peer: Peer = None
    """Its connection; None while it has not enlisted."""
    incarnation: str = ""
    enlisted: tuple[int, int] = (0, 0)
    """Which life of it, and which word of that, was the last."""
    last: int = 0
    """The highest number it had given out when it enlisted."""
    quota_bytes: int | None = None
    num_bytes: int = 0
    num_groups: int = 0
    held: set[int] = field(default_factory=set)
    """Numbers that the log names."""
    damaged: set[int] = field(default_factory=set)
    """Of these, what it cannot read or does not have."""
    refused: set[int] = field(default_factory=set)
    """Numbers since it enlisted that facts were refused with."""
    unwanted: list[int] = field(default_factory=list)
    """Numbers it has not been told to forget yet."""
    batch: int = 0
    telling: list[int] = field(default_factory=list)
    """Numbers of the batch that it has not confirmed."""


class Roster:
    """All keepers of a run."""

    def __init__(self, terms: Enlisted, timeouts: Timeouts) -> None:
        self.terms, self._timeouts = terms, timeouts
        self.policy_version: int | None = None
        self._keepers: dict[str, _Keeper] = {}
        self._by_incarnation: dict[str, _Keeper] = {}
        self._names: list[str] = []
        """Of all keepers, sorted: each copies to those behind it first."""
        self._told: tuple[float, list[KeeperAt], list[str]] = (float("-inf"), [], [])
        """When it was last found who is up, those, and some words for those who are not."""
        self._sets: Counter[tuple[str, ...]] = Counter()
        """Keepers that have copies of a frame -> how many frames."""
        self._now = 0.0
        self._ticked: float | None = None
        self._gone: frozenset[str] = frozenset()
        self.has_news = False
        """Whether anybody went for good, or lost a frame, since this was last looked at."""

    # -------------------------------------------------------------- frames, as the log has them

    def add(self, location: str) -> None:
        """A frame with these copies is to be kept."""
        copies = copies_of(location)
        self._sets[tuple(name for name, _ in copies)] += 1
        for name, number in copies:
            self._known(name).held.add(number)

    def forget(self, locations: Iterable[str]) -> None:
        """These are wanted no more."""
        for location in locations:
            copies = copies_of(location)
            names = tuple(name for name, _ in copies)
            self._sets[names] -= 1
            if self._sets[names] <= 0:
                del self._sets[names]
            for name, number in copies:
                self._drop(name, number)

    def _drop(self, name: str, number: int) -> None:
        keeper = self._known(name)
        keeper.held.discard(number)
        keeper.damaged.discard(number)
        if keeper.peer is not None:
            keeper.unwanted.append(number)

    def refuse(self, copies: Iterable[Copy]) -> None:
        """Facts with these copies were not accepted, and never will be: should they come again, it is too late."""
        for name, number in copies:
            if name in self._keepers and number not in self._keepers[name].held:
                self._drop(name, number)
                self._keepers[name].refused.add(number)

    def retain(self, locations: Iterable[str]) -> None:
        """These are all the frames there are."""
        for keeper in self._keepers.values():
            keeper.held.clear()
        self._sets.clear()
        for location in locations:
            self.add(location)

    def _known(self, name: str) -> _Keeper:
        found = self._keepers.get(name)
        if found is None:
            at = KeeperAt(name=name, node=name.rpartition(".")[0], url="", up=False)
            found = self._keepers[name] = _Keeper(at, self._now)
            insort(self._names, name)
        return found

    # -------------------------------------------------------------- facts that come in

    def fault_of(self, copies: Sequence[Copy]) -> str:
        """Why facts with these copies do not count, in words; empty if they do."""
        unknown = [name for name, _ in copies if name not in self._keepers]
        if unknown:
            return f"keeper {unknown[0]} has not enlisted"
        nodes = {self._keepers[name].at.node for name, _ in copies}
        if len(nodes) < self.terms.copies:
            return f"kept on {len(nodes)} nodes, {self.terms.copies} are wanted"
        for name, number in copies:
            keeper = self._keepers[name]
            if keeper.peer is None:
                return f"keeper {name} has not enlisted"
            if number <= keeper.last:
                return f"number {number} of keeper {name} is from before it enlisted"
            if number in keeper.refused:
                return f"number {number} of keeper {name} was refused before"
        return ""

    # -------------------------------------------------------------- messages

    def on_enlist(self, peer: Peer, message: Enlist, frames: Frames, now: float) -> list[Send]:
        self._now = now
        problem = self._mismatch(message)
        if problem:
            return [Send(peer, Refused(epoch=self.terms.epoch, reason=problem))]
        try:
            has = set(numbers_of(frames))
        except CorruptFrame:
            return []  # as if it had been lost
        keeper = self._known(message.name)
        if message.life < keeper.enlisted[0]:
            words = f"keeper {message.name}: another process has opened its folder since; end this one"
            return [Send(peer, Refused(epoch=self.terms.epoch, reason=words))]
        if (message.life, message.number) < keeper.enlisted:
            return []  # an old message
        keeper.enlisted = (message.life, message.number)
        keeper.at = KeeperAt(name=message.name, node=message.node, url=message.url, key=message.key)
        self._by_incarnation.pop(keeper.incarnation, None)
        self._by_incarnation[message.incarnation] = keeper
        keeper.peer, keeper.incarnation, keeper.heard = peer, message.incarnation, now
        self._told = (float("-inf"), [], [])
        keeper.last, keeper.quota_bytes = message.last, message.quota_bytes
        keeper.unwanted, keeper.telling, keeper.refused = [], [], set()
        keeper.damaged = {number for number in keeper.held if number <= message.last} - has
        self.has_news |= bool(keeper.damaged)
        return [Send(peer, self.terms, [numbers_to_bytes(sorted(has - keeper.held))])]

    def _mismatch(self, message: Enlist) -> str:
        if message.schema != SCHEMA:
            return f"schema: this keeper says {message.schema}, the plane has {SCHEMA}; use one version of Penstock"
        if NAME.fullmatch(message.name) is None or NAME.fullmatch(message.node) is None:
            return f"keeper {message.name[:80]!r} of node {message.node[:80]!r}: letters, digits and _ . - are allowed"
        return ""

    def on_beat(self, peer: Peer, message: KeeperBeat, now: float) -> list[Send]:
        self._now = now
        keeper = self._by_incarnation.get(message.incarnation)
        if keeper is None:
            return [Send(peer, Unknown(epoch=self.terms.epoch))]
        keeper.peer, keeper.heard = peer, now
        keeper.num_bytes, keeper.num_groups = message.num_bytes, message.num_groups
        news = {number for number in message.damaged if number in keeper.held} - keeper.damaged
        keeper.damaged |= news
        self.has_news |= bool(news)
        if message.forgot >= keeper.batch:
            keeper.telling, keeper.unwanted = keeper.unwanted[:_BATCH], keeper.unwanted[_BATCH:]
            keeper.batch += bool(keeper.telling)
        return [Send(peer, self._pulse(keeper, message.number))]

    def _pulse(self, keeper: _Keeper, number: int) -> KeeperPulse:
        return KeeperPulse(
            epoch=self.terms.epoch,
            number=number,
            peers=tuple(islice(self._peers(keeper), _MAX_PEERS)),
            down=tuple(self._find_told()[2]),
            batch=keeper.batch,
            forget=numbers_to_bytes(keeper.telling),
            policy_version=self.policy_version,
        )

    def _peers(self, keeper: _Keeper) -> Iterator[KeeperAt]:
        """Keepers of other nodes that are up, those behind it first: some are found however many there are."""
        first = bisect_right(self._names, keeper.at.name)
        for name in chain(islice(self._names, first, None), islice(self._names, first)):
            other = self._keepers[name]
            if other.at.node != keeper.at.node and self._is_up(other):
                yield other.at

    # -------------------------------------------------------------- who is where

    def told_to(self, node: str) -> tuple[KeeperAt, ...]:
        """Whom a producer on a node should put to: its own node's keeper first, then others, not all the same ones."""
        up = self._find_told()[1]
        own = [at for at in up if at.node == node]
        first = crc32(node.encode()) % len(up) if up else 0
        others = [at for at in chain(up[first:], up[:first]) if at.node != node]
        return tuple([*own, *others][:_MAX_TOLD])

    def _find_told(self) -> tuple[float, list[KeeperAt], list[str]]:
        """Who is up, found a few times per heartbeat: a thousand may ask at once."""
        if self._now - self._told[0] > self._timeouts.heartbeat_s / 8:
            up: list[KeeperAt] = []
            down: list[str] = []
            for keeper in map(self._keepers.__getitem__, self._names):
                if self._is_up(keeper):
                    up.append(keeper.at)
                elif len(down) < _MAX_NAMED:
                    down.append(self._words(keeper))
            self._told = (self._now, up, down)
        return self._told

    def addresses(self, names: Iterable[str]) -> tuple[KeeperAt, ...]:
        """Where these keepers are, as far as is known."""
        found = ((self._keepers[name], self._keepers[name].at) for name in names if name in self._keepers)
        return tuple(
            at if self._is_up(k) else KeeperAt(name=at.name, node=at.node, url=at.url, key=at.key, up=False)
            for k, at in found
        )

    # -------------------------------------------------------------- time

    def tick(self, now: float) -> None:
        """Notice silence. Call it at least once per heartbeat."""
        self._now, last = now, self._ticked
        if last is not None and now - last < self._timeouts.heartbeat_s / 8:
            return
        self._ticked = now
        if last is None or now - last > self._timeouts.heartbeat_s:
            # The plane itself stood still so long, or has just begun to wait.
            gap = 0.0 if last is None else now - last
            for keeper in self._keepers.values():
                keeper.heard = now if last is None else keeper.heard + gap
        for name in [name for name, keeper in self._keepers.items() if self._is_gone(keeper) and not keeper.held]:
            self._names.remove(name)  # it had nothing, or nobody wants it any more
            self._by_incarnation.pop(self._keepers.pop(name).incarnation, None)
        gone = frozenset(name for name, keeper in self._keepers.items() if self._is_gone(keeper))
        self.has_news |= bool(gone - self._gone)
        self._gone = gone

    def _is_up(self, keeper: _Keeper) -> bool:
        return keeper.peer is not None and self._now - keeper.heard <= self._timeouts.peer_s

    def _is_gone(self, keeper: _Keeper) -> bool:
        silent = not self._is_up(keeper) and self._now - keeper.heard > self._timeouts.keeper_s
        return silent and not self._is_safe(keeper)

    def _is_safe(self, keeper: _Keeper) -> bool:
        """Whether what it has is there without it: in a folder that others can open."""
        return self.terms.is_shared and bool(keeper.held)

    # -------------------------------------------------------------- what became of a frame

    def missing(self, location: str) -> str:
        """Whom to wait for before a frame can be had, in words; empty if it can be had now."""
        here = [self._keepers[name] for name, number in copies_of(location) if self._has(name, number)]
        if any(map(self._is_up, here)):
            return ""
        return " or ".join(self._words(keeper) for keeper in here) or "a keeper that has it"

    def lost(self, location: str) -> str:
        """Why a frame can never be had again, in words; empty as long as somebody may have it."""
        why = []
        for name, number in copies_of(location):
            keeper = self._keepers[name]
            if not self._has(name, number):
                why.append(f"keeper {name}: its frame is damaged or gone")
            elif self._is_gone(keeper):
                why.append(f"keeper {name}: gone for {self._now - keeper.heard:.1f} s")
            else:
                return ""
        return "; ".join(why)

    def _has(self, name: str, number: int) -> bool:
        return number in self._keepers[name].held and number not in self._keepers[name].damaged

    def _words(self, keeper: _Keeper) -> str:
        silent = f"{'silent' if keeper.peer is not None else 'not here'} for {self._now - keeper.heard:.1f} s"
        how = "; its folder is shared: start `penstock keep` on it, on any node" if self._is_safe(keeper) else ""
        return f"keeper {keeper.at.name} ({silent}{how})"

    # -------------------------------------------------------------- looking

    @property
    def num_up(self) -> int:
        return sum(map(self._is_up, self._keepers.values()))

    def report(self) -> list[dict[str, Any]]:
        """Each keeper, for `penstock top`."""
        return [
            {
                "name": name,
                "node": keeper.at.node,
                "up": self._is_up(keeper),
                "silent_s": round(self._now - keeper.heard, 3),
                "num_bytes": keeper.num_bytes,
                "num_groups": keeper.num_groups,
                "quota_bytes": keeper.quota_bytes,
                "damaged": len(keeper.damaged),
            }
            for name, keeper in sorted(self._keepers.items())
            if keeper.held or self._is_up(keeper)
        ]

    def copies(self) -> dict[str, int]:
        """How many frames have all the copies they should have, by keepers that are up."""
        too_few = none = 0
        for names, count in self._sets.items():
            up = sum(self._is_up(self._keepers[name]) for name in names)
            too_few += count * (0 < up < len(names))
            none += count * (up == 0)
        return {"wanted": self.terms.copies, "groups_too_few": too_few, "groups_none_up": none}
