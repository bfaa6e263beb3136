"""Whether this process sees the plane's storage: the one question that decides how its bytes go."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import PenstockError
from penstock.protocol import Attached

if TYPE_CHECKING:
    from penstock.storage import KeptStorage, Sign, Writable

logger = logging.getLogger("penstock.storage")
_LOOK_S = 3.0
"""How long an object store is asked for the marker: a rank's heartbeats wait meanwhile."""


def reachable(attached: Attached) -> KeptStorage | None:
    """The plane's storage, if this process sees it: the marker must be that of this run and this start of the plane."""
    if not attached.storage or not _sees(attached, lambda: _opened(attached.storage)):
        return None
    from penstock.storage import open_storage

    return open_storage(attached.storage, create=False)


def writable(attached: Attached, sign: Sign) -> Writable | None:
    """The plane's storage, if this process may write there itself and sees it."""
    if not attached.may_write or not attached.signs:
        return reachable(attached) if attached.may_write else None
    from penstock.storage import SignedStorage

    if not _sees(attached, lambda: SignedStorage(attached.storage, sign, patience_s=_LOOK_S)):
        return None
    return SignedStorage(attached.storage, sign)


def _sees(attached: Attached, opened: Callable[[], Writable | None]) -> bool:
    """Whether the marker of a storage is that of this run and this start of the plane."""
    from penstock.storage import read_marker

    try:
        storage = opened()
        marker = None if storage is None else read_marker(storage)
    except PenstockError as error:
        logger.warning("%s; frames pass the plane instead", error)
        return False
    return marker is not None and (marker.run_id, marker.epoch) == (attached.run_id.hex(), attached.epoch)


def _opened(address: str) -> KeptStorage | None:
    """A storage to read the marker from; None for a folder that is not here."""
    from penstock.storage import FolderStorage, ObjectStorage, is_object_url

    if is_object_url(address):
        return ObjectStorage(address, patience_s=_LOOK_S)
    return FolderStorage(address, create=False) if Path(address).is_dir() else None
