"""The functions behind `penstock assets list|verify`. They return records and print nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from penstock.assets.claims import claims, hash_of, stored
from penstock.assets.image_header import probe, upright_size
from penstock.assets.store import AssetStore
from penstock.errors import AssetError, StorageError


@dataclass(frozen=True, slots=True, kw_only=True)
class AssetRow:
    """One stored image."""

    hash: str
    name: str
    """Of the blob, relative to the root."""
    num_bytes: int
    modified: float
    """Seconds since the epoch of its last use."""
    runs: tuple[str, ...]
    """Runs that claim it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    checked: int
    """Images read and hashed."""
    num_bytes: int
    corrupt: tuple[str, ...]
    """Blobs whose content does not match their name, with the reason."""
    missing: tuple[str, ...]
    """Hashes that were stored and are gone."""
    unfinished: int
    """Images whose writer was stopped before they were stored. No reference to them was returned."""
    quarantined: int
    """Blobs set aside by earlier readers."""

    @property
    def ok(self) -> bool:
        return not (self.corrupt or self.missing)


def list_assets(store: AssetStore) -> list[AssetRow]:
    """Return every image, by hash."""
    runs = claims(store.blobs)
    rows = [
        AssetRow(
            hash=hash_of(info.name),
            name=info.name,
            num_bytes=info.size,
            modified=info.modified,
            runs=tuple(sorted(runs.get(hash_of(info.name), ()))),
        )
        for info in store.list()
    ]
    return sorted(rows, key=lambda row: row.hash)


def verify_assets(store: AssetStore, *, progress: Callable[[int], None] = lambda _: None) -> VerifyReport:
    """Read and hash every image; changes nothing. `progress` gets the bytes read so far."""
    corrupt, present, num_bytes = [], set(), 0
    for row in list_assets(store):
        present.add(row.hash)
        reason = _problem(store, row)
        if reason:
            corrupt.append(f"{row.name}: {reason}")
        num_bytes += row.num_bytes
        progress(num_bytes)
    return VerifyReport(
        checked=len(present),
        num_bytes=num_bytes,
        corrupt=tuple(corrupt),
        missing=tuple(sorted(stored(store.blobs) - present)),
        unfinished=len(claims(store.blobs).keys() - stored(store.blobs) - present),
        quarantined=sum(1 for _ in store.blobs.list("quarantine")),
    )


def _problem(store: AssetStore, row: AssetRow) -> str:
    try:
        data = store.blobs.get(row.name, max_bytes=store.limits.max_bytes)
        if hashlib.sha256(data).hexdigest() != row.hash:
            return "the bytes have another hash"
        upright_size(probe(data, store.limits))
    except (AssetError, StorageError) as error:
        return str(error)
    return ""
