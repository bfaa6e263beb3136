"""A torch `DataLoader` over the steps of a source, for trainers that require one. Each item is a complete step.

The loader adds only its interface. The source already prefetches and fills micro-batches on its own threads, so there
are no workers. A step stays one item, because its denominators belong to all of its micro-batches.
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
    from penstock.client import Source, Step

T = TypeVar("T")


class Steps(IterableDataset):  # type: ignore[misc]
    """The steps of a source, starting with the next one."""

    def __init__(self, source: Source, timeout: float | None = None) -> None:
        self.source, self.timeout = source, timeout

    def __iter__(self) -> Iterator[Step]:
        if get_worker_info() is not None:
            raise InvalidInput(
                "DataLoader: num_workers above 0; a source belongs to one process and prefetches by itself; "
                "leave num_workers at 0"
            )
        return self.source.steps(timeout=self.timeout)


def as_it_is(step: T) -> T:
    """A collate function that returns its argument."""
    return step


def step_loader(source: Source, *, timeout: float | None = None, **settings: Any) -> DataLoader:
    """Make a `DataLoader` whose items are the steps of a source. `settings` are passed to the loader.

    Commit each step to the source after its optimizer step, as without a loader.
    """
    return DataLoader(Steps(source, timeout), batch_size=None, collate_fn=as_it_is, **settings)
