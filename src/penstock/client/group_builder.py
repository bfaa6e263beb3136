"""Group builders: collect the rollouts of one prompt, then put them as a group."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from penstock.arrays import NO_COLUMNS, check_priority, check_version
from penstock.capture import Trajectory
from penstock.client.encoded_group import check_evaluation
from penstock.convert import Advantage, Filter, Group, advantage_of, make_group, split_filters, unique_id
from penstock.errors import InvalidInput
from penstock.notebook import html_table
from penstock.protocol import seconds_of

if TYPE_CHECKING:
    from penstock.client.plane import Plane

logger = logging.getLogger("penstock.producer")
FAILED = "rollout failed"
"""Drop reason of a group whose rollouts all ended with an error."""


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class CollectedRollouts:
    """The rollouts of one prompt. All of them become the group, or none."""

    plane: Plane
    prompt: str
    id: str
    """The group's id."""
    policy_version: int | None
    advantage: Advantage | str | None
    filters: tuple[Filter | str, ...]
    timeout: float | None
    evaluation: bool
    priority: float = 1.0
    rollouts: list[Trajectory] = field(default_factory=list)
    is_put: bool = False
    is_entered: bool = False
    """Whether the group was made, or a `with` block decides what becomes of it."""

    def add(self, trajectory: Trajectory) -> None:
        if not isinstance(trajectory, Trajectory):
            raise InvalidInput(
                f"group of {self.prompt!r}: add({type(trajectory).__name__}); add a Trajectory, or put samples with "
                "plane.put([sample, ...])"
            )
        if self.is_put:
            raise InvalidInput(
                f"group of {self.prompt!r}: add() after the group was put; this rollout is in no group: add it, and "
                "await the tasks that add, before the `with` block ends"
            )
        self.rollouts.append(trajectory)

    def __del__(self) -> None:
        if self.rollouts and not self.is_entered:
            logger.warning(
                "group of %.80r: dropped with %d rollouts that were never put; collect them in a `with` block, or call "
                "put()",
                self.prompt,
                len(self.rollouts),
            )

    def __repr__(self) -> str:
        what = f"{len(self.rollouts)} rollouts, policy_version={self.policy_version}"
        return f"{type(self).__name__}({self.prompt!r}, {what})"

    def _repr_html_(self) -> str:
        rows = [(r.num_tokens, r.num_output_tokens, r.reward, r.env) for r in self.rollouts]
        return html_table(self, rows, ("tokens", "sampled", "reward", "env"))

    @contextmanager
    def putting(self) -> Iterator[None]:
        """Take no further rollouts, unless the put fails: it may be tried again."""
        self.is_put = True
        try:
            yield
        except BaseException:
            self.is_put = False
            raise

    def make(self) -> Group:
        """Return the group without putting it."""
        self.is_entered = True
        return make_group(
            self.rollouts,
            id=self.id,
            prompt=self.prompt,
            policy_version=self.policy_version,
            advantage=self.advantage,
            filters=self.filters,
            columns=self.plane.columns if any(t.own for r in self.rollouts for t in r.turns) else NO_COLUMNS,
        )

    def discards(self, group: Group) -> list[tuple[str, int, dict[str, Any]]]:
        """Return (reason, samples, further arguments of `Plane.discard`) of what filters dropped. The key makes it
        count once, however often a put is tried."""
        kept = set(group.origins.tolist())
        gone = {reason: count for reason, count in group.dropped.items() if count}
        lost = [i for i in range(len(group.rollouts)) if i not in kept]
        found = [self._discard(group, reason, count, lost if len(gone) == 1 else ()) for reason, count in gone.items()]
        if self.has_failed(group):
            found.append(self._discard(group, FAILED, len(kept), sorted(kept)))
        return found

    def _discard(self, group: Group, reason: str, count: int, which: Sequence[int]) -> tuple[str, int, dict[str, Any]]:
        """Describe rollouts that were dropped. `which` is empty if several reasons dropped some: a group does not say
        which of them dropped which."""
        places, first = list(which), self.rollouts[0]
        about = {"group": self.id, "prompt": self.prompt, "env": first.env, "tenant": first.run}
        numbers = {"rewards": group.rewards[places].tolist(), "lengths": group.rollouts.longest[places].tolist()}
        return reason, count, {"key": f"{self.id}: {reason}", **about, **numbers}

    def has_failed(self, group: Group) -> bool:
        """Return whether every remaining rollout ended with an error. Then nothing could be trained."""
        return not self.evaluation and len(group) > 0 and bool(group.rollouts.errored[group.origins].all())


class GroupBuilder(CollectedRollouts):
    """Collects the rollouts of one prompt in a `with` block."""

    def __enter__(self) -> Self:
        self.is_entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.put()

    def put(self) -> Group:
        """Make the group and put it. The plane counts what filters dropped."""
        with self.putting():
            group = self.make()
            for reason, count, about in self.discards(group):
                self.plane.discard(reason, count, **about)
            if len(group) and not self.has_failed(group):
                self.plane.put(group, evaluation=self.evaluation, priority=self.priority, timeout=self.timeout)
        return group


class AsyncGroupBuilder(CollectedRollouts):
    """Collects the rollouts of one prompt in an `async with` block. Tasks may add to it as they finish."""

    async def __aenter__(self) -> Self:
        self.is_entered = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.put()

    async def put(self) -> Group:
        """Make the group and put it. The plane counts what filters dropped."""
        with self.putting():
            group = await self.plane.acompute(self.make)
            for reason, count, about in self.discards(group):
                await self.plane.adiscard(reason, count, **about)
            if len(group) and not self.has_failed(group):
                await self.plane.aput(group, evaluation=self.evaluation, priority=self.priority, timeout=self.timeout)
        return group


def builder_fields(
    plane: Plane,
    prompt: str,
    given: object,
    policy_version: int | None,
    advantage: Advantage | str | None,
    filters: Iterable[Filter | str],
    evaluation: bool,
    priority: float,
    timeout: float | None,
) -> dict[str, Any]:
    """Return the fields of a builder."""
    if not isinstance(prompt, str):
        raise InvalidInput(f"group: prompt: {prompt!r}; give the prompt's name, as text")
    check_evaluation(evaluation)
    if isinstance(filters, str) or not isinstance(filters, Iterable):
        raise InvalidInput(f"group of {prompt!r:.80}: filters: {filters!r:.60}; give a list of names or functions")
    chosen = tuple(filters)
    if evaluation and chosen:
        raise InvalidInput(f"group of {prompt!r}: {len(chosen)} filters; leave them out, evaluation keeps all rollouts")
    # Now, and not when the block ends: by then the rollouts have cost minutes.
    where = f"group of {prompt!r:.80}"
    named: object = given
    if named is not None and (not isinstance(named, str) or not named):
        raise InvalidInput(f"{where}: id: {given!r:.60}; give text that is unique in the run, or leave it out")
    advantage_of(advantage, where)
    split_filters(chosen, is_late=False)
    check_priority(prompt, priority)
    return {
        "plane": plane,
        "prompt": prompt,
        "id": unique_id(prompt) if given is None else given,
        "policy_version": check_version(policy_version, f"{where}: policy_version"),
        "advantage": None if evaluation else advantage,
        "filters": chosen,
        "evaluation": evaluation,
        "priority": priority,
        "timeout": seconds_of(timeout),
    }
