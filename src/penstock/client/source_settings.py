"""Settings of a rank's source: which process of the trainer it is, where it begins, how far it prefetches."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from penstock.errors import InvalidInput
from penstock.log import pid_space
from penstock.protocol import MAX_NAME, Attached, RankSession, Timeouts

_MAX_STEP = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSettings:
    """The validated settings of one source."""

    rank: int
    world: int
    """Number of ranks. Must equal the plane's."""
    replica: int = 0
    """Index of this process among those of the rank."""
    replicas: int = 1
    """Processes per rank. Each gets the rank's data."""
    resume_step: int | None = None
    """One above the last step of the checkpoint that is loaded. None continues at the first uncommitted step."""
    prefetch: int = 1
    """Steps to request ahead of time."""
    run: str = ""
    """The run that the plane must have. Empty accepts any."""
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        if self.prefetch not in (0, 1, 2):
            raise InvalidInput(f"prefetch: {self.prefetch}; must be 0, 1 or 2 steps ahead")
        _check_place("rank", self.rank, "world", self.world)
        _check_place("replica", self.replica, "replicas", self.replicas)
        step = self.resume_step
        if step is not None and not (_is_whole(step) and 1 <= step <= _MAX_STEP):
            raise InvalidInput(
                f"resume_step: {step!r}; must be one above the last step of your checkpoint, counted from 1, "
                "or None for the first uncommitted step"
            )

    @property
    def tick_s(self) -> float:
        """Seconds between two ticks of a source's session."""
        return min(self.timeouts.heartbeat_s / 4, self.timeouts.resend_s / 2, 0.5)

    def new_session(self, can_read: Callable[[Attached], bool]) -> RankSession:
        """Return the session of a process that just started."""
        return RankSession(
            run=self.run,
            rank=self.rank,
            world=self.world,
            step=self.resume_step,
            incarnation=uuid.uuid4().hex,
            replica=self.replica,
            replicas=self.replicas,
            timeouts=self.timeouts,
            can_read=can_read,
            process=f"pid {os.getpid()} on {socket.gethostname()}"[:MAX_NAME],
            pid=os.getpid(),
            pid_space=pid_space()[:MAX_NAME],
            life=_life(os.getpid()),
        )


@lru_cache(maxsize=1)
def _life(_pid: int) -> str:
    """Return a random text of this process. A forked process has another pid, and gets its own."""
    return uuid.uuid4().hex


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_place(name: str, value: Any, of: str, most: Any) -> None:
    if not (_is_whole(value) and _is_whole(most)) or not 0 <= value < most:
        raise InvalidInput(f"{name}: {value!r}, and {of} is {most!r}; must be from 0 to {of} - 1")
