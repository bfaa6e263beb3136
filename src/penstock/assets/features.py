"""Processed features on disk: recomputable, verified, and deleted when not used for a while.

A feature file is msgpack of an envelope and a payload. The envelope repeats everything the request asks for, and the
sha256 of the payload; all of it must match. Features expire by last use (default 1800 s), because they can be computed
again. The images they come from are never swept.
"""

from __future__ import annotations

import hashlib
import math
import time

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.assets.claims import empty_trash
from penstock.assets.layouts import Grid
from penstock.assets.local_folder import LocalFolder
from penstock.assets.references import FEATURE_KIND, FeatureRef
from penstock.assets.store import AssetStore
from penstock.errors import ConfigError, CorruptAsset, IncompatibleAsset, MissingAsset, StorageError

TTL_S = 1800.0
MAX_FEATURE_BYTES = 512 << 20
_FOLDER = "mm_features/v1"
_TEMPORARY_S = 3600.0


class Envelope(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema_version: int = 1
    kind: str = FEATURE_KIND
    run_id: str | None = None
    """None only in files of older writers."""
    fingerprint: str
    modality: str
    mm_hash: str
    placeholder_length: int
    """Number of tokens the features represent."""
    payload_sha256: str
    """64 hex digits."""


class _File(msgspec.Struct, frozen=True, kw_only=True):
    envelope: Envelope
    payload: bytes


# Made at import: msgspec crashes when two threads are the first to decode a type.
_FILES = msgspec.msgpack.Decoder(_File)


class Patches(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Our own payload: the patch rows of one image."""

    grid: Grid
    rows: int
    columns: int
    data: bytes
    """rows x columns little-endian float32."""


# Made at import: msgspec crashes when two threads are the first to decode a type.
_PATCHES = msgspec.msgpack.Decoder(Patches)


class FeatureStore:
    """Processed features of one run, beside its images."""

    def __init__(self, assets: AssetStore, *, kind: str = FEATURE_KIND) -> None:
        self._blobs = assets.blobs
        self.run = assets.run
        self.kind = kind

    def put(self, *, fingerprint: str, image: str, payload: bytes, placeholder_length: int) -> FeatureRef:
        """Store a payload. One that exists already is only marked as used."""
        ref = FeatureRef(run=self.run, fingerprint=fingerprint, hash=image)
        envelope = Envelope(
            kind=self.kind,
            run_id=self.run,
            fingerprint=fingerprint,
            modality=ref.modality,
            mm_hash=image,
            placeholder_length=placeholder_length,
            payload_sha256=hashlib.sha256(payload).hexdigest(),
        )
        content = msgspec.msgpack.encode(_File(envelope=envelope, payload=payload))
        if not self._blobs.put_if_absent(self._name(ref), content):
            self._blobs.touch(self._name(ref))
        return ref

    def get(self, ref: FeatureRef, *, placeholder_length: int | None = None) -> bytes:
        """Return the payload, verified against the request and its own checksum. Marks it as used."""
        name = self._name(ref)
        if ref.run != self.run:
            raise _missing(ref)
        try:
            content = self._blobs.get(name, max_bytes=MAX_FEATURE_BYTES)
        except MissingAsset:
            raise _missing(ref) from None
        except CorruptAsset as error:
            raise CorruptAsset(str(error), error_type="corrupt_mm_feature_artifact") from None
        except StorageError as error:
            raise CorruptAsset(str(error), error_type="corrupt_mm_feature_artifact") from error
        payload = _open(content, ref, self.kind, placeholder_length)
        self._blobs.touch(name)
        return payload

    def _name(self, ref: FeatureRef) -> str:
        return f"{_FOLDER}/{self.run}/{ref.fingerprint}/{ref.modality}/{ref.hash[:2]}/{ref.hash}.msgpack"


def _open(content: bytes, ref: FeatureRef, kind: str, placeholder_length: int | None) -> bytes:
    try:
        file = _FILES.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise CorruptAsset(
            f"features of {ref.hash}: not a feature file; make them again", error_type="corrupt_mm_feature_artifact"
        ) from None
    envelope = file.envelope
    wanted = {"schema_version": 1, "kind": kind, "fingerprint": ref.fingerprint, "modality": ref.modality}
    wanted |= {"mm_hash": ref.hash, "run_id": ref.run if envelope.run_id is not None else None}
    if placeholder_length is not None:
        wanted["placeholder_length"] = placeholder_length
    for field, value in wanted.items():
        if getattr(envelope, field) != value:
            raise IncompatibleAsset(
                f"features of {ref.hash}: {field} is {getattr(envelope, field)!r:.80}, asked for {value!r:.80}",
                error_type="incompatible_mm_feature_artifact",
            )
    if hashlib.sha256(file.payload).hexdigest() != envelope.payload_sha256:
        raise CorruptAsset(
            f"features of {ref.hash}: the payload has another checksum; make them again",
            error_type="corrupt_mm_feature_artifact",
        )
    return file.payload


def _missing(ref: FeatureRef) -> MissingAsset:
    what = {"run_id": ref.run, "modality": ref.modality, "mm_hash": ref.hash, "fingerprint": ref.fingerprint}
    return MissingAsset(
        f"features of {ref.hash}: not in this run's store; send the image in full",
        error_type="missing_mm_feature_artifact",
        missing=(what,),
    )


def pack_patches(patches: NDArray[np.float32], grid: Grid) -> bytes:
    """Encode patch rows as a feature payload."""
    rows, columns = patches.shape
    data = np.ascontiguousarray(patches, np.dtype("<f4")).tobytes()
    return msgspec.msgpack.encode(Patches(grid=grid, rows=rows, columns=columns, data=data))


def unpack_patches(payload: bytes) -> tuple[NDArray[np.float32], Grid]:
    """Decode the patch rows of a feature payload, as a read-only view."""
    try:
        found = _PATCHES.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise CorruptAsset("features: not patch rows", error_type="corrupt_mm_feature_artifact") from None
    if found.rows != math.prod(found.grid) or found.columns < 1 or len(found.data) != 4 * found.rows * found.columns:
        raise CorruptAsset(
            f"features: {len(found.data)} bytes for {found.rows} x {found.columns} floats of grid {found.grid}",
            error_type="corrupt_mm_feature_artifact",
        )
    return np.frombuffer(found.data, np.dtype("<f4")).reshape(found.rows, found.columns), found.grid


def sweep(assets: AssetStore, *, ttl_s: float = TTL_S, now: float | None = None) -> int:
    """Remove features not used for `ttl_s` seconds, and files that killed processes left. Returns how many files."""
    if not ttl_s > 0:
        raise ConfigError(f"ttl_s {ttl_s}: must be positive")
    at = time.time() if now is None else now
    count = 0
    for info in list(assets.blobs.list("mm_features")):
        try:
            count += info.modified < at - ttl_s and assets.blobs.delete(info.name)
        except StorageError:
            continue  # another user's file, or deleted meanwhile: left to the next sweep
    empty_trash(assets.blobs)
    if isinstance(assets.blobs, LocalFolder):
        count += assets.blobs.remove_temporaries(older_than_s=_TEMPORARY_S, now=at)
    return count
