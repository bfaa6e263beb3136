"""In which order a list's prompts are handed out: the same permutation for everyone, or drawn by a curriculum.

    EpochOrder     every prompt once per epoch, in an order that follows from the seed and the epoch
    DrawnOrder     a curriculum draws the next prompt. An epoch is as many draws as the list has prompts, so in one
                   epoch a prompt may come several times, or not at all

Both follow from the log. A hand-out names its prompt. That of a curriculum also names the last event of
`plane.feedback()` from which the curriculum had learned. So a restart applies events and draws in their original order,
and the new plane draws what the old one would have drawn.

A place is (n, prompt): the prompt, by its number, comes for the n-th time. In an `EpochOrder` n is the epoch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.log import OpenList
from penstock.protocol import FeedbackEvent
from penstock.replay import epoch_order, read_curriculum

Place: TypeAlias = tuple[int, int]
"""Epoch and number of the prompt."""


class SavedOrder(msgspec.Struct, array_like=True, kw_only=True):
    """A snapshot of either order."""

    epoch: int
    order: bytes = b""
    withdrawn: dict[int, int] = {}
    drawn: int = 0
    times: bytes = b""
    seen: int = 0
    state: Any = None


class EpochOrder:
    """Every prompt once per epoch."""

    seen = 0

    def __init__(self, opened: OpenList, rows: npt.NDArray[np.int64]) -> None:
        self._opened, self._rows = opened, rows
        self.epoch = 0
        """The epoch that is handed out now; 0 before the first."""
        self._order = np.empty(0, np.uint32)
        """Prompts of this epoch that are still to come. The first is at `_cursor`."""
        self._cursor = 0
        self._withdrawn: dict[int, int] = {}
        """Prompts that the list no longer has and this epoch has not tried, with their attempt. They join it if they
        return."""
        self._upcoming: tuple[int, npt.NDArray[np.uint32]] | None = None
        """The order of the next epoch, once it was needed."""

    @property
    def left(self) -> int:
        """Prompts of this epoch that are still to come."""
        return len(self._order) - self._cursor

    def configure(self, opened: OpenList) -> None:
        """Apply other settings of the same list."""
        self._opened, self._upcoming = opened, None

    def change(
        self, opened: OpenList, rows: npt.NDArray[np.int64], numbers: npt.NDArray[np.uint32], known: int
    ) -> dict[int, int]:
        """Apply another version of the list, whose prompts up to number `known` are not new. Returns prompts that are
        tried again, with their attempt."""
        self.configure(opened)
        self._rows = rows
        if not self.epoch:
            return {}
        to_come = self._order[self._cursor :]
        is_live = rows[to_come] >= 0
        self._withdrawn |= dict.fromkeys(to_come[~is_live].tolist(), 0)
        # Prompts that are new, or were withdrawn from this epoch, join its order. Others were in it already.
        joining = numbers[numbers >= known].tolist()
        back = [prompt for prompt in numbers.tolist() if prompt in self._withdrawn] if self._withdrawn else []
        attempts = {prompt: self._withdrawn.pop(prompt) for prompt in back}
        joining += [prompt for prompt, attempt in attempts.items() if not attempt]
        self._order, self._cursor = np.concatenate([to_come[is_live], np.array(joining, np.uint32)]), 0
        return {prompt: attempt for prompt, attempt in attempts.items() if attempt}  # these have ids that were used

    def withdraw(self, place: Place, attempt: int) -> None:
        """Apply the end of an open task whose prompt the list no longer has."""
        if place[0] == self.epoch:
            self._withdrawn[place[1]] = attempt

    def _order_of(self, epoch: int) -> npt.NDArray[np.uint32]:
        if self._upcoming is None or self._upcoming[0] != epoch:
            live = np.flatnonzero(self._rows >= 0).astype(np.uint32)
            if self._opened.shuffle:
                live = live[epoch_order(len(live), self._opened.seed, epoch)]
            self._upcoming = (epoch, live)
        return self._upcoming[1]

    def to_come(self) -> Generator[Place]:
        """Yield what is handed out next, in order. Changes nothing."""
        for prompt in self._order[self._cursor :]:
            yield self.epoch, int(prompt)
        for epoch in range(self.epoch + 1, self._opened.epochs + 1):
            for prompt in self._order_of(epoch):
                yield epoch, int(prompt)

    def advance(self, place: Place) -> bool:
        """Apply the hand-out of a prompt. Returns False if it is not the next one."""
        epoch, prompt = place
        if not self.left and epoch == self.epoch + 1:
            order = self._order_of(epoch)
            if not len(order) or order[0] != prompt:
                return False
            self.epoch, self._order, self._cursor = epoch, order, 1
            self._withdrawn = dict.fromkeys(np.flatnonzero(self._rows < 0).tolist(), 0)
            return True
        if not self.left or self._order[self._cursor] != prompt or epoch != self.epoch:
            return False
        self._cursor += 1
        return True

    def has_come(self, place: Place) -> bool:
        """Return whether a place was handed out, or passed over, at some time."""
        return 0 < place[0] <= self.epoch

    def learn(self, events: Iterable[tuple[FeedbackEvent, int]], until: int) -> None:
        """Do nothing: this order does not depend on what became of groups."""

    def save(self) -> SavedOrder:
        order = self._order[self._cursor :].astype("<u4").tobytes()
        return SavedOrder(epoch=self.epoch, order=order, withdrawn=self._withdrawn)

    def load(self, saved: SavedOrder, rows: npt.NDArray[np.int64]) -> None:
        self._rows = rows
        self.epoch, self._order = saved.epoch, np.frombuffer(saved.order, "<u4").astype(np.uint32)
        self._withdrawn = saved.withdrawn


class _Outcome(NamedTuple):
    """An event of a prompt, by its number."""

    outcome: str
    prompt: int
    rewards: tuple[float | None, ...]
    step: int | None


class DrawnOrder:
    """A curriculum draws the next prompt."""

    def __init__(self, opened: OpenList, rows: npt.NDArray[np.int64]) -> None:
        self._opened, self._rows = opened, rows
        self.epoch = 0
        """The epoch that is handed out now; 0 before the first."""
        self._drawn = 0
        """Prompts drawn in this epoch."""
        self._times = np.zeros(0, np.uint32)
        """How often each prompt came."""
        self.seen = opened.since
        """The last event that the curriculum learned from."""
        self._curriculum = read_curriculum(opened.order, opened.parameters, None)

    @property
    def left(self) -> int:
        """Prompts that are still to be drawn in this epoch."""
        return max(self._opened.count - self._drawn, 0) if self.epoch else 0

    def configure(self, opened: OpenList) -> None:
        """Apply other settings of the same list."""
        numbers = np.frombuffer(opened.places, "<u4") if opened.places else np.arange(opened.count, dtype=np.uint32)
        self._begin(opened, numbers, self._curriculum.state())

    def change(
        self, opened: OpenList, rows: npt.NDArray[np.int64], numbers: npt.NDArray[np.uint32], known: int
    ) -> dict[int, int]:
        """Apply another version of the list. The curriculum keeps what it knows of prompts that stay."""
        self._rows = rows
        self._times = np.concatenate([self._times, np.zeros(len(rows) - len(self._times), np.uint32)])
        self._begin(opened, numbers, self._curriculum.state() if known else None)
        return {}

    def _begin(self, opened: OpenList, numbers: npt.NDArray[np.uint32], state: Any) -> None:
        self._opened, prompts = opened, numbers.tolist()
        arms = None
        if opened.arms:
            arms = dict(zip(prompts, (opened.arms[i] for i in np.frombuffer(opened.arm_of, "<u2")), strict=True))
        self._curriculum = read_curriculum(opened.order, opened.parameters, arms)
        self._curriculum.begin(prompts, opened.seed)
        if state is not None:
            self._curriculum.restore(state)

    def withdraw(self, place: Place, attempt: int) -> None:
        """Do nothing: a prompt that returns to the list is drawn like any other."""

    def to_come(self) -> Generator[Place]:
        """Yield what is handed out next, in order. Changes nothing once it is closed."""
        left = self.left + max(self._opened.epochs - self.epoch, 0) * self._opened.count
        drawn, times = list[int](), Counter[int]()
        try:
            for _ in range(left):
                prompt = self._curriculum.choose()
                self._curriculum.take(prompt)
                drawn.append(prompt)
                times[prompt] += 1
                yield int(self._times[prompt]) + times[prompt], prompt
        finally:
            for prompt in reversed(drawn):
                self._curriculum.untake(prompt)

    def advance(self, place: Place) -> bool:
        """Apply the draw of a prompt. Returns False if it cannot have been drawn."""
        time, prompt = place
        is_live = prompt < len(self._rows) and self._rows[prompt] >= 0
        if not is_live or time != self._times[prompt] + 1 or not (self.left or self.epoch < self._opened.epochs):
            return False
        if not self.left:
            self.epoch, self._drawn = self.epoch + 1, 0
        self._drawn += 1
        self._times[prompt] += 1
        self._curriculum.take(prompt)
        return True

    def has_come(self, place: Place) -> bool:
        """Return whether a place was drawn at some time."""
        return place[1] < len(self._times) and 0 < place[0] <= self._times[place[1]]

    def learn(self, events: Iterable[tuple[FeedbackEvent, int]], until: int) -> None:
        """Learn from events, each with the number of its prompt, or -1. `until` is the number of the last one."""
        for event, prompt in events:
            self._curriculum.observe(_Outcome(event.outcome, prompt, event.rewards, event.step))
        self.seen = max(self.seen, until)

    def save(self) -> SavedOrder:
        return SavedOrder(
            epoch=self.epoch,
            drawn=self._drawn,
            times=self._times.astype("<u4").tobytes(),
            seen=self.seen,
            state=self._curriculum.state(),
        )

    def load(self, saved: SavedOrder, rows: npt.NDArray[np.int64]) -> None:
        self._rows = rows
        self.epoch, self._drawn, self.seen = saved.epoch, saved.drawn, saved.seen
        self._times = np.frombuffer(saved.times, "<u4").astype(np.uint32)
        self._curriculum.restore(saved.state)


Order: TypeAlias = EpochOrder | DrawnOrder


def order_of(opened: OpenList) -> Order:
    """Return the order that a list was opened with."""
    rows = np.empty(0, np.int64)
    return DrawnOrder(opened, rows) if opened.order else EpochOrder(opened, rows)
