"""Where archives are: a folder, or a prefix in an object store, by its address."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

from penstock.assets.blobs import Blobs
from penstock.assets.local_folder import LocalFolder
from penstock.assets.object_store import ObjectStore
from penstock.assets.urls import path_of
from penstock.errors import ConfigError, StorageError
from penstock.extras import require

_STORES = ("s3", "gs", "az")
_RETRY_S = 60
"""How long the client tries by itself; whoever asks goes on from there."""


def check_place(where: str) -> None:
    """Raise ConfigError for an address that no archive can have, MissingExtra where the client is not installed."""
    if "://" not in where:
        if not where:
            raise ConfigError("archive '': empty; give a folder, or an address such as s3://BUCKET/PREFIX")
        return
    split = urlsplit(where)
    if split.scheme == "file":
        path_of(where)
        return
    stores = ", ".join(f"{name}://BUCKET/PREFIX" for name in _STORES)
    if split.scheme not in _STORES or not split.netloc or split.query or split.fragment or where.endswith("/"):
        raise ConfigError(
            f"archive {where!r}: must be a folder, file:///FOLDER, or one of {stores}, without a slash at the end"
        )
    if split.username or split.password:
        raise ConfigError("archive: credentials in the address; leave them to the environment or the cloud's own files")
    require("an archive in an object store", "obstore")


def open_place(where: str, *, create: bool = False) -> Blobs:
    """The objects there. A folder is made where `create` says so; raises StorageError where there is none."""
    check_place(where)
    if "://" in where and not where.startswith("file://"):
        return _object_store(where)
    folder = Path(path_of(where) if where.startswith("file://") else where)
    if not create and not folder.is_dir():
        raise StorageError(f"archive {where}: no such folder")
    return LocalFolder(folder)


def _object_store(where: str) -> ObjectStore:
    from obstore.store import from_url

    # Options of the client stay as the environment has them: giving any of them would hide the others.
    store = from_url(where, retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=_RETRY_S)})
    return ObjectStore(store, url=where)
