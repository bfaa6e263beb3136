"""What a rank trains: its micro-batches of one step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import overload

from penstock.packing import MicroBatch, RankPlan, StepOfRank


class SourceStep(StepOfRank):
    """One rank's micro-batches of one step, received, checked and filled.

    Iterate it for the micro-batches; `loss_tokens` is the denominator over all ranks.
    """

    def __init__(
        self,
        number: int,
        digest: str,
        rank_plan: RankPlan,
        batches: list[MicroBatch],
        numbers: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(rank_plan)
        self.number = number
        """Steps are counted from 1."""
        self.digest = digest
        """Of the rank's plan and samples: equal digests, equal steps."""
        self.numbers = dict(numbers or {})
        """For metrics, of the time before the step was planned: `gen/` what was put since the step before, `buffer/`
        what was held. Empty for a step that was planned before the plane restarted."""
        self._batches = batches

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self._batches)

    @overload
    def __getitem__(self, index: int) -> MicroBatch: ...
    @overload
    def __getitem__(self, index: slice) -> list[MicroBatch]: ...
    def __getitem__(self, index: int | slice) -> MicroBatch | list[MicroBatch]:
        return self._batches[index]

    def __repr__(self) -> str:
        return f"SourceStep({self.number}, rank {self.rank}, {len(self)} micro-batches)"
