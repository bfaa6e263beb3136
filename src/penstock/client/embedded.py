"""Runs a plane in a thread of this process: what `open` does for a folder, a database or "memory:"."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from penstock.atomic import folder_errors
from penstock.client.api import REMOTE, unknown_address
from penstock.client.collected import await_closing
from penstock.client.handles import Handle, usable_url
from penstock.client.plane import Plane
from penstock.config import build, keywords_of, nested
from penstock.errors import ConfigError, Conflict, PenstockError
from penstock.log import Log
from penstock.plane import ClusterSettings, PlaneLoop, PlaneSettings, note_listening, open_log, run_folder
from penstock.transport import MAX_MESSAGE, FilePlane, MemoryPlane, PlaneKeys, PlaneTransport, SocketPlane

logger = logging.getLogger("penstock.plane")
_TARGETS = ("groups_per_step", "samples_per_step", "tokens_per_step")


def open_embedded(address: str, given: dict[str, Any]) -> Plane:
    """Open a plane from keyword arguments. Needs `ranks`, `seq_len` and a setting for when a step is full."""
    check_known(address, given)
    where = address.removesuffix(":")  # "memory:"
    tables = nested(PlaneSettings, given, where)
    missing = [name for name in ("ranks", "seq_len") if name not in given]
    if missing:
        raise ConfigError(f"{where}: {' and '.join(missing)}: missing; a plane in this process needs ranks and seq_len")
    if not any(name in given for name in _TARGETS):
        raise ConfigError(f"{where}: when a step is full: missing; give one of {', '.join(_TARGETS)}")
    return open_settings(address, build(PlaneSettings, tables))


def check_known(address: str, given: Mapping[str, Any]) -> None:
    """Reject settings of server processes, and unknown names."""
    where = address.removesuffix(":")
    of_planes = {keyword.name for keyword in keywords_of(PlaneSettings)}
    theirs = {keyword.name for keyword in keywords_of(ClusterSettings)} - of_planes
    if wrong := [name for name in given if name in theirs]:
        raise ConfigError(
            f"{where}: {', '.join(wrong)}: a setting of `penstock serve` and of ray:// planes, not of a plane in "
            "this process or a connection to one; leave it out"
        )
    nested(PlaneSettings, given, where)


def open_settings(where: str, settings: PlaneSettings) -> Plane:
    """Open a plane from a settings record."""
    if settings.keys is not None and not settings.listen:
        raise ConfigError(f"keys: {settings.keys!r} without listen; give an address to listen at, or leave keys out")
    memory = MemoryPlane()
    log = _open_log(where, settings)
    with ExitStack() as opened:
        opened.callback(log.close)
        others = list[PlaneTransport]()
        for url in settings.listen:
            others.append(plane_transport(url, settings.keys, max_message=settings.max_message_bytes))
            opened.callback(others[-1].close)
        with folder_errors(where or log.where):
            server = PlaneLoop(settings, log, [memory, *others])
        memory.last_words = server.last_words
        note_listening(log, [usable_url(transport.url) for transport in others])
        opened.pop_all()  # from here on the plane's loop closes log and transports
    thread = threading.Thread(target=_run, args=(server,), name="penstock-plane", daemon=True)
    thread.start()
    url = usable_url(others[0].url) if others else where or log.where
    handle = Handle.of(url, settings.run, settings.keys, settings.timeouts) if others else None
    return Plane(
        memory.connect,
        url=url,
        timeouts=settings.timeouts,
        handle=handle,
        server=server,
        thread=thread,
    )


def _open_log(where: str, settings: PlaneSettings) -> Log:
    await_closing()  # a collected plane may still hold the folder's lock
    try:
        return open_log(run_folder(where, settings), settings)
    except Conflict:
        # A plane that is no longer used may be part of a cycle, such as an exception and the frames that it passed
        # through. Python collects cycles late.
        gc.collect()
        await_closing()
        return open_log(run_folder(where, settings), settings)


def plane_transport(url: str, keys: str | Path | None = None, *, max_message: int = MAX_MESSAGE) -> PlaneTransport:
    """Listen at an address, for messages of at most `max_message` bytes."""
    if url.startswith(("tcp://", "ipc://")):
        return SocketPlane(url, keys=None if keys is None else PlaneKeys.load(keys), max_message=max_message)
    if url.startswith("file://"):
        return FilePlane(url.removeprefix("file://"), max_message=max_message)
    raise unknown_address(url, REMOTE)


def _run(server: PlaneLoop) -> None:
    try:
        server.run()
    except PenstockError as error:  # every later call raises it with its traceback
        logger.error("the plane in this process ended: %s", error)  # noqa: TRY400
