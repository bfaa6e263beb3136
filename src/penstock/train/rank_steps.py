"""How a rank takes its steps: together with the other ranks or not at all, and as a torch `DataLoader`.

If one rank cannot get its step, or cannot read an image, the others block in the first collective of their backward
pass until it times out. `agree` makes every rank report whether it is ready before any of them starts:

    with agree(step=7):
        inputs = [to_torch(batch) for batch in source.step()]      whatever may fail on one rank alone
    ...                                                            here all ranks are ready

On success this costs one all-reduce of one number. On failure the ranks exchange their errors and all raise the same
`StepAborted`. The group stays usable.

`step_loader` is for trainers that require a loader, and adds only its interface. The source already prefetches and
fills micro-batches on its own threads, so there are no workers. A step stays one item, because its denominators belong
to all of its micro-batches.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.errors import ConfigError, InvalidInput, StepAborted

try:
    import torch
    from torch import distributed
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info
except ImportError as error:
    from penstock.extras import missing

    raise missing("penstock.train.rank_steps", error) from None

if TYPE_CHECKING:
    from penstock.client import Source, Step

_READY, _STOPPED, _FAILED = 0, 1, 2
"""Ready, stopped by the plane or another rank, or failed itself. The largest wins: an own failure is the root cause."""
_MESSAGE_BYTES = 1000
"""Bytes of an error message that are exchanged."""


@contextmanager
def agree(group: Any = None, *, step: int = 0, timeout_s: float = 30.0) -> Iterator[None]:
    """Run the block on every rank of `group` (default: all ranks) and continue only if it succeeded on all of them.

    Otherwise every rank raises `StepAborted` with the same message, which names the failed rank and its error. The same
    happens if a rank has died or does not report within `timeout_s` after this one. The group is then unusable. With a
    single process, the block's own error is raised.

    The group must accept CPU tensors. Next to NCCL, create one with `distributed.new_group(backend="gloo")`.

    >>> with agree(step=1):  # one process: nothing to exchange
    ...     ready = True
    """
    members = _members(group)
    try:
        yield
    except BaseException as error:
        try:
            if len(members) > 1:
                _settle(error, group, members, step, timeout_s)
        except StepAborted:
            if isinstance(error, Exception):
                raise
        raise  # a single process; or Ctrl-C, after the other ranks were informed
    if len(members) > 1:
        _settle(None, group, members, step, timeout_s)


def _members(group: Any) -> list[int]:
    """Return the global ranks of a group, [] without torch.distributed."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return []
    if distributed.get_backend(group) == "nccl":
        raise ConfigError(
            "agree: a group of backend 'nccl' does not accept CPU tensors; pass a group created once with "
            "distributed.new_group(backend='gloo')"
        )
    ranks: list[int] = distributed.get_process_group_ranks(group or distributed.group.WORLD)
    return ranks


def _settle(error: BaseException | None, group: Any, members: list[int], step: int, timeout_s: float) -> None:
    """Exchange the outcomes. Returns if all ranks are ready, raises otherwise."""
    where = f"step {step}" if step else "a guarded step"
    state = _READY if error is None else _STOPPED if isinstance(error, StepAborted) else _FAILED
    flag = torch.tensor([state], dtype=torch.int32)
    mine = _packed(state, "" if error is None else _message(error))
    reports = [torch.empty_like(mine) for _ in members]
    try:
        _wait(distributed.all_reduce(flag, distributed.ReduceOp.MAX, group=group, async_op=True), timeout_s)
        if not int(flag):
            return
        _wait(distributed.all_gather(reports, mine, group=group, async_op=True), timeout_s)
    except RuntimeError as broken:
        if isinstance(error, StepAborted):
            return  # the caller raises the plane's reason, which explains more than a broken group
        raise StepAborted(
            f"{where}: a rank of {members} died or did not report within {timeout_s:g} s: "
            f"{_brief(broken)}; see the ranks' logs",
            step,
        ) from error or broken
    # All ranks must raise the same error, so each picks it by the same rule: the largest state, then the lowest rank.
    # States [0, 2, 2] of ranks 0 to 2 give rank 1.
    states = [int(report[0]) for report in reports]
    first = states.index(max(states))
    message = bytes(reports[first][1:].tolist()).rstrip(b"\0").decode(errors="replace")
    if states[first] == _STOPPED:
        raise StepAborted(message, step, error.rank if isinstance(error, StepAborted) else -1) from error
    raise StepAborted(f"{where}: rank {members[first]}: {message}", step, members[first]) from error


def _brief(error: RuntimeError) -> str:
    """Return gloo's first sentence, without its source file and line."""
    return re.sub(r"^\[[^]]*\] ", "", str(error)).split(". ")[0].strip()


def _message(error: BaseException) -> str:
    return str(error) if isinstance(error, StepAborted) else f"{type(error).__name__}: {error}"


def _packed(state: int, message: str) -> torch.Tensor:
    """Encode a state and a message in a fixed number of bytes: all_gather needs equal sizes, without pickle."""
    data = bytes([state]) + message.encode(errors="replace")[:_MESSAGE_BYTES]
    return torch.frombuffer(bytearray(data.ljust(_MESSAGE_BYTES + 1, b"\0")), dtype=torch.uint8)


def _wait(work: Any, timeout_s: float) -> None:
    work.wait(timedelta(seconds=timeout_s))


# ------------------------------------------------------------------ a DataLoader


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
