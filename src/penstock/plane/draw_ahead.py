"""Steps that are drawn before those ahead of them are committed, and `max_staleness`.

A rank that prefetches asks for step k + 1 while it trains step k. What is drawn for it then is one version older by the
time it is trained, because committing step k publishes a version. So with `max_staleness` a step is drawn ahead only
while every held group would still be fresh enough when the step is trained; otherwise it waits for the commits.
"""

from __future__ import annotations

from penstock.plane.settings import PlaneSettings
from penstock.plane.state import PlaneState


def too_early(settings: PlaneSettings, state: PlaneState, step: int) -> str:
    """Return what a step must wait for so that nothing too stale is trained, or ""."""
    most, ahead = settings.replay.max_staleness, step - state.next_step
    if most is None or ahead <= 0:
        return ""
    oldest = state.run_tables.oldest_version()  # looks at all that is held, so only where it matters
    if oldest is None or state.policy_version + ahead - oldest <= most:
        return ""
    return (
        f"step {step - 1} to be committed: groups of policy version {oldest} would be staler than max_staleness {most} "
        f"if step {step} was drawn now"
    )
