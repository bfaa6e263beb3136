"""The asset store: each image once, under the sha256 of its original bytes.

    <root>/images/ab/abcd....png        source images, never removed by age
    <root>/claims/<run>/ab/abcd...      which run may see which image
    <root>/pending/<run>/ab/abcd...     the same, while the image is being written
    <root>/mm_features/v1/...           processed features, recomputable, swept by age
    <root>/quarantine/...               bytes that do not match their name

Bytes are verified against their hash on every read, before anything parses them: a rank decodes exactly what the
rollout saw, or gets an error.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from penstock.arrays import ImageSpan
from penstock.assets.blobs import BlobInfo, Blobs
from penstock.assets.claims import claim_name, claims, hash_of, pending_name, stored
from penstock.assets.image_files import DEFAULT_LIMITS, EXTENSIONS, Limits, probe, upright_size
from penstock.assets.layouts import Grid
from penstock.assets.local_folder import LocalFolder
from penstock.assets.sources import ImageSource, check_declared, read_source
from penstock.errors import AssetError, ConfigError, CorruptAsset, InvalidReference, MissingAsset, StorageError


class Geometry(Protocol):
    """The part of a layout that gives an image's tokens without its pixels."""

    @property
    def merge(self) -> int: ...
    def grid(self, width: int, height: int) -> Grid: ...


class ImageRef(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What the store returns for an image: enough to place it in a sample.

    >>> from penstock.assets.layouts import QWEN3_VL
    >>> ref = ImageRef(hash="0" * 64, media_type="image/png", width=1280, height=720, num_bytes=40_000)
    >>> describe(ref, QWEN3_VL), span(ref, QWEN3_VL, offset=5).end
    (((1, 44, 80), 880), 885)
    """

    hash: str
    """sha256 of the original bytes, 64 hex digits: the image's identity."""
    media_type: str
    """Detected from the bytes, not as declared."""
    width: int
    """Upright, in pixels."""
    height: int
    num_bytes: int

    @property
    def file_id(self) -> str:
        """The file's name in the store: the hash and the extension of its media type."""
        return f"{self.hash}.{EXTENSIONS[self.media_type]}"


def describe(ref: ImageRef, layout: Geometry) -> tuple[Grid, int]:
    """Return the image's grid in patches and its number of placeholder tokens, from the header alone."""
    grid = layout.grid(ref.width, ref.height)
    return grid, grid[0] * grid[1] * grid[2] // layout.merge**2


def span(ref: ImageRef, layout: Geometry, *, offset: int) -> ImageSpan:
    """Return the span of the image whose first placeholder token is `offset` in its sample."""
    grid, length = describe(ref, layout)
    return ImageSpan(
        hash=ref.hash,
        grid=grid,
        offset=offset,
        length=length,
        merge=layout.merge,
        media_type=ref.media_type,
        width=ref.width,
        height=ref.height,
        num_bytes=ref.num_bytes,
    )


SAFE_ID = re.compile(r"(?!\.)[A-Za-z0-9_.-]{1,128}")
_HASH = re.compile(r"[0-9a-f]{64}")
_REMEMBERED = 16_384
_RETRY_S = 0.02


class AssetStore:
    """Images of one run, by content.

    >>> import tempfile
    >>> from penstock.testing import draw_screenshot
    >>> store = AssetStore(tempfile.mkdtemp(), run="demo")
    >>> ref = store.put(draw_screenshot(seed=1, width=640, height=360))
    >>> ref.width, ref.media_type, len(store.get(ref.hash)) == ref.num_bytes
    (640, 'image/png', True)
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Blobs,
        *,
        run: str = "local",
        limits: Limits = DEFAULT_LIMITS,
        files_from: Sequence[str | os.PathLike[str]] = (),
        retries: int = 3,
    ) -> None:
        """Open a store in the folder `root` (or any `Blobs`) as seen by `run`.

        `files_from` are folders whose files may be copied in by `file:` URL; none by default. `retries` is how often a
        missing image is looked for again, 20 ms longer each time, for file systems that show another host's file late.
        """
        if root is None:
            raise ConfigError("AssetStore: None; give a folder, or an object store")
        if not SAFE_ID.fullmatch(run):
            raise ConfigError(f"run {run[:80]!r}: give 1 to 128 of A-Z a-z 0-9 _ . - that start with no dot")
        self.blobs: Blobs = LocalFolder(root) if isinstance(root, (str, os.PathLike)) else root
        self.run = run
        self.limits = limits
        self._files_from = tuple(str(Path(folder).absolute()) for folder in files_from)
        self._retries = retries
        # Cached per process, so that a history of n images costs n header reads, not n per turn.
        self._known: OrderedDict[str, ImageRef] = OrderedDict()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, object]:
        """Support frameworks that pickle objects between processes: the copy opens the same folder for the same run."""
        return {name: value for name, value in vars(self).items() if name not in ("_known", "_lock")}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state, _known=OrderedDict(), _lock=threading.Lock())

    def __repr__(self) -> str:
        return f"AssetStore({self.blobs!r}, run={self.run!r})"

    def put(self, source: ImageSource) -> ImageRef:
        """Store an image durably, once, and claim it for this run. Storing it again only renews its time."""
        own = self.own_hash(source) if isinstance(source, str) else None
        if own is not None:
            return self.ref(own)
        data, declared = read_source(source, allowed=self._files_from, max_bytes=self.limits.max_bytes)
        ref = self._describe(data, hashlib.sha256(data).hexdigest())
        check_declared(declared, ref.media_type)
        name, claim = image_name(ref), claim_name(self.run, ref.hash)
        # The usual case: this process stored the image before. Two touches instead of writing it again.
        if self._recall(ref.hash) is not None and self.blobs.touch(claim) and self.blobs.touch(name):
            return ref
        # The claim comes first: see claims.py for why the order matters.
        pending = pending_name(self.run, ref.hash)
        if self.blobs.head(claim) is None:
            self.blobs.put_if_absent(pending, b"")
        if not self.blobs.put_if_absent(name, data):
            found = self.blobs.head(name)
            # The name is taken by bytes of another size: they are damaged, since a name is the hash of its content.
            if found is not None and found.size != len(data):
                self._quarantine(name)
            if not self.blobs.touch(name):
                self.blobs.put_if_absent(name, data)
        self.blobs.move(pending, claim)
        self._remember(ref)
        return ref

    def get(self, image: str) -> bytes:
        """Return the original bytes of a hash, verified. Raises `MissingAsset` or `CorruptAsset`."""
        return self._read(image)[1]

    def ref(self, image: str) -> ImageRef:
        """Return the reference of a stored image, read from its header."""
        known = self._recall(image)
        if known is not None:
            return known
        name, data = self._read(image)
        ref = self._describe(data, image)
        if image_name(ref) != name:
            raise CorruptAsset(f"{name}: the bytes are {ref.media_type}; store the image again")
        self._remember(ref)
        return ref

    def __contains__(self, image: object) -> bool:
        return isinstance(image, str) and bool(_HASH.fullmatch(image)) and self._find(image) is not None

    def url(self, ref: ImageRef) -> str:
        """Return the URL for the image in messages. An inference server that shares the storage can open it."""
        return self.blobs.url(image_name(ref))

    def own_hash(self, text: str) -> str | None:
        """Return the hash in one of this store's own URLs, or None for any other text. Reads nothing."""
        image = hash_of(text[-80:])
        if not _HASH.fullmatch(image):
            return None
        names = (f"images/{image[:2]}/{image}.{extension}" for extension in EXTENSIONS.values())
        return image if any(self.blobs.url(name) == text for name in names) else None

    def list(self) -> Iterator[BlobInfo]:
        """Yield every stored image, of all runs."""
        return self.blobs.list("images")

    def _describe(self, data: bytes, image: str) -> ImageRef:
        header = probe(data, self.limits)
        width, height = upright_size(header)
        return ImageRef(hash=image, media_type=header.media_type, width=width, height=height, num_bytes=len(data))

    def _find(self, image: str) -> str | None:
        if self.blobs.head(claim_name(self.run, image)) is None:
            return None
        names = (f"images/{image[:2]}/{image}.{extension}" for extension in EXTENSIONS.values())
        return next((name for name in names if self.blobs.head(name) is not None), None)

    def _read(self, image: str) -> tuple[str, bytes]:
        if not _HASH.fullmatch(image):
            raise InvalidReference(f"image {image[:80]!r}: an id is the 64 lower-case hex digits of a sha256")
        for attempt in range(self._retries + 1):
            name = self._find(image)
            if name is not None:
                break
            if attempt < self._retries:
                time.sleep(_RETRY_S * (attempt + 1))
        else:
            raise MissingAsset(f"image {image}: not in this run's store; store it again or check the run id")
        data = self.blobs.get(name, max_bytes=self.limits.max_bytes)
        if hashlib.sha256(data).hexdigest() != image:
            self._quarantine(name)
            raise CorruptAsset(
                f"image {image}: {len(data)} stored bytes have another hash; they are in quarantine, store it again",
                error_type="raw_mm_hash_mismatch",
            )
        return name, data

    def _quarantine(self, name: str) -> None:
        """Move a blob that does not match its name out of the way, unless it was repaired meanwhile."""
        aside = f"quarantine/{name.rsplit('/', 1)[-1]}.{secrets.token_hex(4)}"
        if self.blobs.move(name, aside):
            data = self.blobs.get(aside, max_bytes=self.limits.max_bytes)
            if hashlib.sha256(data).hexdigest() == hash_of(name):
                self.blobs.move(aside, name)

    def _recall(self, image: str) -> ImageRef | None:
        with self._lock:
            return self._known.get(image)

    def _remember(self, ref: ImageRef) -> None:
        with self._lock:
            self._known[ref.hash] = ref
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)


def image_name(ref: ImageRef) -> str:
    """Return the blob name of an image."""
    return f"images/{ref.hash[:2]}/{ref.file_id}"


# ------------------------------------------------------------------ list and verify: `penstock assets`


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
