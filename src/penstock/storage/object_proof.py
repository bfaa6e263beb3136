"""Tests an object store before a plane relies on it.

Servers that speak S3 differ: one of two that we tried overwrites an object in spite of If-None-Match. In such a store a
plane that was cut off could replace the marker, so nothing is deleted there. A store that returns other bytes than
requested cannot be used at all.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.errors import Away, StorageError
from penstock.storage.object_requests import Missing, Taken, run
from penstock.storage.object_writes import put_new
from penstock.storage.signed import Method, SignedStorage

if TYPE_CHECKING:
    from penstock.storage.objects import ObjectStorage

_FIRST, _SECOND = b"0123456789" * 7, b"another" * 10
_RANGES = ((0, 7), (31, 52), (60, 70))
_PATIENCE_S = 5.0
Ask: TypeAlias = Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]
"""Makes a request, and repeats it while the store does not answer."""


def prove(storage: ObjectStorage) -> str:
    """Return why nothing may be deleted in a store, or "". Raises StorageError if it cannot be used."""
    return run(_prove(storage))


async def _prove(storage: ObjectStorage) -> str:
    import obstore

    store, name = storage.store, f"proof/{secrets.token_hex(8)}"

    async def ask(act: Callable[[], Awaitable[Any]]) -> Any:
        return await storage.ask(name, act, deadline=time.monotonic() + _PATIENCE_S)

    await put_new(storage, name, _FIRST)
    try:
        await _check_ranges(storage, name, ask)
        if not await _refuses(ask, lambda: obstore.put_async(store, name, _SECOND, mode="create")):
            return "it overwrites objects that exist (If-None-Match is ignored)"
        old = {"e_tag": '"00000000000000000000000000000000"'}
        if storage.url.startswith("gs://"):
            old = {"version": "1"}
        if not await _refuses(ask, lambda: obstore.put_async(store, name, _SECOND, mode=old)):
            return "it replaces objects that have changed (If-Match is ignored)"
        if not any(meta["path"].endswith(name) for meta in await storage.listed("proof")):
            return "it does not list objects that were just written"
        return ""
    finally:
        await ask(lambda: obstore.delete_async(store, name))


async def _refuses(ask: Ask, act: Callable[[], Awaitable[Any]]) -> bool:
    try:
        await ask(act)
    except (Taken, Missing):
        return True
    return False


async def _check_ranges(storage: ObjectStorage, name: str, ask: Ask) -> None:
    """Raise StorageError unless the store returns exactly the requested bytes."""
    import obstore

    try:
        whole, _ = await storage.get(name)
    except Missing:
        raise StorageError(f"{storage.url}: an object that was just written is not there; use another store") from None
    try:
        found = [
            bytes(await ask(partial(obstore.get_range_async, storage.store, name, start=start, end=end)))
            for start, end in _RANGES
        ]
    except Away:  # the client takes an answer with too many bytes for a broken connection; a plain read just worked
        found = []
    if whole != _FIRST or found != [_FIRST[start:end] for start, end in _RANGES]:
        raise StorageError(
            f"{storage.url}: does not return the requested bytes of an object (Range); use another store"
        )


def prove_signing(storage: ObjectStorage, seconds: float) -> None:
    """Raise StorageError unless the store honours create-only writes that are made with signed URLs."""

    async def sign(method: Method, names: tuple[str, ...]) -> tuple[Sequence[str], float]:
        return await storage.sign_async(method, names, seconds), seconds

    run(_prove_signing(storage, SignedStorage(storage.url, sign)))


async def _prove_signing(storage: ObjectStorage, signed: SignedStorage) -> None:
    name = f"proof/{secrets.token_hex(8)}"
    try:
        await put_new(signed, name, b"one")
        await signed.ask(name, lambda: signed.put_once(name, b"another"))
    except Taken:
        return
    except Away:
        raise
    except StorageError as error:
        raise StorageError(f"sign_puts_s: {error}; without sign_puts_s frames of workers pass the plane") from None
    finally:
        await storage.remove([name])
    raise StorageError(
        f"sign_puts_s: {storage.url}: overwrites objects that exist when the URL is signed (If-None-Match is ignored); "
        "use another store, or leave sign_puts_s out: then frames of workers pass the plane"
    )
