"""An event of the feedback stream: sent by the plane, and returned to the reader as it is."""

from __future__ import annotations

import msgspec


class FeedbackEvent(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The outcome of one group, as `plane.feedback()` returns it."""

    cursor: str
    """Resumes the stream after this event: `plane.feedback(after=event.cursor)`."""
    outcome: str
    """`trained`: its step is committed. `dropped`: it left unused. `quarantined`: no step can take it. `filtered`: its
    samples were discarded before they were put. `evaluation`: accepted, never trained. `rewound`: names no group; a
    trainer resumed from an older checkpoint, and steps from `step` on are trained again."""
    group: str = ""
    prompt: str = ""
    env: str = ""
    tenant: str = ""
    samples: int = 0
    rewards: tuple[float | None, ...] = ()
    """One per sample, of the first 256; None: not scored. Empty if no sample has a reward."""
    lengths: tuple[int, ...] = ()
    """Tokens of each sample, of the first 256."""
    reason: str = ""
    step: int | None = None
    staleness: int | None = None
    """Policy versions between its sampling and its step, or its end. None if it has no version."""

    @property
    def number(self) -> int:
        """Events are numbered from 1 without a gap."""
        return int(self.cursor.rpartition(".")[2])

    @property
    def mean_reward(self) -> float | None:
        scored = [reward for reward in self.rewards if reward is not None]
        return sum(scored) / len(scored) if scored else None
