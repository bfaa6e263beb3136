"""How long the names in a decision may be. They are kept, shown and quoted in errors: both ends check them."""

from __future__ import annotations

from penstock.arrays import MAX_TEXT, run_name_problem
from penstock.errors import InvalidInput
from penstock.protocol.messages import MAX_REASON, Discard, SettleGroup, SetWeight

MAX_KEY = 1024
_LONGEST = {"reason": MAX_REASON, "key": MAX_KEY, "group": MAX_TEXT, "run": MAX_TEXT}
"""Characters, by field."""


def check_decision(message: Discard | SettleGroup | SetWeight) -> None:
    """Raise InvalidInput if a name is too long, or a run that gets a share cannot have its name."""
    for field, most in _LONGEST.items():
        value = getattr(message, field, "")
        if len(value) > most:
            raise InvalidInput(f"{field}: {value[:40]!r}... has {len(value):,} characters; give at most {most:,}")
    if isinstance(message, SetWeight) and message.weight and (problem := run_name_problem(message.run)):
        raise InvalidInput(f"run: {problem}")
