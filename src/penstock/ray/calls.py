"""All calls to Ray: list nodes; start, find, call and end actors.

Only documented functions of Ray are used. An actor's handle is looked up once per process: `ray.get_actor` can block
for seconds while a node dies, a call on a handle cannot. Ray's errors become ours here.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any, TypeAlias

from penstock import errors
from penstock.errors import ConfigError, PenstockError, PlaneLost
from penstock.extras import require
from penstock.transport import Address, ClientKeys

Handle: TypeAlias = Any
"""Handle of an actor. Ray has no type for it."""
NAMESPACE = "penstock"
"""Every job has a namespace of its own; this one is fixed, so planes are found from all jobs."""
CALL_S = 10.0
"""How long a call on an actor may take. All of our methods answer at once."""
_LOOK_S = 0.05
_HEAD = "node:__internal_head__"
"""The resource that only a cluster's head node has."""
_ACTOR_BYTES = 1 << 20
"""Memory to ask for. Ray ignores the preferred node of an actor that asks for nothing."""
_A_LITTLE = 0.001
"""Amount to ask for of a resource that a node has once. The smallest amount that Ray counts is a tenth of this."""
_handles: dict[str, Handle] = {}
_lock = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node that is up."""

    id: str
    """Changes whenever Ray is restarted there."""
    ip: str
    """Address for other nodes. The same for all nodes of one host, and after a restart of Ray."""
    is_head: bool


def actor_of(plane: str) -> str:
    """Return the Ray name of a plane's actor."""
    return f"plane:{plane}"


def record_name(plane: str) -> str:
    """Return the Ray name of the actor that keeps a plane's record."""
    return f"record:{plane}"


def attach() -> None:
    """Join the cluster: the one this process is in, the one that RAY_ADDRESS names, or the one of this host."""
    require("ray://", "ray")
    import ray

    if ray.is_initialized():
        return
    _check_answers(os.environ.get("RAY_ADDRESS", ""))
    try:
        ray.init(address="auto", logging_level="WARNING", log_to_driver=False)
    except ConnectionError as error:
        raise ConfigError(
            f"ray://: no Ray cluster found: {str(error).splitlines()[0]}; start one with `ray start --head`, call "
            "ray.init first, or set RAY_ADDRESS"
        ) from None


def _check_answers(address: str) -> None:
    """Raise ConfigError if nothing listens at HOST:PORT. Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return  # "auto", ray://..., or nothing: Ray resolves these itself
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CALL_S).close()
    except OSError as error:
        raise ConfigError(
            f"RAY_ADDRESS={address}: no Ray cluster answers there ({error}); start one with `ray start --head`, or "
            "correct RAY_ADDRESS"
        ) from None


def nodes() -> list[Node]:
    """Return the nodes that are up, as far as Ray knows."""
    import ray

    return [
        Node(id=found["NodeID"], ip=found["NodeManagerAddress"], is_head=_HEAD in found.get("Resources", {}))
        for found in ray.nodes()
        if found["Alive"]
    ]


def head_node() -> str | None:
    """Return the id of the head node, or None if it is down."""
    return next((node.id for node in nodes() if node.is_head), None)


def my_address() -> str:
    """Return the address at which other nodes reach this one."""
    import ray

    return str(ray.util.get_node_ip_address())


def my_node() -> str:
    """Return the id of the node that this process is on."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def start(kind: type[Any], name: str, *arguments: object, node: str | None, pinned_to: str | None = None) -> Handle:
    """Start an actor of this class and name that outlives its caller. Returns the existing one if there is one.

    It starts on `node` if that is up. With `pinned_to`, the address of a host, it runs on nodes of that host only, and
    waits while there is none. Ray does not retry failed calls: the caller knows whether a repetition is safe.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    made = (
        ray.remote(kind)
        .options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            memory=_ACTOR_BYTES,
            # Every node has the resource node:ADDRESS. A node's id changes when Ray is restarted on its host, its
            # address does not: so Ray restarts the plane by itself when the host is back.
            resources=None if pinned_to is None else {f"node:{pinned_to}": _A_LITTLE},
            max_restarts=-1,
            max_task_retries=0,
            scheduling_strategy="DEFAULT" if node is None else NodeAffinitySchedulingStrategy(node, soft=True),
        )
        .remote(*arguments)
    )
    with _lock:
        _handles[name] = made
    return made


def find(name: str, *, refresh: bool = False) -> Handle | None:
    """Return the actor of this name, or None if there is none. `refresh` asks Ray again instead of using the handle
    found before."""
    import ray

    if not ray.is_initialized():  # get_actor would join or even start a cluster by itself
        raise PlaneLost(f"{name}: this process has left the Ray cluster")
    if refresh:
        forget(name)
    with _lock:
        if name in _handles:
            return _handles[name]
    try:
        found = ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise PlaneLost(f"{name}: Ray could not look it up: {_first_line(error)}") from None
    with _lock:
        _handles[name] = found
    return found


def ask(name: str, method: str, *arguments: object, timeout_s: float = CALL_S) -> Any:
    """Call a method of an actor. Raises PlaneLost if it does not exist, is restarting, or does not answer in time."""
    import ray

    handle = find(name)
    if handle is None:
        raise PlaneLost(f"{name}: the Ray cluster has no such actor; it was never started, or it was ended")
    try:
        return ray.get(getattr(handle, method).remote(*arguments), timeout=timeout_s)
    except (ray.exceptions.ActorDiedError, ray.exceptions.ActorUnschedulableError) as error:
        forget(name)  # a restart makes another actor of that name, with another handle
        raise PlaneLost(f"{name}: the actor has ended: {_first_line(error)}") from None
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise PlaneLost(f"{name}: the actor does not answer: {_first_line(error)}") from None


def address_in(name: str, answer: dict[str, Any]) -> Address:
    """Return the address in the answer of a plane's actor. Raises the error that kept the plane from starting."""
    if "error" in answer:
        kind, message = answer["error"]
        found = getattr(errors, kind, PenstockError)
        raise found(message) if issubclass(found, PenstockError) else PenstockError(message)
    if "waiting" in answer or not answer:
        raise PlaneLost(f"{name}: {answer.get('waiting', 'the plane is starting')}")
    keys = ClientKeys(public=answer["public"], secret=answer["secret"], plane=answer["plane"])
    return Address(answer["url"], keys)


def forget(name: str) -> None:
    with _lock:
        _handles.pop(name, None)


def end(name: str) -> None:
    """End an actor for good. Does nothing if there is none."""
    import ray

    handle, deadline = find(name), time.monotonic() + CALL_S
    if handle is None:
        return
    ray.kill(handle, no_restart=True)
    while find(name, refresh=True) is not None and time.monotonic() < deadline:  # ray.kill returns before it is done
        time.sleep(_LOOK_S)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
