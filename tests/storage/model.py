"""The rules of storage as a small program: register, accept, seal, free; and the marker. No clock and no bytes.

Random histories of planes, writers, an operator and a slow network must keep one promise:

    A group that was acknowledged and not retired can be read, and so can every group that the log of a plane holds.
    After an older log was restored, the plane refuses to start, or what it does not know is still in storage.

Each rule can be left out, and then some history breaks the promise.

    python tests/storage/model.py [RULE] [HISTORIES]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from random import Random

RULES = {
    "sealed": "a put is accepted only from a segment that is not sealed",
    "unsealed": "what is not accepted is freed only in a sealed segment",
    "repeat": "a repeated put does not free the location that was accepted",
    "unknown": "nothing is deleted because the log does not name it",
    "commit": "a decision is in the log before its bytes are deleted",
    "marker": "a plane starts only with a log that is not behind the marker",
    "fence": "a plane that was replaced commits nothing",
    "epochs": "what earlier epochs left unaccepted is kept",
    "reuse": "a location is never used twice",
    "order": "the marker moves before a deletion",
}
STEPS = 120
Place = tuple[int, int]
"""Segment and number of the frame in it."""


class Broken(AssertionError):
    """The promise was broken."""


@dataclass
class Log:
    epoch: int = 0
    position: int = 0
    """Transactions that were committed."""
    segments: dict[int, int] = field(default_factory=dict)
    """Registered ones, with the epoch they are of."""
    sealed: set[int] = field(default_factory=set)
    groups: dict[str, Place | None] = field(default_factory=dict)
    """Accepted ones, with where they are; None once they are retired."""


@dataclass
class Disk:
    frames: dict[Place, str] = field(default_factory=dict)
    marker: tuple[int, int] = (0, 0)
    """Epoch, and position of the log that deleted last."""


class History:
    """One of many."""

    def __init__(self, seed: int, without: str = "") -> None:
        self.rng, self._without = Random(seed), without
        self.log, self.disk = Log(), Disk()
        self.copies: list[Log] = []
        self.planes: list[Plane] = []
        self.writers: list[Writer] = []
        self.network: list[tuple[str, Place]] = []
        self.acknowledged: set[str] = set()
        self.retired: set[str] = set()
        self.unknown: set[str] = set()
        """Acknowledged groups that a restored log does not know."""
        self.num_groups = self.num_segments = 0
        self.is_over = False

    def has(self, rule: str) -> bool:
        return rule != self._without

    def run(self) -> None:
        self.start_plane()
        events: list[tuple[int, Callable[[], None]]] = [
            (1, self.start_plane),
            (1, self.copy_log),
            (1, self.change_writers),
            (6, self.write),
            (8, self.deliver),
            (2, lambda: self.plane().seal()),
            (3, lambda: self.plane().free()),
            (2, lambda: self.plane().retire()),
            (4, lambda: self.plane().delete()),
        ]
        weights = [weight for weight, _ in events]
        for _ in range(STEPS):
            self.rng.choices(events, weights)[0][1]()
            if self.copies and self.rng.random() < 0.01:
                self.restore_log()
            if self.is_over:
                return
            self.check()

    def plane(self) -> Plane:
        """Any of them: the newest, or one that was replaced and does not know it."""
        return self.rng.choice(self.planes)

    # -------------------------------------------------------------- events

    def start_plane(self) -> None:
        self.log.epoch += 1
        self.log.position += 1
        self.planes = [*self.planes[-2:], Plane(self, deepcopy(self.log))]
        if not self.has("unknown"):
            known = set(self.log.groups.values())
            self.disk.frames = {place: group for place, group in self.disk.frames.items() if place in known}

    def copy_log(self) -> None:
        self.copies.append(deepcopy(self.log))

    def restore_log(self) -> None:
        """An operator restores the log, while no plane runs."""
        self.log = deepcopy(self.rng.choice(self.copies))
        if self.has("marker") and (self.log.epoch, self.log.position) < self.disk.marker:
            self.is_over = True  # the plane refuses to start
            return
        self.unknown |= self.acknowledged - self.retired - self.log.groups.keys()
        self.acknowledged &= self.log.groups.keys()
        self.retired &= {group for group, place in self.log.groups.items() if place is None}
        self.planes, self.writers, self.network, self.copies = [], [], [], []
        self.start_plane()

    def change_writers(self) -> None:
        if len(self.writers) < 4:
            self.writers.append(Writer(self))
        else:
            self.writers.remove(self.rng.choice(self.writers))

    def write(self) -> None:
        if self.writers:
            self.rng.choice(self.writers).write()

    def deliver(self) -> None:
        """A put arrives, perhaps not for the last time."""
        if self.network:
            put = self.rng.choice(self.network)
            if self.rng.random() < 0.7:
                self.network.remove(put)
            self.plane().put(*put)

    # -------------------------------------------------------------- the promise

    def check(self) -> None:
        for group, place in self.log.groups.items():
            if place is not None and self.disk.frames.get(place) != group:
                raise Broken(f"the log holds {group}, and its bytes are gone")
        lost = self.acknowledged - self.retired - self.log.groups.keys()
        lost |= self.unknown - set(self.disk.frames.values())
        if lost:
            raise Broken(f"acknowledged, and gone: {sorted(lost)}")


class Plane:
    """Decides from what it knows of the log, which is old once it was replaced."""

    def __init__(self, history: History, known: Log) -> None:
        self._history, self._known, self.epoch = history, known, known.epoch
        self._freed: list[Place] = []

    def commit(self, change: Callable[[Log], None]) -> bool:
        history = self._history
        if history.has("fence") and history.log.epoch != self.epoch:
            return False
        change(self._known)
        self._known.position += 1
        history.log = deepcopy(self._known)
        return True

    def register(self, segment: int) -> bool:
        return self.commit(lambda log: log.segments.__setitem__(segment, self.epoch))

    def put(self, group: str, place: Place) -> None:
        history, known = self._history, self._known
        if group in known.groups:
            if known.groups[group] != place or not history.has("repeat"):
                self._free([place])
            return
        is_sealed = place[0] in known.sealed or place[0] not in known.segments
        if is_sealed and history.has("sealed"):
            return
        if place in known.groups.values() and history.has("reuse"):
            return
        if self.commit(lambda log: log.groups.__setitem__(group, place)):
            history.acknowledged.add(group)

    def seal(self) -> None:
        found = [segment for segment in self._known.segments if segment not in self._known.sealed]
        if found:
            segment = self._history.rng.choice(found)
            self.commit(lambda log: log.sealed.add(segment))

    def free(self) -> None:
        """What sealed segments of this epoch hold beyond accepted frames."""
        known, history = self._known, self._history
        held = set(known.groups.values())
        for place in list(history.disk.frames):
            segment = place[0]
            is_sealed = segment in known.sealed or not history.has("unsealed")
            is_ours = known.segments.get(segment) == self.epoch or not history.has("epochs")
            if segment in known.segments and is_sealed and is_ours and place not in held:
                self._free([place])

    def retire(self) -> None:
        held = [group for group, place in self._known.groups.items() if place is not None]
        if not held:
            return
        group = self._history.rng.choice(held)
        place = self._known.groups[group]
        assert place is not None
        if not self._history.has("commit"):
            self._history.disk.frames.pop(place, None)
        if self.commit(lambda log: log.groups.__setitem__(group, None)):
            self._history.retired.add(group)
            self._freed.append(place)

    def _free(self, places: list[Place]) -> None:
        if self.commit(lambda _log: None):
            self._freed += places

    def delete(self) -> None:
        """Long after the decision, perhaps; also by a plane that was replaced."""
        if not self._freed:
            return
        disk, history = self._history.disk, self._history
        if history.has("order"):
            if disk.marker[0] > self.epoch:
                return
            disk.marker = (self.epoch, self._known.position)
        disk.frames.pop(self._freed.pop(0), None)
        if not history.has("order") and disk.marker[0] <= self.epoch and history.rng.random() < 0.5:
            disk.marker = (self.epoch, self._known.position)  # or it crashes before this


class Writer:
    """Writes groups to a segment of its own, some of them twice because an answer was lost."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._group = ""
        self._begin()

    def _begin(self) -> None:
        history = self._history
        if not history.has("reuse") and history.num_segments:
            self._segment = history.rng.randrange(history.num_segments)
        else:
            self._segment = history.num_segments
            history.num_segments += 1
        self._next, self._is_registered = 0, False

    def write(self) -> None:
        history = self._history
        if not self._is_registered:
            self._is_registered = history.planes[-1].register(self._segment)
            return
        if self._segment in history.log.sealed and history.rng.random() < 0.5:  # or it was not told yet
            self._begin()
            return
        if not self._group or history.rng.random() < 0.5:
            history.num_groups += 1
            self._group = f"g{history.num_groups}"
        place = (self._segment, self._next)
        self._next += 1
        history.disk.frames[place] = self._group
        history.network.append((self._group, place))


def first_broken(rule: str, histories: int) -> int | None:
    """The first history that breaks the promise without a rule; None if none does."""
    for seed in range(histories):
        try:
            History(seed, rule).run()
        except Broken:
            return seed
    return None


if __name__ == "__main__":
    left_out = sys.argv[1] if len(sys.argv) > 1 else ""
    print(left_out or "every rule", first_broken(left_out, int(sys.argv[2]) if len(sys.argv) > 2 else 3000))
