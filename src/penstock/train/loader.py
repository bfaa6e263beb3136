"""Steps of a source through torch's `DataLoader`, for trainers that want one: each item is one step, complete.

The loader adds nothing but its interface. The source asks ahead and fills micro-batches on threads of its own, so
there are no workers; and a step stays a step: its denominators go with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

try:
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info
except ImportError as error:
    from penstock.extras import missing

    raise missing("penstock.train.step_loader", error) from None

from penstock.errors import InvalidInput

if TYPE_CHECKING:
    from penstock.client import Source, SourceStep

T = TypeVar("T")


class Steps(IterableDataset):  # type: ignore[misc]
    """The steps of a source, from the next one on."""

    def __init__(self, source: Source, timeout: float | None = None) -> None:
        self.source, self.timeout = source, timeout

    def __iter__(self) -> Iterator[SourceStep]:
        if get_worker_info() is not None:
            raise InvalidInput(
                "DataLoader: num_workers above 0; a source is used by one process and asks ahead by itself: "
                "leave num_workers at 0"
            )
        return self.source.steps(timeout=self.timeout)


def as_it_is(step: T) -> T:
    """The collate function that changes nothing."""
    return step


def step_loader(source: Source, *, timeout: float | None = None, **settings: Any) -> DataLoader:
    """A `DataLoader` whose items are the steps of a source. `settings` go to the loader.

    Commit each step to the source after its optimizer step, as without a loader.
    """
    return DataLoader(Steps(source, timeout), batch_size=None, collate_fn=as_it_is, **settings)
