"""The rollouts of one prompt on their way to a plane."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from penstock.arrays.own_columns import NO_COLUMNS
from penstock.capture import Trajectory
from penstock.convert import Group, make_group
from penstock.convert.advantages import Advantage
from penstock.convert.filters import Filter

if TYPE_CHECKING:
    from penstock.serve.clients.plane import Plane


class GroupBuilder:
    """Collects the rollouts of one prompt: all of them become the group, or none."""

    def __init__(
        self,
        plane: Plane,
        prompt: str,
        id: str,  # noqa: A002
        policy_version: int | None,
        advantage: Advantage | None,
        filters: tuple[Filter, ...],
        timeout: float | None,
        evaluation: bool,
    ) -> None:
        self.prompt, self.id = prompt, id
        self._plane, self._version, self._timeout, self._evaluation = plane, policy_version, timeout, evaluation
        self._advantage, self._filters = advantage, filters
        self._rollouts: list[Trajectory] = []

    def add(self, trajectory: Trajectory) -> None:
        self._rollouts.append(trajectory)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.put()

    def put(self) -> Group:
        """Make the group and hand it over; what filters dropped is counted at the plane."""
        group = make_group(
            self._rollouts,
            id=self.id,
            prompt=self.prompt,
            policy_version=self._version,
            advantage=self._advantage,
            filters=self._filters,
            columns=self._plane.columns if any(t.own for r in self._rollouts for t in r.turns) else NO_COLUMNS,
        )
        for reason, count in group.dropped.items():
            self._plane.discard(reason, count, key=f"{self.id}: {reason}")  # once, however often the put is tried
        if len(group):
            self._plane.put(group, evaluation=self._evaluation, timeout=self._timeout)
        return group
