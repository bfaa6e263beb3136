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
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from penstock.client.handles import Handle
from penstock.config import LateSignature
from penstock.errors import ConfigError, PlaneLost
from penstock.log import check_address, check_where, is_postgres, redacted, split_run, with_run
from penstock.protocol import Timeouts
from penstock.transport import ClientKeys, SocketClient

if TYPE_CHECKING:
    from penstock.client.plane import Plane
    from penstock.client.plane_keywords import PlaneKeywords
    from penstock.client.source import Source
    from penstock.transport import Address, ClientTransport

REMOTE = ("tcp://", "ipc://", "file://")
_RAY = "ray://"
_CALLERS = ("keys", "timeouts", "run")
"""Settings of the connection, not of the plane. `run` is the name that the plane there must have."""


def open(where: str | Path, **settings: Unpack[PlaneKeywords]) -> Plane:  # noqa: A001 - ps.open is what it is called
    """Open a plane: in this process for a folder or "memory:", or connect to one elsewhere for an address.

    In this process it needs `ranks`, `seq_len` and one of `groups_per_step`, `samples_per_step`, `tokens_per_step`. A
    plane elsewhere has its own settings: pass only `keys` and `timeouts`, and `run` if it must be the plane of that
    run. "ray://NAME" connects to a plane of the Ray cluster, and starts it if there is none and settings are given.
    Settings that differ from those of the running plane are rejected. docs/settings.md lists all settings.

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
    _check_place(where)
    address, given = str(where), dict(settings)
    if address.startswith(_RAY):
        plane: Plane = _ray().open_ray(address, given)
        return plane
    if address.startswith(REMOTE):
        return _connection_to(address, given)
    if is_postgres(address):
        base, run = split_run(address)
        # Without settings of a plane, the database only tells where the run's plane listens. With them, open it here.
        if not given.keys() - _CALLERS:
            return _connection_to(with_run(base, str(given.get("run", run))), {"run": run} | given)
        given |= {"log": base} | ({"run": run} if "#" in address else {})
        address = ""
    if "://" in address:
        raise unknown_address(address, [*REMOTE, _RAY])
    if where == "memory":
        raise ConfigError("memory: neither a folder nor an address; give 'memory:', or './memory' for a folder")
    if isinstance(where, str):
        check_where(where)
    from penstock.client.embedded import open_embedded

    return open_embedded(address, given)


def _check_place(where: object) -> None:
    """Reject anything but a path: an unset variable must not open a folder called None, or a plane in memory."""
    if not isinstance(where, (str, os.PathLike)) or where == "":
        raise ConfigError(f"open: {where!r}; give a folder, 'memory:', or an address such as tcp://HOST:PORT")


def _cluster_settings() -> type[Any]:
    from penstock.plane import ClusterSettings

    return ClusterSettings


def _cluster_timeouts() -> Timeouts:
    from penstock.plane import CLUSTER_TIMEOUTS

    return CLUSTER_TIMEOUTS


def _plane_settings() -> type[Any]:
    from penstock.plane import PlaneSettings

    return PlaneSettings


# A Ray plane has all settings there are. Their defaults are shown as those of a plane in a folder, the usual case.
_signature = LateSignature(open, _cluster_settings, _plane_settings)
open.__signature__ = _signature  # type: ignore[attr-defined]


def _ray() -> Any:
    """Import `penstock.ray`, which builds on this package. Only ray:// addresses need it."""
    return importlib.import_module("penstock.ray")


def _connection_to(address: str, given: dict[str, Any]) -> Plane:
    """Connect to a plane elsewhere, which got its settings when it was started."""
    if theirs := [name for name in given if name not in _CALLERS]:
        from penstock.client.embedded import check_known

        check_known(address, given)
        raise ConfigError(f"{address}: {', '.join(theirs)}: the plane there has its own settings; leave them out")
    keys = given.get("keys")
    timeouts, run = given.get("timeouts"), given.get("run", "")
    handle = Handle.of(address, run, keys, timeouts)
    from penstock.client.plane import Plane  # a rank does not need it

    return Plane(
        lambda: client_transport(address, keys),
        url=address,
        run=run,
        timeouts=timeouts,
        handle=handle,
    )


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
    """Connect one rank to a plane elsewhere and return its source of steps.

    `resume_step` is one above the last step of the checkpoint that is loaded. By default the rank continues at the
    first uncommitted step.
    """
    from penstock.client.source import Source
    from penstock.client.source_settings import SourceSettings

    handle = Handle.of(_checked_url(url), run, keys, timeouts)
    settings = SourceSettings(
        rank=rank,
        world=world,
        replica=replica,
        replicas=replicas,
        resume_step=resume_step,
        prefetch=prefetch,
        run=run,
        timeouts=timeouts or (_cluster_timeouts() if url.startswith(_RAY) else Timeouts()),
    )
    return Source(client_transport(url, keys), settings, handle=handle)  # last: a transport must be closed


def _checked_url(url: object) -> str:
    if not isinstance(url, str):
        raise ConfigError(f"connect: {url!r:.80}; give the address of a plane as text, such as 'tcp://HOST:PORT'")
    return url


def client_transport(url: str, keys: str | Path | None = None) -> ClientTransport:
    """Return the client transport for an address."""
    if url.startswith(_RAY):
        end: ClientTransport = _ray().connect_ray(url)
        return end
    pair = None if keys is None else ClientKeys.load(keys)
    if is_postgres(url):
        from penstock.transport import ResolvingClient

        check_address(split_run(url)[0])
        return ResolvingClient(partial(_address_in_log, url, pair))
    if url.startswith(("tcp://", "ipc://")):
        return SocketClient(url, keys=pair)
    if url.startswith("file://"):
        from penstock.transport import FileClient

        return FileClient(url.removeprefix("file://"))
    raise unknown_address(url, [*REMOTE, _RAY])


def _address_in_log(url: str, keys: ClientKeys | None) -> Address:
    """Return the address that the run's plane wrote into its log. Raises PlaneLost if there is none."""
    from penstock.log import reading_postgres
    from penstock.plane import listens_at

    with reading_postgres(url) as log:
        urls = listens_at(log) if log.tables() else []
    if not urls:
        raise PlaneLost(f"{redacted(url)}: no plane of this run has listened yet; start one with `penstock serve`")
    from penstock.transport import Address

    return Address(urls[0], keys)


def unknown_address(url: str, known: Sequence[str]) -> ConfigError:
    return ConfigError(f"address {url!r}: must begin with one of {', '.join(known)}")
