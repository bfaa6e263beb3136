"""Which errors end the plane, and which end only the step or decision that raised them."""

from __future__ import annotations

from penstock.errors import DiskFull, Fenced, PenstockError, StorageError
from penstock.storage import Away


def ends_plane(error: BaseException) -> bool:
    """Return whether the plane cannot go on: another one has taken the run over, or its log failed or is closed.

    A full volume is no such failure: training makes room again. Nor is a storage that is away: it comes back."""
    return isinstance(error, (Fenced, StorageError)) and not isinstance(error, (Away, DiskFull))


def failure_in_words(error: BaseException) -> str:
    return str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
