"""Whether this process sees the plane's storage: the one question that decides how its bytes go."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import PenstockError
from penstock.protocol import Attached

if TYPE_CHECKING:
    from penstock.storage import KeptStorage

logger = logging.getLogger("penstock.storage")
_LOOK_S = 3.0
"""How long an object store is asked for the marker: a rank's heartbeats wait meanwhile."""


def reachable(attached: Attached) -> KeptStorage | None:
    """The plane's storage, if this process sees it: the marker must be that of this run and this start of the plane."""
    if not attached.storage:
        return None
    from penstock.storage import open_storage, read_marker

    try:
        storage = _opened(attached.storage)
        marker = None if storage is None else read_marker(storage)
    except PenstockError as error:
        logger.warning("%s; frames pass the plane instead", error)
        return None
    if marker is None or (marker.run_id, marker.epoch) != (attached.run_id.hex(), attached.epoch):
        return None
    return open_storage(attached.storage, create=False)


def _opened(address: str) -> KeptStorage | None:
    """A storage to read the marker from; None for a folder that is not here."""
    from penstock.storage import FolderStorage, ObjectStorage, is_object_url

    if is_object_url(address):
        return ObjectStorage(address, patience_s=_LOOK_S)
    return FolderStorage(address, create=False) if Path(address).is_dir() else None
