"""All ranks of a torch.distributed group go on together, or none does.

A rank that cannot take its step, or read an image of it, would leave the others waiting in the first collective of
their backward pass, until that times out. Guarded, every rank says whether it is ready before anyone begins:

    with agree(step=7):
        inputs = [to_torch(batch) for batch in source.step()]      whatever may fail on one rank alone
    ...                                                            here all ranks are ready

One number per rank is reduced when all is well. When it is not, the ranks exchange what went wrong and all of them
raise the same `StepAborted`; the group itself stays usable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

try:
    import torch
    from torch import distributed
except ImportError as error:
    from penstock.extras import missing

    raise missing("penstock.train.agreement", error) from None

from penstock.errors import ConfigError, StepAborted

_READY, _TOLD, _FAILED = 0, 1, 2
"""Ready; stopped by what the plane or another rank said; failed itself, which is what the others want to hear."""
_WORDS = 1000
"""Bytes of an error's message that travel."""


@contextmanager
def agree(group: Any = None, *, step: int = 0, timeout_s: float = 30.0) -> Iterator[None]:
    """Run the block on every rank of `group` (default: all ranks), then go on only if it succeeded on all of them.

    Otherwise every rank raises `StepAborted` with the same words, which name the rank and its error. A rank that has
    died, or says nothing for `timeout_s` after this one is done, raises it too; then the group cannot be used further.
    Where there is one process only, the block's own error is raised.

    The group must take CPU tensors: beside NCCL make one with `distributed.new_group(backend="gloo")`.

    >>> with agree(step=1):  # one process: nobody to agree with
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
        raise  # a single process, or Ctrl-C, of which the others now know
    if len(members) > 1:
        _settle(None, group, members, step, timeout_s)


def _members(group: Any) -> list[int]:
    """The global ranks of a group; none outside torch.distributed."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return []
    if distributed.get_backend(group) == "nccl":
        raise ConfigError(
            "agree: a group of backend 'nccl' takes no CPU tensors; give it a group of its own, made once with "
            "distributed.new_group(backend='gloo')"
        )
    ranks: list[int] = distributed.get_process_group_ranks(group or distributed.group.WORLD)
    return ranks


def _settle(error: BaseException | None, group: Any, members: list[int], step: int, timeout_s: float) -> None:
    """Exchange how it went; returns if all are ready."""
    where = f"step {step}" if step else "a guarded step"
    state = _READY if error is None else _TOLD if isinstance(error, StepAborted) else _FAILED
    flag = torch.tensor([state], dtype=torch.int32)
    mine = _packed(state, "" if error is None else _words(error))
    reports = [torch.empty_like(mine) for _ in members]
    try:
        _wait(distributed.all_reduce(flag, distributed.ReduceOp.MAX, group=group, async_op=True), timeout_s)
        if not int(flag):
            return
        _wait(distributed.all_gather(reports, mine, group=group, async_op=True), timeout_s)
    except RuntimeError as broken:
        if isinstance(error, StepAborted):
            return  # the plane has said why; the caller raises that
        raise StepAborted(
            f"{where}: a rank of {members} is dead, or did not say in {timeout_s:g} s whether it is ready: "
            f"{_brief(broken)}; see the logs of the ranks",
            step,
        ) from error or broken
    # What a rank found itself explains more than what it was told; of several, the lowest rank's is everybody's.
    states = [int(report[0]) for report in reports]
    first = states.index(max(states))
    words = bytes(reports[first][1:].tolist()).rstrip(b"\0").decode(errors="replace")
    if states[first] == _TOLD:
        raise StepAborted(words, step, error.rank if isinstance(error, StepAborted) else -1) from error
    raise StepAborted(f"{where}: rank {members[first]}: {words}", step, members[first]) from error


def _brief(error: RuntimeError) -> str:
    """Gloo's first sentence, without the place in its sources."""
    return re.sub(r"^\[[^]]*\] ", "", str(error)).split(". ")[0].strip()


def _words(error: BaseException) -> str:
    return str(error) if isinstance(error, StepAborted) else f"{type(error).__name__}: {error}"


def _packed(state: int, words: str) -> torch.Tensor:
    """A state and its words in a fixed number of bytes, so that they travel without pickle."""
    data = bytes([state]) + words.encode(errors="replace")[:_WORDS]
    return torch.frombuffer(bytearray(data.ljust(_WORDS + 1, b"\0")), dtype=torch.uint8)


def _wait(work: Any, timeout_s: float) -> None:
    work.wait(timedelta(seconds=timeout_s))
