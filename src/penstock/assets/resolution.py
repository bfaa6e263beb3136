"""Resolve references for an inference server: a reference in, patch rows out, every part of it checked.

Errors carry the status and the error type for the server's response (`error.status`, `error.answer()`). A client may
retry once with all images in full when `retry_in_full(error)` returns True.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.assets.features import FeatureStore, unpack_patches
from penstock.assets.image_files import EXTENSIONS, decode_rgb
from penstock.assets.layouts import Grid, Layout
from penstock.assets.references import FeatureRef, RawRef, parse, processor_fingerprint
from penstock.assets.store import AssetStore, ImageRef, describe
from penstock.errors import (
    AssetError,
    CorruptAsset,
    ImageRefused,
    IncompatibleAsset,
    InvalidReference,
    MissingAsset,
    StorageError,
)

_RETRY = frozenset({"missing_mm_cache_item", "missing_mm_feature_artifact", "corrupt_mm_feature_artifact"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """What the request's own placeholder says. The reference must agree with all of it."""

    hash: str
    modality: str = "image"
    placeholder_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    patches: NDArray[np.float32]
    """[t * h * w, row_size]"""
    grid: Grid


def raw_reference(store: AssetStore, ref: ImageRef, layout: Layout, *, transformers: str = "missing") -> RawRef:
    """Return the reference to send for a stored image."""
    return RawRef(
        run=store.run,
        fingerprint=processor_fingerprint(layout, transformers=transformers),
        hash=ref.hash,
        raw_image_id=ref.file_id,
        grid=describe(ref, layout)[0],
    )


def resolve(text: str, *, store: AssetStore, layout: Layout, slot: Slot, fingerprint: str) -> Resolved:
    """Return the patch rows behind an `mmraw` or `mmfile` reference.

    `fingerprint` is the reader's own: of its processor for mmraw, of its features for mmfile.
    """
    ref = parse(text, default_run=store.run)
    kind = "raw" if isinstance(ref, RawRef) else "feature"
    if ref.modality != slot.modality or ref.hash != slot.hash or ref.modality != "image":
        raise InvalidReference(
            f"reference of {ref.modality} {ref.hash}: the slot asks for {slot.modality[:40]} {slot.hash[:128]}",
            error_type=f"invalid_mm_{kind}_ref",
        )
    if ref.fingerprint != fingerprint:
        raise IncompatibleAsset(
            f"reference made under fingerprint {ref.fingerprint}; this reader has {fingerprint}",
            error_type="incompatible_mm_raw_fingerprint" if kind == "raw" else "incompatible_mm_feature_artifact",
        )
    if isinstance(ref, FeatureRef):
        payload = FeatureStore(store).get(ref, placeholder_length=slot.placeholder_length)
        patches, grid = unpack_patches(payload)
        _check_length(layout, grid, slot, "incompatible_mm_feature_artifact")
        return Resolved(patches=patches, grid=grid)
    return _resolve_raw(ref, store, layout, slot)


def _resolve_raw(ref: RawRef, store: AssetStore, layout: Layout, slot: Slot) -> Resolved:
    if ref.raw_image_id not in {f"{ref.hash}.{extension}" for extension in EXTENSIONS.values()}:
        raise InvalidReference(f"reference of image {ref.hash}: its file id must be the hash and an image extension")
    _check_length(layout, ref.grid, slot, "raw_mm_grid_mismatch")
    data = _read(ref, store)
    try:
        prepared = layout.prepare(decode_rgb(data, store.limits, where=f"image {ref.hash}"))
    except ImageRefused as error:
        raise CorruptAsset(str(error)) from None
    grid = layout.grid_of(prepared)
    if grid != ref.grid:
        raise IncompatibleAsset(
            f"image {ref.hash}: grid {ref.grid} in the reference, {grid} by this reader's layout",
            error_type="raw_mm_grid_mismatch",
        )
    patches = np.empty((grid[0] * grid[1] * grid[2], layout.row_size), np.float32)
    layout.fill(prepared, patches)
    return Resolved(patches=patches, grid=grid)


def _read(ref: RawRef, store: AssetStore) -> bytes:
    what = {"run_id": ref.run, "modality": ref.modality, "mm_hash": ref.hash, "fingerprint": ref.fingerprint}
    missing = ({**what, "raw_image_id": ref.raw_image_id},)
    try:
        data = store.get(ref.hash) if ref.run == store.run else None
    except MissingAsset:
        data = None
    except AssetError:
        raise
    except StorageError as error:
        raise CorruptAsset(str(error), missing=missing) from error
    if data is None:
        # The same error for an unknown id and for another run's: a reference must not reveal what other runs have.
        raise MissingAsset(f"image {ref.hash}: not in this run's store; store it or check the run id", missing=missing)
    return data


def _check_length(layout: Layout, grid: Grid, slot: Slot, error_type: str) -> None:
    patches = grid[0] * grid[1] * grid[2]
    if patches != slot.placeholder_length * layout.merge**2:
        raise IncompatibleAsset(
            f"grid {grid}: {patches / layout.merge**2:g} tokens for a placeholder of {slot.placeholder_length}",
            error_type=error_type,
        )


def retry_in_full(error: AssetError, *, sent_hash_only: bool = True) -> bool:
    """Return whether to repeat the request once with every image in full."""
    return error.error_type in _RETRY and (sent_hash_only or error.error_type != "missing_mm_cache_item")
