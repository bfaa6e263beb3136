"""Upload records to an object store as one Parquet file, with bounded memory and retries.

The file is first written to a temporary folder, so that its length is known and a retry can start over. The folder is
always removed, also on errors and interrupts.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import StorageError
from penstock.extras import require
from penstock.view.parquet import records_to_parquet
from penstock.view.record import Record

if TYPE_CHECKING:
    from penstock.assets import AssetStore

PART_BYTES = 8 << 20
"""Bytes sent, and held in memory, at a time."""


def upload_records(
    records: Iterable[Record],
    store: Any,
    key: str,
    *,
    images: AssetStore | None = None,
    attempts: int = 3,
    wait: Callable[[float], None] = time.sleep,
    temporary: Path | None = None,
) -> int:
    """Write records to `key` of an `obstore` store and return their number. Sends nothing if there are none.

    >>> from obstore.store import MemoryStore
    >>> upload_records([], MemoryStore(), "tokens/step_1.parquet")
    0
    """
    with tempfile.TemporaryDirectory(prefix="penstock-", dir=temporary) as folder:
        path = Path(folder) / "records.parquet"
        count = records_to_parquet(records, path, images=images)
        if count:
            upload_file(path, store, key, attempts=attempts, wait=wait)
        return count


def upload_file(
    path: Path, store: Any, key: str, *, attempts: int = 3, wait: Callable[[float], None] = time.sleep
) -> None:
    """Send a file in parts of 8 MiB, one at a time. After a failure starts over, 2, 4, ... seconds later."""
    require("upload", "obstore")
    import obstore
    from obstore.exceptions import BaseError

    for attempt in range(1, attempts + 1):
        try:
            obstore.put(store, key, path, chunk_size=PART_BYTES, max_concurrency=1)
        except (BaseError, OSError) as error:
            if attempt == attempts:
                # The client's message may contain headers and addresses, so only its class is shown.
                raise StorageError(
                    f"{key}: {path.stat().st_size} bytes not stored after {attempts} attempts, the last ended with "
                    f"{type(error).__name__}; send it again"
                ) from None
            wait(2.0**attempt)
        else:
            return
