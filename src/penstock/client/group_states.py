"""The state of a group, as `Plane.has` returns it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.errors import InvalidInput

UNKNOWN = "unknown"
_MOST = 1 << 20
_ID_CHARACTERS = 512
"""Of the longest group id a plane accepts."""


@dataclass(frozen=True, slots=True)
class GroupState:
    """The state of a group.

    >>> GroupState("dropped", "stale").is_known, GroupState("unknown").is_known
    (True, False)
    """

    state: str
    """The ledger's word: waiting (for late columns), held (it waits for training), scheduled, delivered, committed,
    dropped, quarantined or evaluation. Or "unknown": it was not accepted."""
    reason: str = ""
    """Why it was dropped or quarantined."""

    @property
    def is_known(self) -> bool:
        """Whether the group was accepted. Then it need not be put."""
        return self.state != UNKNOWN


def checked_ids(groups: Iterable[object]) -> list[str]:
    """Return ids without repeats. Raises InvalidInput for anything that cannot be the id of a group."""
    if isinstance(groups, str):
        raise InvalidInput(f"has: {groups[:80]!r} is one id; pass a list: plane.has([{groups[:80]!r}])")
    if not isinstance(groups, Iterable):
        raise InvalidInput(f"has: {groups!r}; give a list of ids")
    names: list[str] = []
    for i, name in enumerate(groups):
        if not isinstance(name, str) or not 0 < len(name) <= _ID_CHARACTERS:
            raise InvalidInput(
                f"has: ids[{i}] is {str(name)[:80]!r}; an id is text of 1 to {_ID_CHARACTERS} characters"
            )
        names.append(name)
    names = list(dict.fromkeys(names))
    if len(names) > _MOST:
        raise InvalidInput(f"has: {len(names):,} ids; ask for at most {_MOST:,} at once")
    return names
