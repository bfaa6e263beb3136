"""Whether this process sees the plane's storage: the one question that decides how its bytes go."""

from __future__ import annotations

import logging
from pathlib import Path

from penstock.errors import PenstockError
from penstock.send.messages import Attached
from penstock.storage import FolderStorage, read_marker

logger = logging.getLogger("penstock.storage")


def reachable(attached: Attached) -> FolderStorage | None:
    """The plane's storage, if this process sees it: the marker must be that of this run and this start of the plane."""
    if not attached.storage or not Path(attached.storage).is_dir():
        return None
    storage = FolderStorage(attached.storage, create=False)
    try:
        marker = read_marker(storage)
    except PenstockError as error:
        logger.warning("%s; frames pass the plane instead", error)
        return None
    if marker is None or (marker.run_id, marker.epoch) != (attached.run_id.hex(), attached.epoch):
        return None
    return storage
