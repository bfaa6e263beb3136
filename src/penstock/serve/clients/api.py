"""`open` and `connect`: from an address to a plane or a rank's source.

runs/demo            a folder: a durable plane in this process
memory:              a plane in this process, nothing durable
tcp://HOST:PORT      a plane elsewhere, over sockets
ipc://PATH           a plane on this host
shm+ipc://PATH       the same, payloads through shared memory
file://FOLDER        a plane elsewhere, over a shared filesystem
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, PenstockError
from penstock.hold import Fifo, Limiter, Selector
from penstock.pack import Cost, Packing
from penstock.send.carrier import ClientCarrier, PlaneCarrier
from penstock.send.files import FileClient, FilePlane
from penstock.send.keys import ClientKeys, PlaneKeys
from penstock.send.memory import MemoryPlane
from penstock.send.shared_memory import SharedClient, SharedPlane
from penstock.send.sockets import SocketClient, SocketPlane
from penstock.send.timeouts import Timeouts
from penstock.serve.clients.plane import Plane
from penstock.serve.clients.source import Source
from penstock.serve.decisions.log import Log
from penstock.serve.process.server import Server
from penstock.serve.settings import PlaneSettings, Replay, Target

logger = logging.getLogger("penstock.plane")
_REMOTE = ("tcp://", "ipc://", "shm+ipc://", "file://")


def open(  # noqa: A001 - ps.open is what it is called
    where: str | Path,
    *,
    ranks: int | None = None,
    seq_len: int | None = None,
    micro_batch_max_tokens: int | None = None,
    groups_per_step: int | None = None,
    samples_per_step: int | None = None,
    tokens_per_step: int | None = None,
    sampler: Selector | None = None,
    remover: Selector | None = None,
    limiter: Limiter | None = None,
    capacity: int = 1 << 16,
    max_times_sampled: int | None = 1,
    max_staleness: int | None = None,
    seed: int = 0,
    cost: Cost | None = None,
    packing: dict[str, Any] | None = None,
    run: str = "run",
    replicas: int = 1,
    shares: Mapping[str, float] | None = None,
    evict_after: int | None = 3,
    max_held_bytes: int = 4 << 30,
    max_disk_bytes: int | None = None,
    retain_steps: int = 64,
    timeouts: Timeouts | None = None,
    listen: Sequence[str] = (),
    keys: str | Path | None = None,
) -> Plane:
    """A plane: in this process for a folder or "memory:", a line to one elsewhere for an address.

    `packing` takes further settings of `penstock.pack`; `listen` lists addresses where other processes may join;
    `shares` divides the trainer between runs or adapters, named as in `Sample.run`, by weight.

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
    address = str(where)
    if address.startswith(_REMOTE):
        if ranks is not None or seq_len is not None:
            raise ConfigError(f"{address}: the plane there has its own ranks and seq_len; leave them out")
        return Plane(lambda: client_carrier(address, keys), url=address, timeouts=timeouts)
    if ranks is None or seq_len is None:
        raise ConfigError(f"{address}: a plane in this process needs ranks and seq_len")
    settings = PlaneSettings(
        packing=Packing(
            ranks=ranks,
            seq_len=seq_len,
            micro_batch_max_tokens=micro_batch_max_tokens,
            cost=cost or Cost(),
            **(packing or {}),
        ),
        target=Target(groups=groups_per_step, samples=samples_per_step, tokens=tokens_per_step),
        run=run,
        replay=Replay(
            capacity=capacity,
            sampler=sampler or Fifo(),
            remover=remover,
            limiter=limiter,
            max_times_sampled=max_times_sampled,
            max_staleness=max_staleness,
            seed=seed,
        ),
        replicas=replicas,
        shares=dict(shares or {}),
        evict_after=evict_after,
        max_held_bytes=max_held_bytes,
        max_disk_bytes=max_disk_bytes,
        retain_steps=retain_steps,
        timeouts=timeouts or Timeouts(),
    )
    return open_settings(address, settings, listen=listen, keys=keys)


def open_settings(
    where: str, settings: PlaneSettings, *, listen: Sequence[str] = (), keys: str | Path | None = None
) -> Plane:
    """A plane in a thread of this process."""
    memory = MemoryPlane()
    log = Log(None if where == "memory:" else where, max_disk_bytes=settings.max_disk_bytes)
    try:
        others = [plane_carrier(url, keys) for url in listen]
        server = Server(settings, log, [memory, *others])
    except BaseException:
        log.close()
        raise
    thread = threading.Thread(target=_run, args=(server,), name="penstock-plane", daemon=True)
    thread.start()
    return Plane(memory.connect, url=where, timeouts=settings.timeouts, server=server, thread=thread)


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
    resume_step: int = 1,
    prefetch: int = 1,
    run: str = "",
    keys: str | Path | None = None,
    timeouts: Timeouts | None = None,
) -> Source:
    """One rank's source of steps, from a plane elsewhere."""
    return Source(
        client_carrier(url, keys),
        rank=rank,
        world=world,
        run=run,
        replica=replica,
        replicas=replicas,
        resume_step=resume_step,
        prefetch=prefetch,
        timeouts=timeouts,
    )


def client_carrier(url: str, keys: str | Path | None = None) -> ClientCarrier:
    """A client's end of the carrier that an address names."""
    pair = None if keys is None else ClientKeys.load(keys)
    if url.startswith("shm+ipc://"):
        return SharedClient(url.removeprefix("shm+"), keys=pair)
    if url.startswith(("tcp://", "ipc://")):
        return SocketClient(url, keys=pair)
    if url.startswith("file://"):
        return FileClient(url.removeprefix("file://"))
    raise ConfigError(f"address {url!r}: must begin with one of {', '.join(_REMOTE)}")


def plane_carrier(url: str, keys: str | Path | None = None) -> PlaneCarrier:
    """The plane's end of the carrier that an address names."""
    if url.startswith("shm+ipc://"):
        return SharedPlane(url.removeprefix("shm+"))
    if url.startswith(("tcp://", "ipc://")):
        return SocketPlane(url, keys=None if keys is None else PlaneKeys.load(keys))
    if url.startswith("file://"):
        return FilePlane(url.removeprefix("file://"))
    raise ConfigError(f"address {url!r}: must begin with one of {', '.join(_REMOTE)}")
