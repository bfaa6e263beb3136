"""Selection in order of dispatch, with bounded reordering: `WindowedFifo`.

Groups arrive in the order in which they finish, so training by arrival sees short answers first. In order of dispatch
(when the prompt was handed out) it does not, but one slow rollout would stop everything behind it. The window is the
compromise: a few younger groups may overtake a slow one, then training waits for it. With window 3, prompt 2 slow:

    dispatch   0  1  2  3  4  5        0 and 1 are taken. The window is then anchored at 2 and covers 2, 3, 4:
    arrived    x  x  -  x  x  x        3 and 4 may overtake 2; 5 waits until 2 arrives or is no longer expected.

The wait ends in any case when `(target_offpolicy + 1) * groups_per_step - window` groups have arrived and wait: a
rollout that never ends must not stop training.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from penstock.config import check
from penstock.errors import ConfigError
from penstock.replay.selector import Draw, Index, Role, certain


@dataclass(frozen=True, slots=True)
class WindowedFifo:
    """Oldest dispatch first; at most a window of younger groups may overtake one that has not arrived.

    The window holds `window * (target_offpolicy + 1) * groups_per_step` groups, rounded down, and at least one. As a
    remover it removes the item that came first.

    >>> from penstock.replay import Table
    >>> table = Table(capacity=9, sampler=WindowedFifo(target_offpolicy=1, window=0.5, groups_per_step=3))
    >>> for dispatch in range(6):
    ...     table.expect(dispatch)
    >>> for dispatch in (5, 1, 3, 0):
    ...     _ = table.insert(f"prompt-{dispatch}", None, dispatch=dispatch)
    >>> table.sample(3).keys.tolist(), table.may_sample(1)
    (['prompt-0', 'prompt-1', 'prompt-3'], False)
    >>> table.waits_for
    'dispatch 2 has not arrived, and 1 of at most 2 younger groups that may overtake it did'
    """

    target_offpolicy: Annotated[
        int, Meta(ge=0, le=1 << 20, description="versions that a group may be behind when it is trained, as a target")
    ]
    window: Annotated[
        float,
        Meta(ge=0, le=1, description="share of the groups in flight that may overtake a slow one; 0: strict order"),
    ] = 0.3
    groups_per_step: Annotated[
        int | None,
        Meta(ge=1, le=1 << 27, description="groups that make a step, roughly; none: `groups_per_step` of the plane"),
    ] = None

    def __post_init__(self) -> None:
        check(self, "WindowedFifo")

    def build(self, capacity: int, role: Role) -> Index:  # noqa: ARG002
        if role == "remove":
            return DispatchIndex(1, 1)
        if self.groups_per_step is None:
            raise ConfigError(
                f"{self}: no groups_per_step; give about how many groups make a step, because the window follows from "
                "it (a plane with `groups_per_step` gives it by itself)"
            )
        in_flight = (self.target_offpolicy + 1) * self.groups_per_step
        window = max(1, int(self.window * in_flight))
        return DispatchIndex(window, max(self.groups_per_step, in_flight - window))


class DispatchIndex:
    """Live slots in order of dispatch, and the dispatches that are still expected."""

    def __init__(self, window: int, enough: int) -> None:
        self._window, self._enough = window, enough
        self._live: list[tuple[int, int]] = []
        """(dispatch, slot), ascending."""
        self._dispatch_of: dict[int, int] = {}
        self._expected: list[int] = []
        """Dispatches that have not arrived, ascending. A dispatch that was handed out twice is listed twice."""
        self._overtook: list[int] = []
        """Dispatches that left while an older one was expected, ascending."""
        self._last = 0

    def insert(self, slot: int, priority: float, version: int) -> None:  # noqa: ARG002
        self.insert_at(slot, self._last + 1)

    def insert_at(self, slot: int, dispatch: int) -> None:
        """Add a slot under its dispatch number, which is then no longer expected."""
        self._last = max(self._last, dispatch)
        self._dispatch_of[slot] = dispatch
        insort(self._live, (dispatch, slot))
        self.unexpect(dispatch)

    def expect(self, dispatch: int) -> None:
        """Note that a group with this number is being generated."""
        self._last = max(self._last, dispatch)
        insort(self._expected, dispatch)

    def unexpect(self, dispatch: int) -> None:
        """Note that it arrived or never will. A number that is not expected is ignored."""
        at = bisect_left(self._expected, dispatch)
        if at < len(self._expected) and self._expected[at] == dispatch:
            del self._expected[at]
            # Only what overtook the oldest expected one counts against the window.
            head = self._expected[0] if self._expected else self._last
            del self._overtook[: bisect_right(self._overtook, head)]

    def remove(self, slots: Sequence[int]) -> None:
        for slot in slots:
            dispatch = self._dispatch_of.pop(slot)
            del self._live[bisect_left(self._live, (dispatch, slot))]
            if self._expected and dispatch > self._expected[0]:
                self._overtake(dispatch)

    def _overtake(self, dispatch: int) -> None:
        """Note that a dispatch left before an older expected one. Between two expected ones, as many are kept as fill a
        window: more make no difference to any of the two, nor to those before and behind them."""
        insort(self._overtook, dispatch)
        gap = bisect_right(self._expected, dispatch)
        begin, end = bisect_right(self._overtook, self._expected[gap - 1]), len(self._overtook)
        if gap < len(self._expected):
            end = bisect_left(self._overtook, self._expected[gap])
        del self._overtook[begin + self._window - 1 : end]

    def update(self, slots: NDArray[np.int64], priorities: NDArray[np.float64]) -> None:
        pass

    def reach(self) -> int:
        """Return how many of the live slots may be drawn now, oldest first."""
        if not self._expected or len(self._live) >= self._enough:
            return len(self._live)
        free = bisect_left(self._live, (self._expected[0],))  # older than everything that is expected
        count = 0
        for dispatch, _ in self._live[free : free + self._window - 1]:
            # Places behind the anchor: live ones, expected ones (but the anchor itself) and those that left already.
            # Window 3, expected [2], live 3 4 5: 3 and 4 have places 1 and 2 and may be drawn.
            place = count + 1 + bisect_right(self._expected, dispatch) - 1 + bisect_right(self._overtook, dispatch)
            if place > self._window - 1:
                break
            count += 1
        return free + count

    @property
    def waits_for(self) -> str:
        """What holds back live slots, or ""."""
        if self.reach() == len(self._live):
            return ""
        return (
            f"dispatch {self._expected[0]} has not arrived, and {len(self._overtook)} of at most {self._window - 1} "
            "younger groups that may overtake it did"
        )

    def draw(self, count: int, rng: np.random.Generator, *, replace: bool) -> Draw:  # noqa: ARG002
        live = self._live
        return certain([live[i % len(live)][1] for i in range(count)])

    def victim(self, rng: np.random.Generator) -> int:  # noqa: ARG002
        return self._live[0][1]

    def state(self) -> dict[str, NDArray[Any]]:
        return {
            "live": np.array(self._live, dtype=np.int64).reshape(-1, 2),
            "expected": np.array(self._expected, dtype=np.int64),
            "overtook": np.array(self._overtook, dtype=np.int64),
            "last": np.array([self._last], dtype=np.int64),
        }

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        self._live = [(dispatch, slot) for dispatch, slot in state["live"].reshape(-1, 2).tolist()]
        self._dispatch_of = {slot: dispatch for dispatch, slot in self._live}
        self._expected, self._overtook = state["expected"].tolist(), state["overtook"].tolist()
        self._last = int(state["last"][0])
