"""`open` and `connect`: from an address to a plane or a rank's source.

runs/demo            a folder: a durable plane in this process
postgresql://...     the same without a folder: its log in a database, its frames in `storage`
memory:              a plane in this process, nothing durable
tcp://HOST:PORT      a plane elsewhere, over sockets
ipc://PATH           a plane on this host
file://FOLDER        a plane elsewhere, over a shared filesystem
ray://NAME           a plane of the Ray cluster that this process is in, which is started if settings are given
"""

from __future__ import annotations

import importlib
import logging
import re
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from penstock.atomic import folder_errors
from penstock.client.closing import await_closing
from penstock.client.handles import Handle, usable_url
from penstock.client.plane import Plane
from penstock.client.plane_keywords import PlaneKeywords
from penstock.client.source import Source
from penstock.client.source_settings import SourceSettings
from penstock.config import build, keywords_of, nested, signature_of
from penstock.config.removed import REMOVED_SCHEMES
from penstock.errors import ConfigError, PenstockError, PlaneLost
from penstock.log.postgres_address import check_address, is_postgres, redacted, split_run, with_run
from penstock.plane.loop import Server
from penstock.plane.open_log import listens_at, note_listening, open_log, run_folder
from penstock.plane.settings import CLUSTER_TIMEOUTS, ClusterSettings, PlaneSettings
from penstock.protocol.timeouts import Timeouts
from penstock.transport.files import FileClient, FilePlane
from penstock.transport.interface import ClientCarrier, PlaneCarrier
from penstock.transport.keys import ClientKeys, PlaneKeys
from penstock.transport.memory import MemoryPlane
from penstock.transport.resolving import Address, ResolvingClient
from penstock.transport.sockets import MAX_MESSAGE, SocketClient, SocketPlane

logger = logging.getLogger("penstock.plane")
_REMOTE = ("tcp://", "ipc://", "file://")
_RAY = "ray://"
_CALLERS = ("keys", "timeouts", "run")
_TARGETS = ("groups_per_step", "samples_per_step", "tokens_per_step")
_HOST_AND_PORT = re.compile(r"[\w.-]+:\d{1,5}")
"""Settings of the line to a plane, not of the plane; `run` is the name that the plane there must have."""


def open(where: str | Path, **settings: Unpack[PlaneKeywords]) -> Plane:  # noqa: A001 - ps.open is what it is called
    """A plane: in this process for a folder or "memory:", a line to one elsewhere for an address.

    In this process it needs `ranks`, `seq_len` and one of `groups_per_step`, `samples_per_step`, `tokens_per_step`. A
    plane elsewhere has its own settings; only `keys` and `timeouts` are the caller's, and `run`, where it must be the
    plane of that run and no other. "ray://NAME" is started in the Ray cluster if there is none and settings are given;
    settings that are not those of the plane that runs there are refused. docs/settings.md has all of them.

    >>> import penstock as ps
    >>> with ps.open("memory:", ranks=1, seq_len=16, groups_per_step=1) as plane:
    ...     with plane.group("prompt-1") as group:
    ...         for reward in (0.0, 1.0):
    ...             group.add(ps.Trajectory(turns=[ps.Turn([1, 2]), ps.Turn([3], logprobs=[-0.5])], reward=reward))
    ...     source = plane.source(rank=0)
    ...     step = source.step()
    ...     source.commit(step)
    ...     source.flush()
    ...     source.close()
    ...     print(step.loss_tokens, plane.ledger.committed)
    2 2
    """
    address, given = str(where), dict(settings)
    if address.startswith(_RAY):
        plane: Plane = _ray().open_ray(address, given)
        return plane
    _check_not_a_servers(address, given)
    if address.startswith(_REMOTE):
        return _line_to(address, given)
    if is_postgres(address):
        base, run = split_run(address)
        if not given.keys() - _CALLERS:
            return _line_to(with_run(base, str(given.get("run", run))), {"run": run} | given)
        given |= {"log": base} | ({"run": run} if "#" in address else {})
        address = ""
    if "://" in address:
        raise _unknown(address, [*_REMOTE, _RAY])
    if isinstance(where, str) and (address == "memory" or _HOST_AND_PORT.fullmatch(address)):
        meant = "memory:" if address == "memory" else f"tcp://{address}"
        raise ConfigError(f"{address}: no folder and no address; give {meant!r}, or './{address}' for a folder")
    tables = nested(PlaneSettings, given, address)
    missing = [name for name in ("ranks", "seq_len") if name not in given]
    if missing:
        raise ConfigError(
            f"{address}: {' and '.join(missing)}: missing; a plane in this process needs ranks and seq_len"
        )
    if not any(name in given for name in _TARGETS):
        raise ConfigError(f"{address}: when a step is full: missing; give one of {', '.join(_TARGETS)}")
    return open_settings(address, build(PlaneSettings, tables))


open.__signature__ = signature_of(open, ClusterSettings)  # type: ignore[attr-defined]


def _check_not_a_servers(address: str, given: Mapping[str, Any]) -> None:
    """Refuse settings that only a server process has."""
    of_planes = {keyword.name for keyword in keywords_of(PlaneSettings)}
    theirs = {keyword.name for keyword in keywords_of(ClusterSettings)} - of_planes
    if wrong := [name for name in given if name in theirs]:
        raise ConfigError(
            f"{address}: {', '.join(wrong)}: a setting of `penstock serve` and of ray:// planes, not of a plane in "
            "this process or a line to one; leave it out"
        )


def open_settings(where: str, settings: PlaneSettings) -> Plane:
    """A plane in a thread of this process."""
    memory = MemoryPlane()
    await_closing()
    log = open_log(run_folder(where, settings), settings)
    try:
        others = [plane_carrier(url, settings.keys, max_message=settings.max_message_bytes) for url in settings.listen]
        with folder_errors(where or log.where):
            server = Server(settings, log, [memory, *others])
        memory.last_words = server.last_words
        note_listening(log, [usable_url(carrier.url) for carrier in others])
    except BaseException:
        log.close()
        raise
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


def _ray() -> Any:
    """`penstock.ray`, which stands above this package: only an address that begins with ray:// leads there."""
    return importlib.import_module("penstock.ray")


def _line_to(address: str, given: dict[str, Any]) -> Plane:
    """A line to a plane elsewhere, which was told its settings where it was started."""
    nested(PlaneSettings, given, address)  # names that nobody knows are refused as such
    theirs = [name for name in given if name not in _CALLERS]
    if theirs:
        raise ConfigError(f"{address}: {', '.join(theirs)}: the plane there has its own settings; leave them out")
    keys = given.get("keys")
    timeouts, run = given.get("timeouts"), given.get("run", "")
    handle = Handle.of(address, run, keys, timeouts)
    return Plane(
        lambda: client_carrier(address, keys),
        url=address,
        run=run,
        timeouts=timeouts,
        handle=handle,
    )


def _run(server: Server) -> None:
    try:
        server.run()
    except PenstockError as error:  # every later call raises it, so a traceback here would say it twice
        logger.error("the plane in this process ended: %s", error)  # noqa: TRY400


def connect(
    url: str,
    *,
    rank: int,
    world: int,
    replica: int = 0,
    replicas: int = 1,
    resume_step: int | None = None,
    prefetch: int = 1,
    run: str = "",
    keys: str | Path | None = None,
    timeouts: Timeouts | None = None,
) -> Source:
    """One rank's source of steps, from a plane elsewhere.

    `resume_step` is one above the last step of the checkpoint that is loaded; by default the first step that is not
    committed.
    """
    is_ray, carrier = url.startswith(_RAY), client_carrier(url, keys)
    settings = SourceSettings(
        rank=rank,
        world=world,
        replica=replica,
        replicas=replicas,
        resume_step=resume_step,
        prefetch=prefetch,
        run=run,
        timeouts=timeouts or (CLUSTER_TIMEOUTS if is_ray else Timeouts()),
    )
    return Source(carrier, settings, handle=Handle.of(url, run, keys, timeouts))


def client_carrier(url: str, keys: str | Path | None = None) -> ClientCarrier:
    """A client's end of the carrier that an address names."""
    if url.startswith(_RAY):
        end: ClientCarrier = _ray().connect_ray(url)
        return end
    pair = None if keys is None else ClientKeys.load(keys)
    if is_postgres(url):
        check_address(split_run(url)[0])
        return ResolvingClient(partial(_address_in_log, url, pair))
    if url.startswith(("tcp://", "ipc://")):
        return SocketClient(url, keys=pair)
    if url.startswith("file://"):
        return FileClient(url.removeprefix("file://"))
    raise _unknown(url, [*_REMOTE, _RAY])


def _address_in_log(url: str, keys: ClientKeys | None) -> Address:
    """Where the plane of a run listens now, as it has written into its log. PlaneLost if no plane has."""
    from penstock.log.postgres_reader import reading_postgres

    with reading_postgres(url) as log:
        urls = listens_at(log) if log.tables() else []
    if not urls:
        raise PlaneLost(f"{redacted(url)}: no plane of this run has listened yet; start one with `penstock serve`")
    return Address(urls[0], keys)


def plane_carrier(url: str, keys: str | Path | None = None, *, max_message: int = MAX_MESSAGE) -> PlaneCarrier:
    """The plane's end of the carrier that an address names. It takes no message of more than `max_message` bytes."""
    if url.startswith(("tcp://", "ipc://")):
        return SocketPlane(url, keys=None if keys is None else PlaneKeys.load(keys), max_message=max_message)
    if url.startswith("file://"):
        return FilePlane(url.removeprefix("file://"), max_message=max_message)
    raise _unknown(url, _REMOTE)


def _unknown(url: str, known: Sequence[str]) -> ConfigError:
    scheme = url.partition("://")[0]
    if scheme in REMOVED_SCHEMES:
        return ConfigError(f"address {url!r}: {scheme}:// was removed; {REMOVED_SCHEMES[scheme]}")
    return ConfigError(f"address {url!r}: must begin with one of {', '.join(known)}")
